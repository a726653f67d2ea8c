"""Ratios of latencies, with intervals, for models timed in turns.

Latencies of different runs are measured minutes apart. In that time, a machine's speed can change
by more than the models differ.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from resnet8ptq.config.schema import LatencyConfig
from resnet8ptq.core.console import track
from resnet8ptq.data.dataset import Split
from resnet8ptq.tasks.scoring.statistics import PART, RESAMPLING_SEED

if TYPE_CHECKING:
    from resnet8ptq.evaluation.batching import Load

FILE = "race.json"
BLOCKS = 10

Blocks = list[float]  # median latency of each block, in milliseconds


@dataclass(frozen=True)
class Ratio:
    """The speed of a model relative to another, with its 95% interval, see `ratio`."""

    value: float
    low: float
    high: float

    @property
    def faster(self) -> bool:
        """Whether the interval shows that the model is faster."""
        return self.low > 1

    def __str__(self) -> str:
        return f"{self.value:.2f} times as fast (95% interval {self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class PairedLatency:
    """The median latencies of each model in each block of turns, in milliseconds.

    Attributes:
        single: latency of one sample, by model as in `time_in_blocks`.
        batch: latency of `batch_size` samples, likewise; empty if the network has a fixed batch
            size.
        threads: the threads of each model.
    """

    single: dict[str, Blocks]
    batch: dict[str, Blocks]
    batch_size: int
    threads: int

    @classmethod
    def of(cls, kept: Any) -> "PairedLatency":
        """Return the latencies from a document that `asdict` wrote.

        Raises:
            AttributeError, KeyError, OverflowError, TypeError, ValueError: the document has another
                form.
        """
        return cls(
            single=_read_blocks(kept["single"]),
            batch=_read_blocks(kept["batch"]),
            batch_size=int(kept["batch_size"]),
            threads=int(kept["threads"]),
        )


def _read_blocks(kept: Any) -> dict[str, Blocks]:
    """Return each model's latencies; raise `ValueError` unless each has some, all above 0."""
    by_name = {}
    for name, times in kept.items():
        blocks = [float(time) for time in times]
        if not blocks or not all(time > 0 for time in blocks):  # refuses NaN too
            raise ValueError("expected latencies above 0")
        by_name[str(name)] = blocks
    return by_name


def time_in_blocks(
    loads: Mapping[str, "Load"], split: Split, timing: LatencyConfig
) -> PairedLatency:
    """Time models in turns, in at most `BLOCKS` blocks; each block loads all models again.

    The speed of a model changes by some percent each time it is loaded. With one loading, a model
    could appear faster than its own copy. After `latency.LEAST` blocks, another block starts only
    if it is expected to end within `timing.max_seconds` for each model.

    Args:
        loads: loads each model, by any name, such as the id of its run.
    """
    from resnet8ptq.evaluation import latency  # reports read timings without any backend

    # Each block has its share of the repeats and of the time
    least = latency.LEAST
    random = np.random.default_rng(RESAMPLING_SEED)
    share = replace(
        timing,
        repeats=max(timing.repeats // BLOCKS, least),
        batch_repeats=max(timing.batch_repeats // BLOCKS, least),
        max_seconds=timing.max_seconds / BLOCKS,
    )

    # Time block by block, as long as the time suffices
    latencies = PairedLatency({}, {}, latency.find_batch_size(timing, split), timing.threads)
    limit = timing.max_seconds * len(loads)
    begin = time.perf_counter()
    for block in track(range(BLOCKS), "Timing the best", "blocks"):
        spent = time.perf_counter() - begin
        if block >= least and spent * (block + 1) / block > limit:
            break
        names = random.permutation(list(loads)).tolist()  # the first to be loaded is the slowest
        timed = latency.measure([loads[name] for name in names], split, share, least=1)
        for name, times in zip(names, timed, strict=True):
            single, *batch = times.medians()
            latencies.single.setdefault(name, []).append(single)
            if batch:
                latencies.batch.setdefault(name, []).extend(batch)
    return latencies


def typical(blocks: Blocks) -> float:
    """Return the geometric mean over the blocks in ms; `ratio` is a quotient of two such means."""
    return float(np.exp(np.log(blocks).mean()))


def ratio(model: Blocks, reference: Blocks, of: int = 1) -> Ratio:
    """Return the speed of the model relative to the reference, from blocks timed in turns.

    The value is the geometric mean of the blocks' ratios. The interval is the exponential
    of Student's t interval of the mean logarithm; from a single block, it is 0 to infinity.

    Args:
        of: the number of compared models, for which the interval is corrected (Bonferroni).
    """
    logs = np.log(np.array(reference) / np.array(model))
    mean = float(logs.mean())
    count = len(logs)
    if count < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    error = float(logs.std(ddof=1)) / math.sqrt(count)
    half = float(stdtrit(count - 1, 1 - PART / of)) * error
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
