"""How long a model takes beside its FP32 baseline: both in one process, in turns.

On a shared machine a latency drifts by more than quantization changes it. Run in turns, the two
models meet the same disturbances, and their ratio holds.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor, Profiler
from resnet8ptq.config.schema import LatencyConfig
from resnet8ptq.core.console import announced
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.batching import Load

LEAST = 5  # repeats, however long they take
BATCH_SIZE, BATCH_BYTES = 32, 2**24  # where `latency.batch_size` is not set: at most

Times = NDArray[np.float64]  # [repeats], in milliseconds


@dataclass(frozen=True)
class Timings:
    """Wall-clock times of one model: `single_ms` at batch 1, `batch_ms` at `find_batch_size`.

    A network that takes one sample at once has no `batch_ms`.
    """

    single_ms: Times
    batch_ms: Times | None

    def medians(self) -> list[float]:
        """Return the median of each batch size that was timed, in milliseconds."""
        timed = [times for times in (self.single_ms, self.batch_ms) if times is not None]
        return [float(np.median(times)) for times in timed]

    def to_metrics(self, prefix: str = "") -> dict[str, float]:
        """Return median and 95th percentile of both, in milliseconds, by MLflow name."""
        times = {"latency": self.single_ms, "latency_batch": self.batch_ms}
        return {
            f"{prefix}{name}_p{percent}_ms": float(np.percentile(values, percent))
            for name, values in times.items()
            if values is not None
            for percent in (50, 95)
        }


@dataclass(frozen=True)
class Latency:
    """A model and its FP32 baseline; without one for dtype=fp32, which is the baseline itself."""

    model: Timings
    baseline: Timings | None = None

    def to_metrics(self) -> dict[str, float]:
        """Return every metric under its MLflow name.

        `speedup` (batch 1) and `speedup_batch` (`find_batch_size`) are the baseline's median
        latency divided by the model's: above 1 the model is faster. dtype=fp32 has none: against
        itself it is 1 by definition, and a measured one would show nothing but noise.
        """
        metrics = self.model.to_metrics()
        if self.baseline is None:
            return metrics
        ratios = {
            "speedup": float(np.median(self.baseline.single_ms) / np.median(self.model.single_ms))
        }
        if self.baseline.batch_ms is not None and self.model.batch_ms is not None:
            ratios["speedup_batch"] = float(
                np.median(self.baseline.batch_ms) / np.median(self.model.batch_ms)
            )
        return metrics | self.baseline.to_metrics("baseline_") | ratios


def measure(loads: Sequence[Load], split: Split, settings: LatencyConfig) -> list[Timings]:
    """Load artifacts with `latency.threads` threads, and time them.

    Args:
        loads: of the artifacts.
        split: its first samples are run, again from the start where they are too few.
        settings: how often, and how many images at once.

    Returns:
        The times of each, in the order given.
    """
    with torch_threads_kept(), announced("Timing"):
        predictors = [load(settings.threads) for load in loads]
        limit = settings.max_seconds
        single = time_in_turns(predictors, split, 1, settings.repeats, limit)
        batch: Sequence[Times | None] = [None] * len(predictors)
        if split.at_once is None:
            size, repeats = find_batch_size(settings, split), settings.batch_repeats
            batch = time_in_turns(predictors, split, size, repeats, limit)
    return [Timings(*times) for times in zip(single, batch, strict=True)]


def find_batch_size(settings: LatencyConfig, split: Split) -> int:
    """Return how many samples are timed at once, besides single ones.

    As set; else `BATCH_SIZE`, or the largest power of two below that lets them fit `BATCH_BYTES`.
    """
    if settings.batch_size is not None:
        return settings.batch_size
    fitting = split.limit(max(BATCH_BYTES // (4 * math.prod(split.input_shape)), 1))
    return min(BATCH_SIZE, 2 ** int(math.log2(fitting)))


def time_in_turns(
    predictors: Sequence[Predictor | Profiler],
    split: Split,
    batch_size: int,
    repeats: int,
    limit: float = math.inf,
) -> list[Times]:
    """Return the times of each predictor; the first one alternates, so that caches favour none.

    Args:
        limit: of seconds; where it is passed, `LEAST` repeats are enough.
    """
    warm_up = max(2, repeats // 10)  # torch compiles in its first two runs of a shape
    times: list[list[float]] = [[] for _ in predictors]
    places = list(range(len(predictors)))
    begin = time.perf_counter()
    for turn in range(warm_up + repeats):
        first = turn * batch_size
        batch = split.inputs(np.arange(first, first + batch_size) % len(split))
        for place in places if turn % 2 == 0 else reversed(places):
            start = time.perf_counter()
            predictors[place].predict(batch)
            times[place].append(1000 * (time.perf_counter() - start))
        if turn + 1 >= warm_up + LEAST and time.perf_counter() - begin > limit:
            break
    return [np.array(each[warm_up:]) for each in times]


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Restore torch's number of threads, which is one for the process; ONNX Runtime's is not."""
    torch = sys.modules.get("torch")  # only backend=torch sets it, and has imported torch by now
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
