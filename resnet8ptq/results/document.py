"""The verdict as JSON (`docs/verdict.schema.json`), and as Markdown for a pull request."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from resnet8ptq.core import templates
from resnet8ptq.core.text import escape_markdown, printable
from resnet8ptq.report import table, verdicts
from resnet8ptq.report.table import VOID
from resnet8ptq.results.summaries import UNSUPPORTED, RunSummary, SweepSummary
from resnet8ptq.tasks.metric import Metric

SCHEMA = 1  # raised when a field is removed or changes its meaning
EXIT_CODES = {**verdicts.EXIT_CODES, UNSUPPORTED: 4}


@dataclass(frozen=True)
class Answer:
    """A verdict and its run.

    Attributes:
        run: None if the sweep recommends no run for the use.
        sweep: the run's sweep; None for a single run.
        use: the requested use; empty for a run chosen by id or folder.
        because: the reason for this run, or for none; empty for a run chosen by id or folder.
    """

    verdict: str
    run: RunSummary | None
    sweep: SweepSummary | None = None
    use: str = ""
    because: str = ""

    @property
    def exit_code(self) -> int:
        """Process exit code for CI; docs/verdict.md lists the codes."""
        return EXIT_CODES[self.verdict]


def to_json(answer: Answer) -> str:
    """Return the document, without NaN and in ASCII, so that no name in it controls a terminal."""
    run = answer.run
    document = {
        "schema": SCHEMA,
        "verdict": answer.verdict,
        "exit_code": answer.exit_code,
        "use": answer.use or None,
        "because": answer.because or (run.reason if run else "") or None,
        **_describe(run),
        "files": {
            "artifact": run and run.artifact,
            "sha256": (run and run.artifact_sha256) or None,
            "report": answer.sweep and answer.sweep.report,
        },
        "commands": {
            "deploy": run and run.deploy_command,
            "reproduce": run and run.reproduce_command,
        },
        "sweep": _sweep(answer.sweep),
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _describe(run: RunSummary | None) -> dict[str, Any]:
    if run is None:
        return dict.fromkeys(["choice", "metric", "loss", "samples", "size", "latency"])
    names = ("run_id", "name", "label", "status", "framework", "dtype", "calibration", "weights")
    texts = {name: getattr(run, name) or None for name in (*names, "execution")}
    return {
        "choice": {
            **texts,
            "settings": dict(run.settings),
            "equal_runs": list(run.equal_runs),
        },
        "metric": {
            "name": printable(run.metric.name),
            "direction": run.metric.direction,
            "value": run.value,
            "fp32": run.fp32_value,
            "least": run.least,
        },
        "loss": {
            "value": run.loss,
            "upper_bound": run.loss_upper_bound,
            "lower_bound": run.loss_lower_bound,
            "limit": run.limit,
            "verdict": run.loss_verdict,
            "p_value": run.p_value,
        },
        "samples": {
            "scored": run.samples,
            "planned": run.samples_planned,
            "needed": run.samples_needed,
            "from": run.samples_from,
            "digest": run.samples_digest or None,
        },
        "size": {"bytes": run.size_bytes, "fp32_bytes": run.fp32_size_bytes},
        "latency": {
            "ms": run.latency_ms,
            "fp32_ms": run.fp32_latency_ms,
            "speedup": run.speedup,
            "batch_ms": run.batch_latency_ms,
            "cpu": run.cpu or None,
        },
    }


def _sweep(sweep: SweepSummary | None) -> dict[str, Any] | None:
    if sweep is None:
        return None
    counts = Counter(run.status for run in sweep.runs)
    return {
        "run_id": sweep.run_id,
        "name": sweep.name,
        "status": sweep.status,
        "runs": dict(counts),
        "as_good_as_best": _as_good(sweep),
    }


def _as_good(sweep: SweepSummary) -> dict[str, Any] | None:
    """Return the runs as good as the best; None without a best run, or with several."""
    best = [choice for choice in sweep.choices if choice.use == "best"]
    if len(best) != 1:
        return None
    (choice,) = best
    return {
        "best": choice.run_id,
        "margin": choice.margin,
        "shown": list(choice.equals),
        "unknown": list(choice.unknown),
    }


def to_markdown(answer: Answer) -> str:
    """Return a sentence and a short table; untrusted texts are escaped."""
    run = answer.run
    lines = [f"**Quantization: {answer.verdict}.** {describe(answer, _escape)}", ""]
    if run is not None:
        lines += [_row(["", "FP32", _escape(run.label)]), "|---|---:|---:|"]
        lines += [_row(cells) for cells in _rows(run) if any(cells[1:])]
        lines.append("")
        if run.deploy_command:
            lines += [f"    {run.deploy_command}", ""]
    return templates.tidy("\n".join(lines))


def describe(answer: Answer, show: Callable[[str], str] = printable) -> str:
    """Return the verdict as one or two sentences.

    Args:
        show: escapes untrusted texts.
    """
    run = answer.run
    if run is None:
        use = f"No model is recommended for `use={answer.use}`. " if answer.use else ""
        return f"{use}{show(answer.because)}"
    begin = show(run.label)
    if run.loss is None or run.loss_verdict is None:
        return f"{begin}: {show(run.reason)}"
    if answer.verdict == VOID:
        return f"{begin}: a loss against this FP32 network has no meaning ({show(run.reason)})."
    metric, limit = run.metric, _say_loss(run.metric, run.limit)
    name, loss = metric.loss_title.partition(",")[0], _say_loss(metric, run.loss)
    text = f"{begin}: {show(name)} is {loss}{_say_bounds(run)}; the limit is {limit}."
    if fault := run.verdict_text.partition(", ")[2]:
        text += f" It fails: {show(fault)}."
    if run.samples_needed is not None:
        text += f" Sample size for 80% power at this loss: {run.samples_needed:,}."
    return text


def _say_bounds(run: RunSummary) -> str:
    ends = [
        f"{word} {_say_loss(run.metric, bound)}"
        for word, bound in (("at least", run.loss_lower_bound), ("at most", run.loss_upper_bound))
        if bound is not None
    ]
    return f" ({', '.join(ends)}, one-sided 95% bounds, {run.samples:,} samples)" if ends else ""


def _say_loss(metric: Metric, loss: float) -> str:
    """Return a loss for a sentence: in points, in the metric's unit, or in percent of FP32's."""
    return metric.say_change(loss) if metric.bounded else metric.show_loss(loss)


def _rows(run: RunSummary) -> list[list[str]]:
    metric = run.metric
    return [
        [_escape(metric.title), *(_show(metric, value) for value in (run.fp32_value, run.value))],
        ["size, kB", *map(table.show_kb, (run.fp32_size_bytes, run.size_bytes))],
        ["latency of one sample, ms", *map(table.show_ms, (run.fp32_latency_ms, run.latency_ms))],
    ]


def _show(metric: Metric, value: float | None) -> str:
    return "" if value is None else metric.show(value)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    """Escape Markdown, and separate an @ from its name, which a pull request would notify."""
    return escape_markdown(text).replace("@", "@<!-- -->")
