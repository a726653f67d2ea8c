"""Latencies of models, such as a file and its FP32 baseline, timed in turns in one process.

On a shared machine, latency can drift by more than quantization changes it. Models timed in turns
run under the same load, so their ratio is reliable.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import NodeTime, Predictor, Profiler
from resnet8ptq.config.schema import LatencyConfig
from resnet8ptq.core.console import measuring
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.batching import Load
from resnet8ptq.tasks.scoring.metric import BASELINE

LEAST = 5  # repeats that are enough when the time is up
LEAST_WARM_UP = 2  # torch compiles in its first two runs of a shape
# The upper limits if `latency.batch_size` is not set
BATCH_SIZE = 32
BATCH_BYTES = 2**24

Times = NDArray[np.float64]  # [repeats], in milliseconds


@dataclass(frozen=True)
class Timings:
    """Wall-clock times of one model.

    `single_ms` is at batch 1, `batch_ms` at the batch size of `find_batch_size`.
    For a network with a fixed batch size, `batch_ms` is None.
    """

    single_ms: Times
    batch_ms: Times | None

    def medians(self) -> list[float]:
        """Return the median of each timed batch size, in milliseconds."""
        medians = [float(np.median(self.single_ms))]
        if self.batch_ms is not None:
            medians.append(float(np.median(self.batch_ms)))
        return medians

    def to_metrics(self, prefix: str = "") -> dict[str, float]:
        """Return median and 95th percentile in ms by MLflow name, for batch 1 and for batches."""
        times = {"latency": self.single_ms}
        if self.batch_ms is not None:
            times["latency_batch"] = self.batch_ms
        metrics = {}
        for name, values in times.items():
            for percent in (50, 95):
                metrics[f"{prefix}{name}_p{percent}_ms"] = float(np.percentile(values, percent))
        return metrics


@dataclass(frozen=True)
class ModelLatency:
    """The timings of a model and of its FP32 baseline, which is None for dtype=fp32."""

    model: Timings
    baseline: Timings | None = None

    def to_metrics(self) -> dict[str, float]:
        """Return every metric under its MLflow name.

        `speedup` (batch 1) and `speedup_batch` (`find_batch_size`) are the baseline's median
        latency divided by the model's: above 1, the model is faster. dtype=fp32 has no speedup,
        because it is 1 by definition.
        """
        metrics = self.model.to_metrics()
        if self.baseline is None:
            return metrics
        metrics |= self.baseline.to_metrics(BASELINE)
        model = self.model.medians()
        baseline = self.baseline.medians()
        metrics["speedup"] = baseline[0] / model[0]
        if len(model) > 1:
            metrics["speedup_batch"] = baseline[1] / model[1]
        return metrics


def measure(
    loads: Sequence[Load], split: Split, timing: LatencyConfig, least: int = LEAST
) -> list[Timings]:
    """Load artifacts with `latency.threads` threads, and time them in turns.

    Args:
        split: the samples; the first ones are run, repeated if there are too few.
        least: the number of repeats that is enough when the time is up.
    """
    with torch_threads_kept(), measuring("Timing"):
        predictors = [load(timing.threads) for load in loads]
        limit = timing.max_seconds
        single = time_in_turns(predictors, split, 1, timing.repeats, limit, least)
        batch: Sequence[Times | None] = [None] * len(predictors)
        if split.at_once is None:
            size = find_batch_size(timing, split)
            repeats = timing.batch_repeats
            batch = time_in_turns(predictors, split, size, repeats, limit, least)
    return [Timings(*times) for times in zip(single, batch, strict=True)]


def measure_operators(
    profiles: Sequence[AbstractContextManager[Profiler]],
    split: Split,
    batch_size: int,
    timing: LatencyConfig,
) -> list[list[NodeTime]]:
    """Load artifacts, run batches in turns as `measure` does, and time every node.

    Args:
        profiles: load the artifacts, see `contract.Quantizer.profile`.
    """
    repeats = timing.batch_repeats
    if batch_size == 1:
        repeats = timing.repeats
    with torch_threads_kept(), ExitStack() as stack:
        profilers = [stack.enter_context(profile) for profile in profiles]
        times = time_in_turns(profilers, split, batch_size, repeats, timing.max_seconds)
        return [profiler.nodes(len(runs)) for profiler, runs in zip(profilers, times, strict=True)]


def find_batch_size(timing: LatencyConfig, split: Split) -> int:
    """Return the batch size that is timed in addition to batch 1.

    The size is `latency.batch_size`, or else the largest power of two within `BATCH_SIZE`,
    `BATCH_BYTES` and `Split.limit`.
    """
    if timing.batch_size is not None:
        return timing.batch_size
    fitting = split.limit(max(BATCH_BYTES // split.sample_bytes, 1))
    return min(BATCH_SIZE, 2 ** int(math.log2(fitting)))


def time_in_turns(
    predictors: Sequence[Predictor | Profiler],
    split: Split,
    batch_size: int,
    repeats: int,
    limit: float = math.inf,
    least: int = LEAST,
) -> list[Times]:
    """Return the times of each predictor in milliseconds, without those of the warm-up.

    The order of the predictors is reversed after each turn, so that caches favour none.

    Args:
        limit: seconds after which `least` repeats are enough. The warm-up may take half of this
            time, but has at least `LEAST_WARM_UP` repeats.
    """
    warm_up = max(LEAST_WARM_UP, repeats // 10)
    times: list[list[float]] = [[] for _ in predictors]
    order = list(range(len(predictors)))
    begin = time.perf_counter()
    for turn in range(warm_up + repeats):
        first = turn * batch_size
        batch = split.inputs(np.arange(first, first + batch_size) % len(split))
        for index in order:
            times[index].append(_time_ms(predictors[index], batch))
        order.reverse()

        # End the warm-up early, or the turns, if the time is up
        spent = time.perf_counter() - begin
        if LEAST_WARM_UP <= turn + 1 < warm_up and spent > limit / 2:
            warm_up = turn + 1
        if turn + 1 >= warm_up + least and spent > limit:
            break
    return [np.array(values[warm_up:]) for values in times]


def _time_ms(predictor: Predictor | Profiler, batch: NDArray[np.float32]) -> float:
    """Return the milliseconds of a batch, measured on the machine that runs the file."""
    if isinstance(predictor, Predictor) and predictor.time_ms is not None:
        return predictor.time_ms(batch)
    start = time.perf_counter()
    predictor.predict(batch)
    return 1000 * (time.perf_counter() - start)


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Restore torch's number of threads after the block, because the whole process shares it."""
    torch = sys.modules.get("torch")  # only backend=torch sets it, and has imported torch by now
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
