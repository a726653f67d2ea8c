"""Replaces the measurements of a run by those of another machine.

    resnet8ptq deploy measure=true folder=out     writes out/measure: the program and its job
    python measure.py > result                    on the target, in a copy of that folder
    resnet8ptq measured result                    here

The job holds the run's file, FP32's and the scored samples. The program needs Python 3.9 or newer,
numpy and the file's runtime. Afterwards, the run's metrics on these samples, predictions,
latencies, kernels and verdict are those of that machine; the metrics `target/...` show the
difference from this machine. The metrics on selection samples stay as they are. `experiment=`,
`uri=` and `root=` name the MLflow store, `trust=true` and `cache_dir=` are those of
`resnet8ptq deploy`.
"""

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from resnet8ptq.backends.contract import Artifact
from resnet8ptq.core import command, files, invocation
from resnet8ptq.core.console import silenced, waiting
from resnet8ptq.core.errors import ConfigError, ModelError, errors_as
from resnet8ptq.deploy import reproducing, source
from resnet8ptq.deploy.reproducing import Scored
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.evaluation.evaluator import Compared, Evaluator, Quantized
from resnet8ptq.evaluation.result import Measurement, RunResult
from resnet8ptq.experiment import outputs
from resnet8ptq.experiment.measurement import (
    LAYERS,
    compare_machines,
    find_execution,
    find_p_within,
    find_silent,
    time_beside_fp32,
)
from resnet8ptq.report import terminal
from resnet8ptq.report.pages import run_pages
from resnet8ptq.report.recommend import RECOMMENDED
from resnet8ptq.results import lookup
from resnet8ptq.target.carried import Carried, JobWriter
from resnet8ptq.target.measure import CPU, RUNTIMES
from resnet8ptq.tasks.scoring.metric import Metrics
from resnet8ptq.tracking import details, origin
from resnet8ptq.tracking import metrics as journal_metrics
from resnet8ptq.tracking.journal import CARRIED_TAG, Journal
from resnet8ptq.tracking.mlflow_store import upload
from resnet8ptq.tracking.mlflow_store.store import Store, StoreArguments, open_store

FOLDER = "measure"


@dataclass
class Arguments(StoreArguments):
    """The settings of `resnet8ptq measured`, as key=value."""

    result: str = ""
    trust: bool = False
    cache_dir: str | None = None


def main(words: list[str]) -> None:
    """Read the result file, find its run, and replace the measurements of the run.

    Raises:
        ConfigError: the result file is missing, damaged, or does not fit its run; the run cannot be
            measured on another machine; or FP32 is broken there.
        PtqError: see `Carried`, `source.find_run`, `source.fetch_run` and
            `reproducing.open_samples`.
    """
    asked = command.parse_words(words, Arguments, __doc__, plain="result")
    if not asked.result:
        raise ConfigError("result: missing, expected the output of python measure.py > result")
    carried = Carried(files.expand(asked.result))
    with waiting("Reading the run"):
        store = open_store(asked.tracking)
        record, _ = source.find_run(store, carried.run_id, sweep=None, use=RECOMMENDED, asked={})
    with tempfile.TemporaryDirectory() as scratch:
        run = source.fetch_run(store, record, Path(scratch), trust=asked.trust)
        with waiting("Reading the run's samples"), silenced():
            scored = _open(run, asked.cache_dir)
        wrong = f"result: got {asked.result}, whose outputs do not fit the run"
        try:
            with errors_as(ConfigError, wrong):  # anyone may have written the result
                result = _measure(run, scored, replace(scored.evaluator, target=carried))
        except ModelError:  # outputs without a row for each sample
            raise ConfigError(wrong) from None
        with waiting("Replacing the run's result"):
            _replace_result(store, run, scored, result)

    # The new figures may change the verdicts of the whole sweep
    selections = lookup.find_in_store(store, record.run_id, None).select({})
    run_pages.log_run_pages(store, selections)
    for selected in selections:
        own = [cell for cell in selected.family.cells if cell.record.run_id == record.run_id]
        if own:
            terminal.print_families([replace(selected.family, cells=tuple(own))])


def write_program(run: SourceRun, scored: Scored | str, folder: Path) -> str:
    """Write the program and its job into `folder`; return a line on their use.

    Raises:
        ConfigError: the run's samples are missing, its scoring could stop early, or its runtime or
            execution provider cannot be measured on another machine.
    """
    _refuse_provider("measure", run)
    _refuse_stopped("measure", run)
    runtime = run.backend.runtime
    if runtime not in RUNTIMES:
        raise ConfigError(
            f"measure: got true for a file of {runtime}, expected one of {', '.join(RUNTIMES)}"
        )
    if isinstance(scored, str):
        raise ConfigError(f"measure: got true, but the run's samples are missing ({scored})")

    # A target that only records the requests writes the job
    folder.mkdir()
    recorder = JobWriter(
        folder,
        python=invocation.shell(sys.executable),
        run_id=run.record.run_id,
        timeout_s=run.config.target.timeout_s,
    )
    with closing(recorder):
        _run(run, scored, replace(scored.evaluator, target=recorder))
    return f"To measure elsewhere, copy {FOLDER} there: python measure.py > result"


