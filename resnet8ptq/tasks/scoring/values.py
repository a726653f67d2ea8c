"""The values of a model for a paired test, the pair of model and FP32, and the test itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Array
from resnet8ptq.tasks.scoring.statistics import UNKNOWN, Interval, Margin, Values

SAMPLES = "samples"  # the array of `predictions.npz` that identifies the samples

Arrays = Mapping[str, Array]


class SampleValues(ABC):
    """Values of one model that give an interval of the metric, and a paired test of two models.

    `predictions.npz` keeps their arrays, so that a later report can test two runs on equal samples.
    """

    shared: ClassVar[tuple[str, ...]] = ()  # arrays that exist once for model and baseline

    @property
    @abstractmethod
    def interval(self) -> Interval:
        """95% interval of the metric."""

    @abstractmethod
    def against(self, other: Self) -> tuple[Interval, float]:
        """Return the 95% interval of this metric minus another model's, and the test's p-value."""

    @abstractmethod
    def margin(self, baseline: Self, metric: Metric, limit: float, items: int) -> Margin:
        """Return the margin of the loss against the baseline over a limit; see `Metric.loss`."""

    def margin_over(self, other: Self, metric: Metric, limit: float, items: int) -> Margin:
        """Return the margin, over a limit, of the loss against another quantized model."""
        return self.margin(other, metric, limit, items)

    def select(self, rows: NDArray[np.bool_]) -> Self | None:
        """Return the values of the samples in a mask [n]; None if they cannot be selected."""
        return None

    @abstractmethod
    def arrays(self) -> dict[str, Array]:
        """Return the arrays to keep, by name."""

    def losses(self, baseline: Self) -> Values | None:
        """Return the loss of each sample against the baseline [n]; None by default."""
        return None

    def metrics(self, baseline: Self) -> Metrics:
        """Return metrics of the test itself, by MLflow name; empty by default."""
        return {}

    def by_class(self, baseline: Self, classes: int) -> list[float]:
        """Return a p-value against the baseline for each class; empty by default."""
        return []

    def found_by_class(self, baseline: Self, classes: int, level: float) -> list[float]:
        """Return, for each class with samples, the loss that a test detects with 80% power.

        The list is empty by default.

        Args:
            level: the level of the test.
        """
        return []


@dataclass(frozen=True)
class Paired:
    """The values of a model and of its FP32 baseline on the same samples.

    Attributes:
        samples: the id of each sample in `predictions.npz`, see `Split.sample_ids`; None for older
            files, and for pairs that were not read from this file.
    """

    model: SampleValues
    baseline: SampleValues
    samples: NDArray[np.uint64] | None = None

    def select(self, rows: NDArray[np.bool_]) -> "Paired | None":
        """Return the values of the samples in a mask [n], without `samples`.

        The result is None if `SampleValues.select` returns None.
        """
        model = self.model.select(rows)
        baseline = self.baseline.select(rows)
        if model is None or baseline is None:
            return None
        return Paired(model, baseline)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of the model, and those of the baseline as `baseline_{name}`.

        The arrays that both share have only the plain name.
        """
        arrays = dict(self.model.arrays())
        for name, array in self.baseline.arrays().items():
            if name not in self.baseline.shared:
                arrays[f"baseline_{name}"] = array
        return arrays

    def same_samples(self, other: Self) -> bool:
        """Return whether the shared arrays, such as labels, are equal in another run.

        The result is also true if the task has no shared arrays.
        """
        ours = self.baseline.arrays()
        theirs = other.baseline.arrays()
        return all(np.array_equal(ours[name], theirs[name]) for name in self.baseline.shared)

    def margin_over(self, other: Self, metric: Metric, limit: float, items: int) -> Margin:
        """Return the margin, over a limit, of the loss against another run on the same samples.

        The margin is unknown if one of the runs, or both, may stop early.
        """
        if type(self.model) is not type(other.model):
            return UNKNOWN  # one of the two stopped early
        return self.model.margin_over(other.model, metric, limit, items)

    def margin(self, metric: Metric, limit: float, items: int) -> Margin:
        """Return the margin of the loss over a limit, see `SampleValues.margin`."""
        return self.model.margin(self.baseline, metric, limit, items)

    def losses(self) -> Values | None:
        """Return the loss of each sample, see `SampleValues.losses`."""
        return self.model.losses(self.baseline)

    def metrics(self) -> Metrics:
        """Return metrics of the test itself, see `SampleValues.metrics`."""
        return self.model.metrics(self.baseline)

    def by_class(self, classes: int) -> list[float]:
        """Return a p-value for each class, see `SampleValues.by_class`."""
        return self.model.by_class(self.baseline, classes)

    def found_by_class(self, classes: int, level: float) -> list[float]:
        """Return the detectable loss on each class, see `SampleValues.found_by_class`."""
        return self.model.found_by_class(self.baseline, classes, level)


@dataclass(frozen=True)
class PairedTest:
    """The paired test of a task.

    Attributes:
        intervals: the name of the interval method in texts.
        read_values: reads the values of a model (prefix "") or its baseline ("baseline_") from
            the arrays of `Paired.arrays`; raises KeyError or ValueError on other arrays.
        sequential: whether `evaluate.stop=decided` can stop the scoring early, which needs `Hits`.
    """

    name: str
    intervals: str
    read_values: Callable[[Arrays, str], SampleValues]
    sequential: bool = False


def check_columns(columns: Sequence[Array], kind: str) -> None:
    """Raise `ValueError` unless all arrays are 1-d, of equal length and of this NumPy kind."""
    shape = columns[0].shape
    for column in columns:
        if column.ndim != 1 or column.shape != shape or column.dtype.kind != kind:
            raise ValueError("not one number for each item")
