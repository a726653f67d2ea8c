"""Models timed against each other: how many times as fast, and how sure that is.

Latencies of different runs are minutes apart, in which a machine's speed changes by more than the
models differ. In a race all of them run in turns.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from resnet8ptq.evaluation.latency import Timings
from resnet8ptq.tasks.statistics import PART

FILE = "race.json"
BLOCKS = 10  # of turns that follow each other, at most; a machine's pauses fall into few of them

Blocks = list[float]  # median latency of each block, in milliseconds


@dataclass(frozen=True)
class Ratio:
    """How many times as fast a model is as another, with its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def faster(self) -> bool:
        """Whether that is more than noise."""
        return self.low > 1

    def __str__(self) -> str:
        return f"{self.value:.2f} times as fast (95% interval {self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Race:
    """The median latencies of each model in each block of turns, in milliseconds.

    Attributes:
        single: of one image, by the name of the model.
        batch: of `batch_size` images; without networks that take one sample at once.
        threads: of each model.
    """

    single: dict[str, Blocks]
    batch: dict[str, Blocks]
    batch_size: int
    threads: int

    @classmethod
    def of(cls, timings: Mapping[str, Timings], batch_size: int, threads: int) -> "Race":
        """Return the race of models that were timed in turns."""
        return cls(
            {name: to_blocks(found.single_ms) for name, found in timings.items()},
            {
                name: to_blocks(found.batch_ms)
                for name, found in timings.items()
                if found.batch_ms is not None
            },
            batch_size,
            threads,
        )

    def to_json(self) -> str:
        """Return it as a document."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Race":
        """Read it back.

        Raises:
            KeyError, TypeError, ValueError: it is not that.
        """
        kept = json.loads(text)
        single, batch = (
            {str(name): [float(each) for each in blocks] for name, blocks in kept[key].items()}
            for key in ("single", "batch")
        )
        if any(not (blocks and min(blocks) > 0) for blocks in (*single.values(), *batch.values())):
            raise ValueError("takes latencies above 0")
        return cls(single, batch, int(kept["batch_size"]), int(kept["threads"]))


def to_blocks(times: NDArray[np.float64]) -> Blocks:
    """Return the median of each block of turns [repeats], in the same unit."""
    parts = np.array_split(times, min(BLOCKS, len(times)))
    return [float(np.median(part)) for part in parts]


def ratio(model: Blocks, reference: Blocks) -> Ratio:
    """Return how many times as fast the model is, from blocks that were timed in turns.

    The geometric mean of the blocks' ratios, with Student's interval of its logarithm.
    """
    logs = np.log(np.array(reference) / np.array(model))
    mean, count = float(logs.mean()), len(logs)
    if count < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    half = float(stdtrit(count - 1, 1 - PART)) * float(logs.std(ddof=1)) / math.sqrt(count)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