def _run(
    run: SourceRun, scored: Scored, evaluator: Evaluator
) -> tuple[Compared, Metrics, dict[str, str]]:
    """Evaluate the file and FP32, time both in turns, and find the kernels, on the target.

    A file that only simulates integer kernels is not timed.
    """
    samples = scored.samples
    compared = evaluator.compare(run.artifact, samples, logits=False)
    # No time limit: the calls that write a job and read its result must request the same times.
    timing = replace(run.config.latency, max_seconds=math.inf)
    resolved = evaluator.quantizer.resolve()
    times: Metrics = {}
    if resolved.execution != "simulated":
        times = time_beside_fp32(evaluator, timing, run.artifact, samples)
    layers = int(run.record.metrics.get(LAYERS, 0))
    artifact = Artifact(run.artifact, quantized_layers=layers)
    quantized = Quantized(artifact, artifact.size_bytes, seconds=0.0)
    return compared, times, find_execution(evaluator, resolved, quantized, samples)


def _measure(run: SourceRun, scored: Scored, evaluator: Evaluator) -> RunResult:
    """Return the result of the run on the target.

    Raises:
        ConfigError: FP32 itself is broken on the target, so that a verdict would be void.
    """
    compared, times, params = _run(run, scored, evaluator)
    task = evaluator.task
    doubt = task.doubt(compared.comparison.baseline, run.config.report.expected_accuracy)
    if doubt is not None:
        raise ConfigError(
            f"result: FP32 {task.metric.title.upper()} there {doubt}, so no verdict would be "
            "valid; expected a machine whose runtime runs FP32 correctly"
        )

    # Compute the values that a run on the target would log
    samples = scored.samples
    evaluation = compared.evaluation
    metrics = times | compare_machines(evaluator, run.artifact, samples, evaluation)
    metrics["paired/p_within"] = find_p_within(run.config, task, compared.comparison, samples)
    assert evaluator.target is not None
    params["measured_on"] = evaluator.target.say(run.backend.runtime)
    params["outputs_sha256"] = evaluation.outputs.sha256
    silent = find_silent(evaluator, compared, samples)
    if silent:
        params["silent"] = silent
    measurement = Measurement(
        task=task,
        comparison=compared.comparison,
        size_bytes=run.artifact.stat().st_size,
        metrics=metrics,
        silent=silent,
        outputs_sha256=evaluation.outputs.sha256,
    )
    return RunResult("ok", measurement=measurement, resolved=params)


def _replace_result(store: Store, run: SourceRun, scored: Scored, result: RunResult) -> None:
    """Replace the run's metrics and the files of its predictions, in the store.

    For a run made here, the run's own folder gets them too.
    """
    record = run.record
    measurement = result.measurement
    assert measurement is not None
    stale = _find_stale(record.metrics, measurement)
    values = {key: value for key, value in record.metrics.items() if key not in stale}
    values |= result.to_metrics()

    # The journal of a run made here has curves and times that the store's record lacks
    own = origin.own_folder(record)
    journal = Journal(record.name, store.experiment_name) if own is None else Journal.load(own)
    journal.params = {**record.params, **result.resolved}
    if not measurement.silent:
        journal.params.pop("silent", None)  # this param is about the previous machine
    carried = {CARRIED_TAG: result.resolved["measured_on"]}
    journal.tags = {**record.tags, **journal.tags, **carried}
    journal.points = [point for point in journal.points if point[0] not in stale]
    journal.note(values)

    # Write the files as the run would have written them
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outputs.write_scores(folder, run.config, measurement, scored.samples)
        details.write_result(folder, journal)
        upload.log_files(store, record.run_id, folder.iterdir())
        if own is not None:
            for path in folder.iterdir():
                with files.atomic(own / path.name) as temporary:
                    shutil.copyfile(path, temporary)
            journal.save(own)

    # Update the plain names of latencies too: a sweep has logged them, and the record reads them
    # first.
    shown = journal_metrics.show_latencies(values)
    now_ms = int(1000 * time.time())
    points = [(key, value, now_ms, 0) for key, value in shown.items()]
    points += journal_metrics.select(journal)
    upload.log_batch(store, record.run_id, points, tags=carried)


def _find_stale(metrics: Iterable[str], measurement: Measurement) -> set[str]:
    """Return the names of the metrics that the measurement replaces or makes invalid.

    Args:
        metrics: the names of the run's metrics.
    """
    groups = ("class/", "ci95/", "paired/", "target/", "batch1/")
    stale = set(measurement.task.metrics(measurement.comparison))
    stale.update(key for key in metrics if key.startswith(groups))
    return stale


def _refuse_provider(key: str, run: SourceRun) -> None:
    """Raise `ConfigError` unless the run's execution provider is the CPU's, on which a job runs."""
    provider = run.config.backend.provider
    if provider != CPU:
        raise ConfigError(
            f"{key}: run {run.record.run_id} has backend.provider={provider}, and a job runs on "
            f"the CPU; expected a run with backend.provider={CPU}, or try target.command"
        )


def _refuse_stopped(key: str, run: SourceRun) -> None:
    if run.record.stopped_early:
        raise ConfigError(
            f"{key}: run {run.record.run_id} stopped at its verdict, which depends on this "
            "machine; expected a run with evaluate.stop=all"
        )


def _open(run: SourceRun, cache_dir: str | None) -> Scored:
    _refuse_provider("result", run)
    _refuse_stopped("result", run)
    scored = reproducing.open_samples(run, cache_dir)
    if isinstance(scored, str):
        raise ConfigError(f"result: the samples of run {run.record.run_id} are missing ({scored})")
    return scored
