"""What a task is: the one place that says what makes a result good, and better than another.

    outputs, targets --score--> Scores;  Scores of model and baseline --compare--> Comparison

Evaluation, the report, the table, the search and the sensitivity analysis ask the task, and know
of no class, no accuracy and no argmax. `registry` has every task by its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import ReportConfig, TaskConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tasks.statistics import Interval, Margin

if TYPE_CHECKING:  # figures are drawn in the end
    from matplotlib.figure import Figure

MANY_CLASSES = 50  # above, what is known of each class goes into files alone
CHOICE = "choice_"  # before the names of metrics on the samples that a sweep chooses by
GROUPED = "grouped"  # param of runs that scored samples of one group as if each stood by itself
PROBABILITIES, LOGITS, VALUES = "probabilities", "logits", "values"  # what a network returns

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Table = Iterable[Sequence[object]]
Metrics = dict[str, float | None]
# What is kept of the outputs of a batch, where those of all samples would be too much.
Reduction = Callable[[Sequence[Array]], tuple[Array, ...]]


@dataclass(frozen=True)
class Metric:
    """A number that models are judged by.

    Attributes:
        name: in MLflow; the baseline's is `baseline_{name}`.
        title: for people.
        maximize: higher is better.
        percent: a fraction that is shown in percent, its differences in points.
        bounded: differences count as they are; else as a fraction of the baseline's value.
        fair: the name of the same without luck, such as with ties broken at random, by which models
            are ranked.
        least: the key of `report` that says what it must reach.
        limit_key: the key of `report` that limits the drop.
    """

    name: str
    title: str
    maximize: bool = True
    percent: bool = False
    bounded: bool = True
    fair: str = ""
    least: str = ""
    limit_key: str = "max_drop"

    @property
    def ranked_by(self) -> str:
        """The MLflow name of what models are ranked by."""
        return self.fair or self.name

    @property
    def direction(self) -> str:
        """`maximize` or `minimize`, as sweepers have it."""
        return "maximize" if self.maximize else "minimize"

    @property
    def unit(self) -> str:
        """Behind the number in a figure's axis."""
        return ", %" if self.percent else ""

    @property
    def scale(self) -> int:
        """What values are multiplied by in figures."""
        return 100 if self.percent else 1

    def cost(self, value: float) -> float:
        """Return the value with lower always better."""
        return -value if self.maximize else value

    def drop(self, change: float, baseline: float) -> float:
        """Return how much worse a change makes the baseline's value; negative where better."""
        worse = self.cost(change)
        return worse / abs(baseline) if not self.bounded and baseline else worse

    def allowed(self, drop: float, baseline: float) -> float:
        """Return the change for the worse, in the metric's units, that is this drop."""
        return drop if self.bounded or not baseline else drop * abs(baseline)

    def limit(self, limits: ReportConfig) -> float:
        """Return the largest drop that passes."""
        return limits.max_drop

    def say_limit(self, limits: ReportConfig) -> str:
        """Return the limit in words."""
        return f"at most {self.show_drop(limits.max_drop)} worse than FP32"

    def show_limit(self, limits: ReportConfig) -> str:
        """Return the limit as it is typed."""
        return f"report.{self.limit_key}={getattr(limits, self.limit_key):g}"

    @property
    def loss_title(self) -> str:
        """What a figure calls the drop."""
        unit = ", points" if self.percent else ""
        return f"loss of {self.title} against FP32{unit}"

    def show(self, value: float) -> str:
        """Return a value in a cell of a table."""
        return f"{value:.2%}" if self.percent else f"{value:{self._digits}}"

    def show_change(self, change: float) -> str:
        """Return a difference of two values in a cell: in points where they are percent."""
        return f"{100 * change:+z.2f}" if self.percent else f"{change:+z{self._digits}}"

    @property
    def _digits(self) -> str:
        return ".4f" if self.bounded else ".4g"

    def say_change(self, change: float) -> str:
        """Return a difference in a sentence."""
        return self.show_change(change) + (" points" if self.percent else "")

    def show_lost(self, drop: float) -> str:
        """Return a drop in a cell of a table."""
        return f"{drop:+z.4f}" if self.bounded and not self.percent else f"{drop:+z.2%}"

    def show_drop(self, drop: float) -> str:
        """Return a drop: in points, in percent of the baseline's value, or as it is."""
        if self.percent:
            return f"{100 * drop:g} point{'' if drop == 0.01 else 's'}"
        return f"{drop:g}" if self.bounded else f"{100 * drop:g}%"


@dataclass(frozen=True)
class Outputs:
    """What a model returned for n samples.

    Attributes:
        values: each output [n, ...], in the network's order; or what the task's reduction makes of
            them.
        logits: what the final softmax took, for the first m <= n samples [m, ...]; None where the
            model does not end in a softmax, or nobody asked.
        final: what `values` are: `PROBABILITIES`, `LOGITS` or `VALUES`.
        raw: with a reduction, the outputs themselves for the first samples.
    """

    values: tuple[Array, ...]
    logits: Array | None = None
    final: str = PROBABILITIES
    raw: tuple[Array, ...] = ()

    def __len__(self) -> int:
        return len(self.values[0])


