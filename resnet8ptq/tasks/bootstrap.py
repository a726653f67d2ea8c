"""What tasks share whose metric has no test of its own: a paired bootstrap over the items.

Every run with as many items draws the same samples of them (`statistics.resample`). So the
replicates of two runs are paired, also where nothing else of them was kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks import contract, distortion
from resnet8ptq.tasks.contract import Array, Arrays, Metric, Metrics, Outputs
from resnet8ptq.tasks.statistics import (
    Interval,
    Margin,
    Values,
    bootstrap,
    bootstrap_interval,
    bootstrap_margin,
    bootstrap_p,
)

TEST = "paired bootstrap"
INTERVALS = "95% percentile bootstrap intervals"


@dataclass(frozen=True)
class Scores(contract.Scores):
    """A metric of some of the items, taken of all of them, and of bootstrap samples.

    Attributes:
        statistic: the metric of the items at these places.
        items: how many there are.
        resamples: how many bootstrap samples are drawn.
        per_item: the value of each item [n], where the metric has one.
        others: further metrics, by MLflow name.
        of_mean: what `per_item` would be [n], should the mean of the targets be predicted.
    """

    outputs: Outputs
    statistic: Callable[[NDArray[np.int64]], float]
    items: int
    resamples: int
    per_item: Values | None = None
    others: Metrics = field(default_factory=dict)
    of_mean: Values | None = None

    @property
    def total(self) -> int:
        """Number of items."""
        return self.items

    @cached_property
    def value(self) -> float:
        """The metric of all items."""
        return self.statistic(np.arange(self.items))

    @cached_property
    def replicates(self) -> Values:
        """The metric of each bootstrap sample [resamples]."""
        return bootstrap(self.statistic, self.items, self.resamples)

    @property
    def interval(self) -> Interval:
        """95% percentile interval."""
        return bootstrap_interval(self.replicates)

    def more(self) -> Metrics:
        """Return the further metrics."""
        return self.others


def mean_of(per_item: Values) -> Callable[[NDArray[np.int64]], float]:
    """Return the metric that is the mean of the items' values."""
    return lambda chosen: float(per_item[chosen].mean())


@dataclass(frozen=True)
class Paired(contract.Paired):
    """The replicates of both, and each item's value where there is one."""

    replicates: Values
    baseline_replicates: Values
    values: Values | None = None
    baseline_values: Values | None = None

    @classmethod
    def read(cls, arrays: Arrays) -> Self:
        """Read what `arrays` returned."""
        replicates = arrays["replicates"], arrays["baseline_replicates"]
        contract.check_columns(replicates, "f")
        return cls(*replicates, arrays.get("values"), arrays.get("baseline_values"))

    def arrays(self) -> dict[str, Array]:
        """Return what is there, by name."""
        return {name: array for name, array in vars(self).items() if array is not None}

    def against(self, other: Self) -> float:
        """Return the p-value of the paired bootstrap.

        Raises:
            ValueError: other samples were drawn.
        """
        contract.check_columns([self.replicates, other.replicates], "f")
        return bootstrap_p(self.replicates - other.replicates)

    def margin(self, metric: Metric, drop: float, items: int) -> Margin:
        """Return the margin by the spread of the replicates."""
        before = self.baseline_replicates
        # A fraction of the baseline's value is as uncertain as that.
        limits = drop if metric.bounded else drop * np.abs(before)
        return bootstrap_margin(metric.cost(1.0) * (self.replicates - before) - limits, items)


@dataclass(frozen=True)
class Comparison(contract.Comparison):
    """A metric of two models on the same items."""

    model: Scores
    baseline: Scores

    @property
    def _differences(self) -> Values:
        return self.model.replicates - self.baseline.replicates

    @property
    def interval(self) -> Interval | None:
        """95% percentile interval of the difference."""
        return bootstrap_interval(self._differences)

    @property
    def p_value(self) -> float | None:
        """Of the paired bootstrap."""
        return bootstrap_p(self._differences)

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of the outputs, in dB."""
        return distortion.sqnr_db(self.baseline.outputs.values, self.model.outputs.values)

    @property
    def paired(self) -> Paired:
        """The replicates of both."""
        model, baseline = self.model, self.baseline
        found = model.replicates, baseline.replicates
        return Paired(*found, model.per_item, baseline.per_item)
