"""Logs verdict, deploy command and latency of each measured run on the run's page in MLflow.

The page of a sweep gets the sweep's answer.
"""

import logging
import time
from collections.abc import Sequence

from resnet8ptq.core import background, invocation
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.text import code_span, escape_markdown
from resnet8ptq.report.answer import explain, say_facts, say_verdict, to_markdown
from resnet8ptq.report.families import Cell
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.report.table import VOID
from resnet8ptq.tracking import metrics
from resnet8ptq.tracking.journal import NOTE_TAG, Point
from resnet8ptq.tracking.mlflow_store import upload
from resnet8ptq.tracking.mlflow_store.store import Store, is_away

log = logging.getLogger(__name__)

# The texts of runs without a verdict on their page
BASELINE = "baseline"
SELECTION = "selection samples"


Addition = tuple[str, list[Point], dict[str, str]]  # a run's id, latencies and tags


def log_answers(store: Store, parent_id: str, chosen: Sequence[ModelSelection]) -> None:
    """Log the answer on the page of a sweep or a single run, and verdicts on the runs' pages.

    On the page of a measured single run, the run's description then replaces the answer.
    """
    if chosen:
        answers = [to_markdown(explain(selected)) for selected in chosen]
        note = "\n\n".join(filter(None, answers))
        background.ask(upload.describe, store, parent_id, note or "No model is recommended.")
    log_run_pages(store, chosen)


def log_run_pages(store: Store, chosen: Sequence[ModelSelection]) -> None:
    """Log verdict, description and latencies of measured runs, in the background.

    Runs without an id in the store are left out.
    """
    now_ms = int(1000 * time.time())
    additions: list[Addition] = []
    for selected in chosen:
        for cell in selected.family.cells:
            record = cell.record
            # A run without an id in the store is named by its key
            if cell.paired is not None and record.run_id != record.key:
                points: list[Point] = []
                for key, value in _show_latencies(selected, cell).items():
                    points.append((key, value, now_ms, 0))
                tags = {"verdict": _say_outcome(cell), NOTE_TAG: describe(selected, cell)}
                additions.append((record.run_id, points, tags))
    background.put(_log, store, additions)


def _log(store: Store, additions: Sequence[Addition]) -> None:
    """Log the additions; warn if the store is unavailable."""
    try:
        for run_id, points, tags in additions:
            upload.log_batch(store, run_id, points, tags=tags)
    except TrackingError as error:
        if not is_away(error):
            raise
        log.warning("the verdicts are not in MLflow: %s", error)


def _say_outcome(cell: Cell) -> str:
    if not cell.record.quantized:
        return BASELINE
    if cell.record.split == "choice":
        return SELECTION
    return cell.record.verdict_text


def describe(selected: ModelSelection, cell: Cell) -> str:
    """Return the description of a measured run in Markdown: verdict, facts, deploy command.

    FP32 and the steps of a search have no verdict here. A void run and a file of another program
    have no command.
    """
    record = cell.record
    lines = []
    if record.verdict is not None and record.split != "choice":
        sentence = say_verdict(record)
        lines.append(f"**{escape_markdown(record.verdict)}**: {escape_markdown(sentence)}")
    lines.append(escape_markdown("; ".join(say_facts(record))))
    if record.deploy_words and record.verdict != VOID:
        lines.append(code_span(invocation.command("deploy", *record.deploy_words)))
    return "\n\n".join(lines)


def _show_latencies(selected: ModelSelection, cell: Cell) -> dict[str, float]:
    """Return the latencies to log on a run's page, by their names in MLflow.

    Latencies measured in turns and those of a run that was timed alone have different names, so
    that MLflow does not compare them. The result is empty for a single run, which has logged them
    itself. It is also empty if only other runs of the family were timed in turns.
    """
    record = cell.record
    timing = selected.timing
    if timing is not None and record.run_id in timing.single:
        return metrics.show_latencies(record.metrics)
    if timing is None and record.sweep_id:
        return metrics.show_latencies(record.metrics, metrics.ALONE)
    return {}
