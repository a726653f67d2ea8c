"""Adds the figures of another machine to a run, measured there by hand.

    resnet8ptq deploy measure=true folder=out     writes out/measure: the program and its job
    python measure.py > result                    on the target, in a copy of that folder
    resnet8ptq measured result                    here

The job holds the run's file, FP32's and the scored samples, and the program needs Python 3.9, numpy
and the file's runtime. The result gets its verdict here, by the run's metric and limit,
and is logged to the run as metrics `target/...`. `experiment=`, `uri=` and `root=` name the MLflow
store, `trust=true` and `cache_dir=` are those of `resnet8ptq deploy`.
"""

import math
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from resnet8ptq.core import command, invocation
from resnet8ptq.core.console import say, silenced, stdout, waiting
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.deploy import reproducing, source
from resnet8ptq.deploy.reproducing import Scored
from resnet8ptq.deploy.source import Source
from resnet8ptq.evaluation.evaluator import Compared, Evaluator
from resnet8ptq.experiment.measurement import compare_machines, find_p_within, time_beside_fp32
from resnet8ptq.report.recommend import RECOMMENDED
from resnet8ptq.target.carried import Carried, Recorder
from resnet8ptq.target.measure import RUNTIMES
from resnet8ptq.tasks.scoring.metric import BASELINE, Metrics
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE
from resnet8ptq.tracking.mlflow_store import upload
from resnet8ptq.tracking.mlflow_store.store import StoreArguments, open_store

FOLDER = "measure"


@dataclass
class Arguments(StoreArguments):
    """The settings of `resnet8ptq measured`, as key=value."""

    result: str = ""
    trust: bool = False
    cache_dir: str | None = None


def main(words: list[str]) -> None:
    """Read the result, find its run, judge it, and log its figures."""
    asked = command.parse_words(words, Arguments, __doc__, plain="result")
    if not asked.result:
        raise ConfigError("result: missing, expected the output of python measure.py > result")
    carried = Carried(Path(asked.result).expanduser())
    with waiting("Reading the run"):
        store = open_store(asked.tracking)
        record, _ = source.find(store, carried.run_id, None, RECOMMENDED, {})
    with tempfile.TemporaryDirectory() as scratch:
        run = source.fetch(store, record, Path(scratch), trust=asked.trust)
        with waiting("Reading the run's samples"), silenced():
            scored = _open(run, asked.cache_dir)
        evaluator = replace(scored.evaluator, target=carried)
        metrics, lines = _measure(run, scored, evaluator)
    machine = carried.say(run.backend.runtime)
    points = [(key, value, int(time.time() * 1000), 0) for key, value in metrics.items()]
    upload.log_batch(store, record.run_id, points, tags={"target/machine": machine})
    console = stdout(None, 130)
    for line in (f"{record.name}, measured on {machine}", *lines):
        say(console, line)


def write(run: Source, scored: Scored | str, folder: Path) -> str:
    """Write the program and its job into `folder`; return what to do with them.

    Raises:
        ConfigError: the run's samples are missing, or its runtime is not measured elsewhere.
    """
    runtime = run.backend.runtime
    if runtime not in RUNTIMES:
        raise ConfigError(
            f"measure: got true for a file of {runtime}, expected one of {', '.join(RUNTIMES)}"
        )
    if isinstance(scored, str):
        raise ConfigError(f"measure: got true, but the run's samples are missing ({scored})")
    folder.mkdir()
    timeout_s = run.config.target.timeout_s
    recorder = Recorder(folder, invocation.shell(sys.executable), run.record.run_id, timeout_s)
    with closing(recorder):
        _run(run, scored, replace(scored.evaluator, target=recorder))
    return f"To measure elsewhere, copy {FOLDER} there: python measure.py > result"


def _run(run: Source, scored: Scored, evaluator: Evaluator) -> tuple[Compared, Metrics]:
    """Evaluate the file and FP32, and time both in turns, on the evaluator's target."""
    compared = evaluator.compare(run.artifact, scored.samples, logits=False)
    # Without a limit, which neither side can keep: both must ask for the same times.
    timing = replace(run.config.latency, max_seconds=math.inf)
    return compared, time_beside_fp32(evaluator, timing, run.artifact, scored.samples)


def _measure(
    run: Source, scored: Scored, evaluator: Evaluator
) -> tuple[dict[str, float], list[str]]:
    """Return the target's metrics, and the lines to print."""
    compared, times = _run(run, scored, evaluator)
    metric = evaluator.task.metric
    comparison = compared.comparison
    between = compare_machines(evaluator, run.artifact, scored.samples, compared.evaluation)
    model = comparison.model.value
    fp32 = comparison.baseline.value
    own = {metric.name: model, f"fp32_{metric.name}": fp32}
    own |= {key.replace(BASELINE, "fp32_"): value for key, value in times.items()}
    found = {f"target/{key}": value for key, value in own.items()} | between
    metrics = {key: value for key, value in found.items() if value is not None}
    here = metrics[f"target/here_{metric.name}"]
    title = metric.title
    show = metric.show
    lines = [f"{title}: {show(model)} there, {show(here)} here; FP32 {show(fp32)} there"]
    p_within = find_p_within(run.config, evaluator.task, comparison, scored.samples)
    if p_within is not None:
        metrics["target/p_within"] = p_within
        limit = metric.say_limit(metric.limit(run.config.report))
        shown = "shown" if p_within <= SIGNIFICANCE else "not shown"
        lines.append(f"{limit} there: {shown} with 95% confidence")
    latency = metrics["target/latency_p50_ms"]
    speedup = metrics["target/speedup"]
    lines.append(f"{latency:.3f} ms there, {speedup:.2f} times as fast as FP32")
    if "target/sqnr_db" in metrics:
        lines.append(f"outputs there against those here: {metrics['target/sqnr_db']:.1f} dB")
    return metrics, lines


def _open(run: Source, cache_dir: str | None) -> Scored:
    scored = reproducing.open_samples(run, cache_dir)
    if isinstance(scored, str):
        raise ConfigError(f"result: the samples of run {run.record.run_id} are missing ({scored})")
    return scored
