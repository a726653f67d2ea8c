"""`task=regression`: values to predict; the mean absolute error, or the root mean squared one."""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import RegressionConfig, TaskConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.tasks import bootstrap, contract
from resnet8ptq.tasks.bootstrap import Comparison, Paired, Scores
from resnet8ptq.tasks.contract import Array, Metric, Metrics, Outputs, Setting, Targets
from resnet8ptq.tasks.statistics import SIGNIFICANCE, Margin


@dataclass(frozen=True)
class Regression(contract.Task):
    """Each sample has as many values to predict as the network returns.

    Attributes:
        primary: `mae` or `rmse`: of a sample's values the mean, then over the samples.
        resamples: see `bootstrap.Scores`.
    """

    primary: str = "mae"
    resamples: int = 9999

    name = "regression"
    test = bootstrap.TEST
    intervals = bootstrap.INTERVALS
    paired: ClassVar[type[contract.Paired]] = Paired
    schema = RegressionConfig

    @classmethod
    def make(cls, config: TaskConfig, setting: Setting) -> Self:
        """Take one output with a value for each of a sample's targets."""
        contract.check_labels(cls.name, setting, "fiu", "values [N, ...]")
        labels, shapes = np.asarray(setting.labels), list(setting.outputs.values())
        if len(shapes) != 1 or math.prod(size or 0 for size in shapes[0]) != labels[:1].size:
            classes = labels.ndim == 1 and (labels == labels.round()).all()
            raise ModelError(
                f"returns {contract.describe(setting.outputs)}, but {setting.data} has "
                f"{labels[:1].size} values to predict; takes one output with as many"
                f"{'; labels that are classes must be integers, not floats' if classes else ''}"
            )
        return cls.recall(config, ())

    @classmethod
    def recall(cls, config: TaskConfig, class_names: tuple[str, ...]) -> Self:
        """Set the task up for what a run has kept."""
        assert isinstance(config, RegressionConfig)  # see `registry`
        return cls(primary=config.primary, resamples=config.resamples)

    @property
    def metric(self) -> Metric:
        """The error that is judged by."""
        return _error(self.primary)

    @property
    def beside(self) -> tuple[Metric, ...]:
        """The other error."""
        return (_error("rmse" if self.primary == "mae" else "mae"),)

    def score(self, outputs: Outputs, targets: Targets) -> Scores:
        """Score the errors of each sample."""
        wanted, found = _flat(np.asarray(targets.labels)), _flat(outputs.values[0])
        errors = np.abs(found - wanted), np.abs(wanted.mean(axis=0) - wanted)
        absolute, absolute_of_mean = (each.mean(axis=1) for each in errors)
        squared, squared_of_mean = ((each**2).mean(axis=1) for each in errors)
        mae = bootstrap.mean_of(absolute)

        def rmse(chosen: NDArray[np.int64]) -> float:
            return math.sqrt(squared[chosen].mean())

        every, items = np.arange(len(found)), len(found)
        if self.primary == "mae":
            other: Metrics = {"rmse": rmse(every)}
            return Scores(outputs, mae, items, self.resamples, absolute, other, absolute_of_mean)
        other = {"mae": mae(every)}
        return Scores(outputs, rmse, items, self.resamples, squared, other, squared_of_mean)

    def compare(self, model: Scores, baseline: Scores) -> Comparison:
        """Compare the errors."""
        return Comparison(model, baseline)

    def doubt(self, baseline: Scores, expected: float | None) -> str | None:
        """Doubt an error that is not shown to be below that of predicting the targets' mean."""
        errors, of_mean = baseline.per_item, baseline.of_mean
        assert errors is not None and of_mean is not None  # what `score` made
        excess = errors - of_mean
        error = float(excess.std(ddof=1)) / math.sqrt(len(excess)) if len(excess) > 1 else 0.0
        margin = Margin.student(float(excess.mean()), error, len(excess))
        if not of_mean.any() or margin.p_within <= SIGNIFICANCE:
            return None
        trivial = of_mean.mean() if self.primary == "mae" else math.sqrt(of_mean.mean())
        shown = self.metric.show
        return f"NO BETTER THAN THE MEAN, {shown(baseline.value)} (of the mean {shown(trivial)})"

    def arrays(self, found: contract.Comparison) -> dict[str, Array]:
        """Add what both predict."""
        predicted = found.model.outputs.values[0], found.baseline.outputs.values[0]
        names = ("predictions", "baseline_predictions")
        return {**dict(zip(names, predicted, strict=True)), **found.paired.arrays()}


def _error(name: str) -> Metric:
    return Metric(name, name.upper(), maximize=False, bounded=False)


def _flat(values: Array) -> NDArray[np.float64]:
    return values.reshape(len(values), -1).astype(np.float64)