@dataclass(frozen=True)
class Targets:
    """What the samples are known to be.

    Attributes:
        labels: classes [n], values [n, ...] or boxes (see `data.boxes`); None without any.
        groups: [n], the same number for samples that belong together; None: each by itself.
        inputs: the network inputs of a slice of the samples.
        pictures: those at some places [k, H, W, C], as the network is fed them but for
            arithmetic; None where samples are no pictures.
    """

    labels: Array | None = None
    groups: NDArray[np.int64] | None = None
    inputs: Callable[[slice], NDArray[np.float32]] | None = None
    pictures: Callable[[NDArray[np.int64]], NDArray[np.uint8]] | None = None


@dataclass(frozen=True)
class Setting:
    """What there is to be scored: the data, and what the network returns.

    Attributes:
        data: the name of the data set.
        labels: of the scored samples.
        class_names, named, class_ids: as `Dataset` has them.
        input_shape: of one network input.
        outputs: the shape of each output by its name, without the batch axis.
        final: see `Outputs`.
    """

    data: str
    labels: Array | None
    class_names: tuple[str, ...]
    named: bool
    input_shape: tuple[int, ...]
    outputs: Mapping[str, tuple[int | None, ...]]
    final: str
    class_ids: tuple[int, ...] = ()

    @property
    def classes(self) -> int | None:
        """How many classes the network tells apart; None where it returns something else."""
        shapes = list(self.outputs.values())
        single = len(shapes) == 1 and len(shapes[0]) == 1 and self.final != VALUES
        return shapes[0][0] if single else None


class Scores(ABC):
    """What one model's outputs come to. Built once, its figures are computed when asked for."""

    @property
    @abstractmethod
    def total(self) -> int:
        """Number of items that were scored."""

    @property
    @abstractmethod
    def value(self) -> float:
        """The primary metric."""

    @property
    def fair(self) -> float:
        """The primary metric without luck, see `Metric.fair`."""
        return self.value

    @property
    @abstractmethod
    def interval(self) -> Interval | None:
        """95% interval of the primary metric; None where there is none."""

    def more(self) -> Metrics:
        """Return what else is measured, by MLflow name; `baseline_` goes before the baseline's."""
        return {}


class Paired(ABC):
    """What `predictions.npz` keeps of a run: enough to test it against another on the same items.

    The report has nothing else of a run, and may be made long after it.
    """

    @classmethod
    @abstractmethod
    def read(cls, arrays: Arrays) -> Self:
        """Read what `arrays` returned.

        Raises:
            KeyError, ValueError: they are not that.
        """

    @abstractmethod
    def arrays(self) -> dict[str, Array]:
        """Return what is kept, by name."""

    @abstractmethod
    def against(self, other: Self) -> float:
        """Return the p-value of the difference from another run on the same items."""

    @abstractmethod
    def margin(self, metric: Metric, drop: float, items: int) -> Margin:
        """Return how far the loss against the baseline lies above a drop, see `Metric.drop`.

        Args:
            metric: the task's own.
            items: how many were scored.
        """

    def by_class(self, classes: int) -> list[float]:
        """Return a p-value against the baseline for each class; empty where there are none."""
        return []


class Comparison(ABC):
    """A model and its FP32 baseline on the same items."""

    model: Any  # Scores, as the task makes them
    baseline: Any

    @property
    def delta(self) -> float:
        """The model's primary metric minus the baseline's."""
        return float(self.model.value - self.baseline.value)

    @property
    def fair_delta(self) -> float:
        """The same without luck, see `Metric.fair`."""
        return float(self.model.fair - self.baseline.fair)

    @property
    @abstractmethod
    def interval(self) -> Interval | None:
        """95% interval of `delta`, paired; None where the baseline is the yardstick itself."""

    @property
    @abstractmethod
    def p_value(self) -> float | None:
        """Of the task's paired test; None where the baseline is the yardstick itself."""

    @property
    @abstractmethod
    def sqnr_db(self) -> float | None:
        """Signal-to-quantization-noise ratio of the outputs, in dB; None where it is not finite."""

    @property
    @abstractmethod
    def paired(self) -> Paired:
        """What is kept of both."""

    def more(self) -> Metrics:
        """Return what else the two come to, by MLflow name."""
        return {"sqnr_db": self.sqnr_db}


