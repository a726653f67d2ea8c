"""A metric of models: its direction, its loss, its limit, and its texts."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.tasks.scoring.statistics import Interval

if TYPE_CHECKING:
    from resnet8ptq.tasks.scoring.comparison import Scores

DIGITS = 9  # decimals of a loss
# Prefixes, by which MLflow groups metrics. MLflow shows metrics without a prefix first.
BASELINE = "baseline/"  # metrics of FP32
CHOICE = "choice/"  # metrics on the selection samples
TOTAL = "counts/total"  # number of scored samples
UNDEFINED = "ci95/undefined_share"  # share of the bootstrap samples without a value
GROUPED = "grouped"  # param of runs that scored grouped samples one by one
SAME_SAMPLES = "same_samples"  # param of runs whose selection samples are the reported ones

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class Metric:
    """A number for comparing models.

    Attributes:
        name: the name in MLflow; the baseline's metric is `baseline/{name}`.
        title: the name in tables and figures.
        maximize: whether higher values are better.
        percent: whether values are fractions, which texts show in percent.
        bounded: whether a loss is the difference of two values. Otherwise, the loss is the
            difference divided by the baseline's absolute value, unless that is 0.
        geometric: whether the metric is a geometric mean, above 0.
        fair: the name of the tie-adjusted metric that ranks models; empty if there is none.
        least: the key of `report` with the smallest accepted value; empty if there is none.
        limit_key: the key of `report` that limits the loss.
    """

    name: str
    title: str
    maximize: bool = True
    percent: bool = False
    bounded: bool = True
    geometric: bool = False
    fair: str = ""
    least: str = ""
    limit_key: str = "max_drop"

    @property
    def ranked_by(self) -> str:
        """The MLflow name of the metric that ranks models."""
        return self.fair or self.name

    @property
    def direction(self) -> str:
        """`maximize` or `minimize`, as Hydra's sweepers write it."""
        return "maximize" if self.maximize else "minimize"

    @property
    def scale(self) -> int:
        """The factor from a value to its number in figures: 100 for percent, else 1."""
        return 100 if self.percent else 1

    def cost(self, value: float) -> float:
        """Return the value, negated if higher is better, so that lower is better."""
        return -value if self.maximize else value

    def loss_of(self, change: float, baseline: float) -> float:
        """Return the loss for a change from the baseline's value; negative for a gain.

        The loss is rounded, because the difference of two fractions has a float64 error.
        """
        loss = self.cost(change)
        if not self.bounded and baseline:
            loss /= abs(baseline)
        return round(loss, DIGITS) + 0.0  # turns -0 into 0

    def loss(self, model: "Scores", baseline: "Scores", fair: bool = False) -> float:
        """Return the loss of a model against the baseline, in the unit of `limit`.

        Args:
            fair: whether to compare the metric adjusted for ties, see `Metric.fair`.
        """
        if fair:
            return self.loss_of(float(model.fair_gain(baseline)), baseline.fair)
        return self.loss_of(float(model.value - baseline.value), baseline.value)

    def allowed(self, loss: float, baseline: float) -> float:
        """Return a loss converted to the metric's unit."""
        if self.bounded or not baseline:
            return loss
        return loss * abs(baseline)

    def limit(self, limits: ReportConfig) -> float:
        """Return the largest accepted loss."""
        return limits.max_drop

    def say_limit(self, limit: float) -> str:
        """Return a limit of the loss as text."""
        return f"at most {self.say_loss(limit)} worse than FP32"

    def say_margin(self, margin: float) -> str:
        """Return the margin against the best model as text."""
        return f"at most {self.say_loss(margin)} worse than the best"

    def show_limit(self, limits: ReportConfig) -> str:
        """Return the limit as a Hydra override."""
        return f"report.{self.limit_key}={getattr(limits, self.limit_key):g}"

    @property
    def loss_title(self) -> str:
        """The name of the loss in figures."""
        unit = ", points" if self.percent else ""
        return f"loss of {self.title} against FP32{unit}"

    def show(self, value: float) -> str:
        """Return a value as text."""
        if self.percent:
            return f"{value:.2%}"
        return f"{value:{self._digits}}"

    def show_change(self, change: float) -> str:
        """Return a difference of two values as text without unit; points for a percent metric."""
        if self.percent:
            return f"{100 * change:+z.2f}"
        return f"{change:+z{self._digits}}"

    @property
    def _digits(self) -> str:
        return ".4f" if self.bounded else ".4g"

    def say_change(self, change: float) -> str:
        """Return a difference of two values as text, with `points` for a percent metric."""
        unit = " points" if self.percent else ""
        return f"{self.show_change(change)}{unit}"

    def show_loss(self, loss: float) -> str:
        """Return a loss as text for a table."""
        if self.bounded and not self.percent:
            return f"{loss:+z.4f}"
        return f"{loss:+z.2%}"

    def say_loss(self, loss: float) -> str:
        """Return a loss as text: in points, in percent of the baseline's value, or as a number."""
        if self.percent:
            unit = "point" if loss == 0.01 else "points"
            return f"{100 * loss:.4g} {unit}"
        if self.bounded:
            return f"{loss:.4g}"
        return f"{100 * loss:.4g}%"

    def state_loss(self, loss: float) -> str:
        """Return a loss as text for a sentence, such as "loss 0.5 points"."""
        return f"loss {self.say_loss(loss)}"


def name_ends(name: str, interval: Interval | None) -> Metrics:
    """Return the ends of an interval as metrics, which are None for an unknown interval."""
    low, high = interval or (None, None)
    if low is not None and math.isnan(low):
        low = None
        high = None
    return {f"{name}_low": low, f"{name}_high": high}
