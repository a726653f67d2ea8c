"""Makes, scores and times the files of one network."""

import shlex
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.config import loading
from resnet8ptq.core.errors import PtqError
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.batching import Load
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.evaluation.latency import torch_threads_kept
from resnet8ptq.evaluation.stopped_hits import read_pair
from resnet8ptq.experiment.network_and_data import fit_settings, load_data_and_network, make_task
from resnet8ptq.experiment.pipeline import run_experiment
from resnet8ptq.experiment.settings import Settings, resolve
from resnet8ptq.tasks.scoring.metric import BASELINE

ROUNDS, LEAST, SECONDS = 60, 10, 15.0  # of timing: at most, at least, and after these seconds
QUIET = 20  # percent: other load makes over half of the times 2 to 10 times as long here
RECIPE, ONE_LINER, SHIP = "recipe", "one-liner", "ship"


@dataclass(frozen=True)
class Row:
    """A file of a network, or the reason why there is none.

    Attributes:
        source: `RECIPE`, `ONE_LINER` or `SHIP`.
        words: the settings that make the row again: those of a run, or the winner's.
        loss: in the unit of `limit`.
        p_within: p-value of "the loss is at the limit or above".
        sqnr_db: of the outputs against FP32's; `divergence`: of the classes, KL.
        ms: latency of one sample, measured in turn with the network's other files, as the
            percentile `QUIET`; `fp32_ms` that of FP32 in the same framework.
        p_worse: of a winner, p-value of "it loses no more than the best one-liner of its size".
        minutes: of one `ship`, by the clock.
    """

    network: str
    kind: str
    source: str
    name: str
    words: str = ""
    metric: str = ""
    samples: int | None = None
    fp32: float | None = None
    value: float | None = None
    loss: float | None = None
    limit: float | None = None
    p_within: float | None = None
    sqnr_db: float | None = None
    divergence: float | None = None
    bytes: int | None = None
    fp32_bytes: int | None = None
    ms: float | None = None
    fp32_ms: float | None = None
    p_worse: float | None = None
    verdict: str = ""
    minutes: float | None = None
    reason: str = ""

    @property
    def measured(self) -> bool:
        """Whether there is a file, and its loss."""
        return self.loss is not None


class _Nowhere:
    """Stands in for a run in MLflow; records nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **named: None


def compose_settings(words: Sequence[str]) -> Settings:
    """Return the settings of words; of two for the same key, the last one counts."""
    last = {word.partition("=")[0]: word for word in words}
    return resolve(loading.parse_config(compose("config", overrides=list(last.values()))))


def measure(row: Row, words: Sequence[str], folder: Path) -> Row:
    """Quantize into a folder, reload, score, and compare with FP32; latencies come later."""
    folder.mkdir(parents=True, exist_ok=True)
    nowhere: Any = _Nowhere()
    try:
        settings = compose_settings([*words, "latency.enabled=false"])
        result = run_experiment(settings, folder, nowhere)
    except PtqError as error:
        return replace(row, reason=" ".join(f"{error}".split()))
    except Exception as error:  # a fault of this tool: shown, and the study continues
        traceback.print_exc()
        return replace(row, reason=f"crash: {type(error).__name__}: {error}"[:200])
    measurement = result.measurement
    if measurement is None:
        return replace(row, reason=result.reason)
    comparison = measurement.comparison
    metrics = result.to_metrics()
    metric = comparison.metric
    return replace(
        row,
        words=shlex.join(words),
        metric=metric.name,
        samples=comparison.model.total,
        fp32=float(comparison.baseline.value),
        value=float(comparison.model.value),
        loss=float(comparison.loss(fair=True)),
        limit=metric.limit(settings.config.report),
        p_within=metrics.get("paired/p_within"),
        sqnr_db=comparison.sqnr_db,
        divergence=metrics.get("kl_divergence"),
        bytes=measurement.size_bytes,
        fp32_bytes=int(metrics[f"{BASELINE}size_bytes"]),
    )


def find_worse(winner: Path, other: Path, words: Sequence[str]) -> float:
    """Return the p-value of "the winner loses no more than the other file".

    Args:
        winner, other: folders of two runs on the same samples.
    """
    settings = compose_settings(words)
    data, network = load_data_and_network(settings)
    task = make_task(settings.config.task, data, network, data.test)
    pairs = []
    for folder in (winner, other):
        with np.load(folder / "predictions.npz") as arrays:
            pairs.append(read_pair(task.test, dict(arrays)).model)
    margin = pairs[0].margin_over(pairs[1], task.metric, 0.0, len(data.test))
    return float(margin.p_beyond)


def time_in_turns(files: Sequence[tuple[Row, Path]]) -> list[Row]:
    """Time files of one network in turn with their FP32; return the rows with latencies.

    Args:
        files: rows with the settings that made them, and the files.
    """
    loads: dict[str, Load] = {}
    baselines: list[str | None] = []
    samples = None
    for row, path in files:
        fitted, data, evaluator = _open(row)
        samples = samples or data.test
        if fitted.quantizer.resolve().execution == "simulated":
            baselines.append(None)
            continue
        framework = f"fp32 {fitted.config.backend.framework}"
        if framework not in loads:
            fp32 = evaluator.baseline(data.test).path
            loads[framework] = partial(evaluator.fp32_quantizer.load, fp32)
        loads[_label(row)] = partial(fitted.quantizer.load, path)
        baselines.append(framework)
    if samples is None or not loads:
        return [row for row, _ in files]
    with torch_threads_kept():
        predictors = {name: open_copy(1) for name, open_copy in loads.items()}
        times = _time(predictors, samples)
    rows = []
    for (row, _), baseline in zip(files, baselines, strict=True):
        timed = row
        if baseline is not None:
            timed = replace(row, ms=times[_label(row)], fp32_ms=times[baseline])
        rows.append(timed)
    return rows


def _time(predictors: Mapping[str, Predictor], samples: Split) -> dict[str, float]:
    """Return the latency of one sample of each file, in ms.

    Each file runs twice in its turn and the second run counts: then the processor's caches hold its
    own weights, whichever file ran before it.
    """
    times: dict[str, list[float]] = {name: [] for name in predictors}
    begin = time.perf_counter()
    for turn in range(ROUNDS):
        batch = samples.inputs(np.array([turn % len(samples)]))
        for name, predictor in predictors.items():
            predictor.predict(batch)
            start = time.perf_counter()
            predictor.predict(batch)
            times[name].append(1000 * (time.perf_counter() - start))
        if turn >= LEAST and time.perf_counter() - begin > SECONDS:
            break
    return {name: float(np.percentile(values, QUIET)) for name, values in times.items()}


def _label(row: Row) -> str:
    return f"{row.source} {row.name}"


def _open(row: Row) -> tuple[Settings, Any, Evaluator]:
    """Return the settings of a row, fitted to the network, its data, and an evaluator."""
    settings = compose_settings(shlex.split(row.words))
    data, network = load_data_and_network(settings)
    task = make_task(settings.config.task, data, network, data.test)
    fitted = fit_settings(settings, network)
    return fitted, data, Evaluator(fitted.quantizer, network, task)