@dataclass(frozen=True)
class Task(ABC):
    """What makes a model's outputs good.

    Attributes:
        class_names: of the labels; empty where they are no classes.
    """

    class_names: tuple[str, ...] = ()

    name: ClassVar[str]
    test: ClassVar[str]  # the paired test, in words
    intervals: ClassVar[str]  # how they are made, in words
    note: ClassVar[str] = ""  # on what was measured, below every table
    joins_groups: ClassVar[bool] = False  # scores the samples of a group as one
    paired: ClassVar[type[Paired]]
    schema: ClassVar[type[TaskConfig]] = TaskConfig
    figure_files: ClassVar[Mapping[str, str]] = {}  # that a run draws: file name -> caption

    @property
    def few_names(self) -> tuple[str, ...]:
        """The names of the classes; none where there are more than can be shown one by one."""
        return self.class_names if len(self.class_names) <= MANY_CLASSES else ()

    @classmethod
    @abstractmethod
    def make(cls, config: TaskConfig, setting: Setting) -> Self:
        """Set the task up for a network and data.

        Raises:
            ConfigError: the data lack what it needs.
            ModelError: the network returns something else than it takes.
        """
        ...

    @classmethod
    def recall(cls, config: TaskConfig, class_names: tuple[str, ...]) -> Self:
        """Set the task up for what a run has kept."""
        return cls(class_names)

    @classmethod
    def fingerprint(cls, config: TaskConfig) -> str:
        """Return a hash of code that scores and is not this package's; empty without any."""
        return ""

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """The primary metric."""

    @property
    def beside(self) -> tuple[Metric, ...]:
        """Metrics that have a column of their own beside the primary one's."""
        return ()

    @property
    def reduction(self) -> Reduction | None:
        """What is kept of the outputs of a batch; None: the outputs themselves."""
        return None

    @abstractmethod
    def score(self, outputs: Outputs, targets: Targets) -> Scores:
        """Score what a model returned."""

    @abstractmethod
    def compare(self, model: Any, baseline: Any) -> Comparison:
        """Put a model's scores beside its baseline's, on the same items."""

    def metrics(self, found: Comparison) -> Metrics:
        """Return every metric of a comparison, by MLflow name."""
        name, model, baseline = self.metric.name, found.model, found.baseline
        return {
            name: model.value,
            f"baseline_{name}": baseline.value,
            "delta": found.delta,
            "drop": self.metric.drop(found.delta, baseline.value),
            "p_value": found.p_value,
            "total": model.total,
            **_ends("ci95", model.interval),
            **_ends("delta_ci95", found.interval),
            **model.more(),
            **{f"baseline_{key}": value for key, value in baseline.more().items()},
            **found.more(),
        }

    def summary(self, found: Comparison) -> str:
        """Return a comparison in a few words."""
        shown = f"{self.metric.title} {self.metric.show(found.model.value)}"
        return f"{shown} ({self.metric.say_change(found.delta)})"

    def arrays(self, found: Comparison) -> dict[str, Array]:
        """Return what `predictions.npz` keeps."""
        return found.paired.arrays()

    def tables(self, found: Comparison) -> dict[str, Table]:
        """Return tables to be written as CSV, by file name."""
        return {}

    def documents(self, found: Comparison) -> dict[str, str]:
        """Return further files, by name."""
        return {}

    def figures(self, found: Comparison, title: str) -> "dict[str, Figure]":
        """Return figures, by the names of `figure_files`."""
        return {}

    def doubt(self, baseline: Any, expected: float | None) -> str | None:
        """Say why nothing can be judged beside a baseline with these scores; None where it can.

        Where FP32 is not shown to be better than chance, as the task has it, or is clearly below
        what the user expects, its network, data or preprocessing are wrong.

        Args:
            expected: of the primary metric, where the user knows it.
        """
        return None

    def describe(self) -> dict[str, str]:
        """Return what the task came to, as MLflow params."""
        metric = self.metric
        return {"scored_as": self.name, "metric": metric.name, "metric_direction": metric.direction}


def _ends(name: str, interval: Interval | None) -> Metrics:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def check_columns(columns: Sequence[Array], kind: str) -> None:
    """Raise `ValueError` where arrays are not one number of this NumPy kind for each item."""
    shape = columns[0].shape
    if any(each.ndim != 1 or each.shape != shape or each.dtype.kind != kind for each in columns):
        raise ValueError("not one number for each item")


def doubt_below(found: str, interval: Interval, expected: float | None) -> str | None:
    """Doubt an FP32 network that is significantly worse than the user knows it to be."""
    below = expected is not None and interval[1] < expected
    return f"BELOW report.expected_accuracy={expected:g}, {found}" if below else None


def check_labels(task: str, setting: Setting, kinds: str, takes: str) -> None:
    """Raise `ConfigError` where the labels are missing, or not of these NumPy kinds."""
    labels = setting.labels
    if labels is None or labels.dtype.kind not in kinds:
        got = "none" if labels is None else f"{labels.dtype} {list(labels.shape)}"
        raise ConfigError(f"task={task}: the labels of {setting.data} are {got}, takes {takes}")


def describe(outputs: Mapping[str, tuple[int | None, ...]]) -> str:
    """Return names and shapes of a network's outputs."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in outputs.items())
