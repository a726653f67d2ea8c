"""The parts of a task: a metric, scores of a model's outputs, and a paired test of two models.

    outputs, targets --score--> Scores;  Scores of model and baseline --compare--> Comparison

Evaluation, the report, the table, the ladder and the sensitivity analysis ask the task. None of
them knows classes, accuracy or argmax. `registry` finds a task by its name.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import ReportConfig, TaskConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tasks.distortion import is_silent
from resnet8ptq.tasks.sequential import StoppingPlan
from resnet8ptq.tasks.statistics import Interval, Margin, Values

if TYPE_CHECKING:  # a run imports matplotlib only when it draws
    from matplotlib.figure import Figure

DIGITS = 9  # of a loss, after the point
MANY_CLASSES = 50  # with more, metrics of single classes go into files alone
# Groups of metrics, which MLflow shows apart. The metrics without one lead its table.
BASELINE = "baseline/"  # of FP32
CHOICE = "choice/"  # on the selection samples
TOTAL = "counts/total"  # scored samples
PLANNED = "stopping/planned"  # samples that evaluate.stop=decided might have scored
STOPPED_LOSS = "stopping/loss"  # against FP32, corrected for the looks
UNDEFINED = "ci95/undefined_share"  # of the bootstrap samples
SAMPLES = "samples"  # array of `predictions.npz` that identifies the samples
GROUPED = "grouped"  # param of runs that scored grouped samples one by one
PROBABILITIES, LOGITS, VALUES = "probabilities", "logits", "values"  # kinds of outputs

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Table = Iterable[Sequence[object]]
Metrics = dict[str, float | None]
# Reduces the outputs of a batch to the part that is kept, where whole outputs are too large.
Reduction = Callable[[Sequence[Array]], tuple[Array, ...]]


@dataclass(frozen=True)
class Metric:
    """A number for comparing models.

    Attributes:
        name: its name in MLflow; the baseline's is `baseline/{name}`.
        title: its name in tables and figures.
        percent: whether it is a fraction, shown in percent and its differences in points.
        bounded: whether a drop is a difference; else it is a fraction of the baseline's value.
        fair: name of the tie-adjusted metric that ranks models; empty if there is none.
        least: the key of `report` with the smallest accepted value.
        limit_key: the key of `report` with the largest accepted drop.
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
        """The MLflow name of the metric that ranks models."""
        return self.fair or self.name

    @property
    def direction(self) -> str:
        """`maximize` or `minimize`, as Hydra's sweepers write it."""
        return "maximize" if self.maximize else "minimize"

    @property
    def scale(self) -> int:
        """The factor for values in figures."""
        return 100 if self.percent else 1

    def cost(self, value: float) -> float:
        """Return the value, negated if higher is better, so that lower is better."""
        return -value if self.maximize else value

    def drop(self, change: float, baseline: float) -> float:
        """Return the loss for a change of the baseline's value; negative for a gain.

        It is rounded, because the difference of two fractions has a float64 error.
        """
        worse = self.cost(change)
        loss = worse / abs(baseline) if not self.bounded and baseline else worse
        return round(loss, DIGITS) + 0.0  # no -0.0

    def loss(self, model: "Scores", baseline: "Scores", fair: bool = False) -> float:
        """Return the loss of a model against the baseline, in the unit of `limit`.

        Searches, verdicts and tables compare only this value with a limit.

        Args:
            fair: whether the metric is adjusted for ties.
        """
        if fair:
            return self.drop(float(model.fair_gain(baseline)), baseline.fair)
        return self.drop(float(model.value - baseline.value), baseline.value)

    def allowed(self, drop: float, baseline: float) -> float:
        """Return a drop converted to the metric's unit."""
        return drop if self.bounded or not baseline else drop * abs(baseline)

    def limit(self, limits: ReportConfig) -> float:
        """Return the largest drop that passes."""
        return limits.max_drop

    def say_limit(self, limits: ReportConfig) -> str:
        """Return the limit as text."""
        return f"at most {self.show_drop(limits.max_drop)} worse than FP32"

    def say_margin(self, margin: float) -> str:
        """Return the margin against the best model as text."""
        return f"at most {self.show_drop(margin)} worse than the best"

    def show_limit(self, limits: ReportConfig) -> str:
        """Return the limit as an override."""
        return f"report.{self.limit_key}={getattr(limits, self.limit_key):g}"

    @property
    def loss_title(self) -> str:
        """The name of the drop in figures."""
        unit = ", points" if self.percent else ""
        return f"loss of {self.title} against FP32{unit}"

    def show(self, value: float) -> str:
        """Return a value as text for a table."""
        return f"{value:.2%}" if self.percent else f"{value:{self._digits}}"

    def show_change(self, change: float) -> str:
        """Return a difference of two values as text for a table; in points if they are percent."""
        return f"{100 * change:+z.2f}" if self.percent else f"{change:+z{self._digits}}"

    @property
    def _digits(self) -> str:
        return ".4f" if self.bounded else ".4g"

    def say_change(self, change: float) -> str:
        """Return a difference as text for a sentence."""
        return self.show_change(change) + (" points" if self.percent else "")

    def show_lost(self, drop: float) -> str:
        """Return a drop as text for a table."""
        return f"{drop:+z.4f}" if self.bounded and not self.percent else f"{drop:+z.2%}"

    def show_drop(self, drop: float) -> str:
        """Return a drop as text: in points, in percent of the baseline's value, or as a number."""
        if self.percent:
            return f"{100 * drop:g} point{'' if drop == 0.01 else 's'}"
        return f"{drop:g}" if self.bounded else f"{100 * drop:g}%"


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model for n samples.

    Attributes:
        values: every output [n, ...] in the network's order, after the task's reduction.
        logits: the input of the final softmax for the first m <= n samples [m, ...]; None if the
            model does not end in a softmax, or logits were not collected.
        final: the kind of `values`: `PROBABILITIES`, `LOGITS` or `VALUES`.
        raw: with a reduction, the outputs of the first batches before it, in the network's order.
    """

    values: tuple[Array, ...]
    logits: Array | None = None
    final: str = PROBABILITIES
    raw: tuple[Array, ...] = ()

    def __len__(self) -> int:
        return len(self.values[0])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `raw`: the drawing process does not need it, and a copy takes memory."""
        return {**self.__dict__, "raw": ()}

    def first(self, count: int) -> "Outputs":
        """Return the outputs for the first `count` samples."""
        logits = None if self.logits is None else self.logits[:count]
        return replace(self, values=tuple(v[:count] for v in self.values), logits=logits)


@dataclass(frozen=True)
class Targets:
    """The targets of the samples.

    Attributes:
        labels: classes [n], values [n, ...] or boxes (see `data.boxes`); None without labels.
        groups: group numbers [n], equal for samples that belong together; None without groups.
        inputs: returns the network inputs of a slice of the samples.
        pictures: returns the pictures with given indices [k, H, W, C], in the size of the network
            input and before arithmetic; None if samples are not pictures.
    """

    labels: Array | None = None
    groups: NDArray[np.int64] | None = None
    inputs: Callable[[slice], NDArray[np.float32]] | None = None
    pictures: Callable[[NDArray[np.int64]], NDArray[np.uint8]] | None = None


@dataclass(frozen=True)
class TaskContext:
    """The data and the network outputs for which a task is made.

    Attributes:
        class_names, named, class_ids: see `Dataset`.
        outputs: the shape of each output by name, without the batch axis.
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
        """Number of classes of the network; None for other outputs."""
        shapes = list(self.outputs.values())
        single = len(shapes) == 1 and len(shapes[0]) == 1 and self.final != VALUES
        return shapes[0][0] if single else None


class SampleValues(ABC):
    """Values of one model on all samples, enough for an interval and a paired test.

    `predictions.npz` keeps these values, so that a later report can test any two runs.
    """

    shared: ClassVar[tuple[str, ...]] = ()  # arrays that exist once for model and baseline

    @property
    @abstractmethod
    def interval(self) -> Interval:
        """95% interval of the metric."""

    @abstractmethod
    def against(self, other: Self) -> tuple[Interval, float]:
        """Return the 95% interval of the difference from another model, and its p-value."""

    @abstractmethod
    def margin(self, baseline: Self, metric: Metric, drop: float, items: int) -> Margin:
        """Return how far the loss against the baseline lies above `drop`; see `Metric.drop`."""

    def margin_over(self, other: Self, metric: Metric, drop: float, items: int) -> Margin:
        """Return the margin of the loss against another quantized model above `drop`."""
        return self.margin(other, metric, drop, items)

    def select(self, rows: NDArray[np.bool_]) -> Self | None:
        """Return the values of some samples [n]; None if the values are not kept by sample."""
        return None

    @abstractmethod
    def arrays(self) -> dict[str, Array]:
        """Return the arrays to keep, by name."""

    def losses(self, baseline: Self) -> Values | None:
        """Return the loss of each sample against the baseline; None if the metric is not a mean."""
        return None

    def undefined_share(self, baseline: Self) -> float:
        """Return the share of bootstrap samples without a value; 0 without a bootstrap."""
        return 0.0

    def by_class(self, baseline: Self, classes: int) -> list[float]:
        """Return a p-value against the baseline for each class; empty without classes."""
        return []

    def found_by_class(self, baseline: Self, classes: int, level: float) -> list[float]:
        """Return the loss on each class that a test at this level detects with 80% power."""
        return []


@dataclass(frozen=True)
class Paired:
    """The values of a model and of its FP32 baseline on the same samples.

    Attributes:
        samples: the id of each sample, see `Split.sample_ids`; None for older runs.
    """

    model: SampleValues
    baseline: SampleValues
    samples: NDArray[np.uint64] | None = None

    def select(self, rows: NDArray[np.bool_]) -> "Paired | None":
        """Return the values of some samples; None if they are not kept by sample."""
        model, baseline = self.model.select(rows), self.baseline.select(rows)
        return None if model is None or baseline is None else Paired(model, baseline)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of both, those of the baseline as `baseline_{name}`."""
        baseline = self.baseline.arrays().items()
        shared = self.baseline.shared
        named = {f"baseline_{name}": array for name, array in baseline if name not in shared}
        return self.model.arrays() | named

    def same_samples(self, other: Self) -> bool:
        """Return whether another run has the same samples, by the arrays that models share."""
        ours, theirs = self.baseline.arrays(), other.baseline.arrays()
        return all(np.array_equal(ours[name], theirs[name]) for name in self.baseline.shared)

    def margin_over(self, other: Self, metric: Metric, drop: float, items: int) -> Margin:
        """Return the margin of the loss against another run on the same samples above `drop`."""
        return self.model.margin_over(other.model, metric, drop, items)

    def margin(self, metric: Metric, drop: float, items: int) -> Margin:
        """Return the margin of the loss above `drop`, see `SampleValues.margin`."""
        return self.model.margin(self.baseline, metric, drop, items)

    def losses(self) -> Values | None:
        """Return the loss of each sample, see `SampleValues.losses`."""
        return self.model.losses(self.baseline)

    def by_class(self, classes: int) -> list[float]:
        """Return a p-value against the baseline for each class; empty without classes."""
        return self.model.by_class(self.baseline, classes)

    def found_by_class(self, classes: int, level: float) -> list[float]:
        """Return the loss on each class that a test detects, see `SampleValues.found_by_class`."""
        return self.model.found_by_class(self.baseline, classes, level)


@dataclass(frozen=True)
class PairedTest:
    """The paired test of a task.

    Attributes:
        intervals: the name of the interval method in texts.
        read_values: reads the values of a model (prefix "") or its baseline ("baseline_") from
            the arrays of `Paired.arrays`; raises KeyError or ValueError on other arrays.
        sequential: whether `evaluate.stop=decided` can stop it early.
    """

    name: str
    intervals: str
    read_values: Callable[[Arrays, str], SampleValues]
    sequential: bool = False

    def read(self, arrays: Arrays) -> Paired:
        """Return the values that `predictions.npz` keeps."""
        samples = arrays.get(SAMPLES)
        if samples is not None:
            check_columns([samples], "u")
        return Paired(self.read_values(arrays, ""), self.read_values(arrays, "baseline_"), samples)


class Scores(ABC):
    """The scored outputs of one model; metrics are computed on demand."""

    @property
    @abstractmethod
    def total(self) -> int:
        """Number of scored items."""

    @property
    @abstractmethod
    def value(self) -> float:
        """The primary metric."""

    @property
    @abstractmethod
    def per_sample(self) -> SampleValues:
        """The values for the paired test."""

    @abstractmethod
    def sqnr_db(self, baseline: Self) -> float | None:
        """Return the SQNR of the outputs against the baseline's in dB, see `distortion.to_db`."""

    @property
    def fair(self) -> float:
        """The primary metric adjusted for ties, see `Metric.fair`."""
        return self.value

    def fair_gain(self, baseline: Self) -> float:
        """Return `fair` minus the baseline's."""
        return self.fair - baseline.fair

    def more(self) -> Metrics:
        """Return further metrics by MLflow name; the baseline's get the prefix `BASELINE`."""
        return {}


@dataclass(frozen=True)
class Comparison:
    """A model and its FP32 baseline on the same samples.

    Attributes:
        model, baseline: the `Scores` of the task.
        tested: whether a paired test compares both; False if FP32 itself is the reference.
        plan: the plan of the sequential test; None if all samples are scored.
    """

    model: Any
    baseline: Any
    metric: Metric
    tested: bool = True
    plan: StoppingPlan | None = None

    @property
    def delta(self) -> float:
        """The model's primary metric minus the baseline's."""
        return float(self.model.value - self.baseline.value)

    def p_within(self, limit: float) -> float:
        """Return the one-sided p-value of "the loss is at the limit or above"."""
        return self.paired.margin(self.metric, limit, self.model.total).p_within

    @property
    def fair_delta(self) -> float:
        """`delta`, adjusted for ties."""
        return float(self.model.fair_gain(self.baseline))

    @property
    def drop(self) -> float:
        """The loss against the baseline, see `Metric.loss`."""
        return self.metric.loss(self.model, self.baseline)

    @property
    def fair_drop(self) -> float:
        """The tie-adjusted loss against the baseline, see `drop`."""
        return self.metric.loss(self.model, self.baseline, fair=True)

    @cached_property
    def _test(self) -> tuple[Interval | None, float | None]:
        if not self.tested:
            return None, None
        paired = self.paired
        return paired.model.against(paired.baseline)

    @property
    def interval(self) -> Interval | None:
        """95% interval of `delta`, paired; None without a test."""
        return self._test[0]

    @property
    def p_value(self) -> float | None:
        """The p-value of the paired test; None without a test."""
        return self._test[1]

    @cached_property
    def sqnr_db(self) -> float | None:
        """SQNR of the outputs in dB; None if it is not finite."""
        return self.model.sqnr_db(self.baseline)

    @property
    def paired(self) -> Paired:
        """Per-sample values of model and baseline, for `predictions.npz`."""
        values = self.model.per_sample
        values = values if self.plan is None else replace(values, plan=self.plan)
        return Paired(values, self.baseline.per_sample)

    @property
    def _changes(self) -> tuple[int, int, int]:
        return self.model.per_sample.changes(self.baseline.per_sample)

    @property
    def outcome(self) -> str:
        """The reason to stop scoring here, see `StoppingPlan.outcome`; empty to continue."""
        return "" if self.plan is None else self.plan.outcome(*self._changes)

    @property
    def stopping(self) -> Metrics:
        """Planned samples, and the loss corrected for the interim looks; empty without a plan."""
        if self.plan is None:
            return {}
        loss, interval = self.plan.estimate(*self._changes), self.plan.interval(*self._changes)
        return {PLANNED: self.plan.total, STOPPED_LOSS: loss, **_ends(STOPPED_LOSS, interval)}


def _measure_distance(comparison: Comparison) -> Metrics:
    return {"sqnr_db": comparison.sqnr_db}


def _keep_paired(comparison: Comparison) -> dict[str, Array]:
    return comparison.paired.arrays()


def _nothing(*arguments: object) -> dict[str, Any]:
    return {}


def _no_doubt(baseline: Scores, expected: float | None) -> None:
    return None


def summarize(comparison: Comparison) -> str:
    """Return the primary metric and its change."""
    metric = comparison.metric
    change = metric.say_change(comparison.delta)
    return f"{metric.title} {metric.show(comparison.model.value)} ({change})"


@dataclass(frozen=True)
class Task:
    """Scores outputs and compares two models; composed of its parts.

    The parts are module-level functions or `partial`s of them, because a task is pickled.

    Attributes:
        criterion: a metric of `pair_metrics` with less variance over samples than the primary one.
            A sweep uses it to choose among the models near the best; None: only the primary metric
            counts.
        beside: further metrics with a column of the table.
        class_names: names of the labels' classes; empty if labels are not classes.
        note: a line below every table.
        joins_groups: whether samples of a group are scored as one.
        relate: rescores a model with FP32 as the reference; None if labels are the reference.
        reduction: reduces the outputs of a batch to the needed part; None keeps all.
        figure_files: caption of each figure by its file name.
        pair_metrics: metrics of a comparison by MLflow name.
        arrays: the content of `predictions.npz`, with the arrays of the paired test.
        tables: CSV files by name.
        scored_output: the index of the scored output; None: all are scored.
        doubt: the reason why no verdict is valid for a baseline with these scores, or None. If FP32
            is not proven better than chance, or is clearly below the expected value, the network,
            the data or the preprocessing is wrong.
    """

    name: str
    metric: Metric
    score: Callable[[Outputs, Targets], Scores]
    test: PairedTest
    criterion: Metric | None = None
    beside: tuple[Metric, ...] = ()
    class_names: tuple[str, ...] = ()
    note: str = ""
    joins_groups: bool = False
    relate: Callable[[Any, Any], Scores] | None = None
    reduction: Reduction | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    figure_files: Mapping[str, str] = field(default_factory=dict)
    figures: "Callable[[Comparison, str], dict[str, Figure]]" = _nothing
    pair_metrics: Callable[[Comparison], Metrics] = _measure_distance
    arrays: Callable[[Comparison], dict[str, Array]] = _keep_paired
    tables: Callable[[Comparison], dict[str, Table]] = _nothing
    scored_output: int | None = None
    documents: Callable[[Comparison], dict[str, str]] = _nothing
    doubt: Callable[[Any, float | None], str | None] = _no_doubt
    summary: Callable[[Comparison], str] = summarize

    @property
    def few_names(self) -> tuple[str, ...]:
        """The names of the classes; empty with more than `MANY_CLASSES`."""
        return self.class_names if len(self.class_names) <= MANY_CLASSES else ()

    def compare(self, model: Any, baseline: Any, plan: StoppingPlan | None = None) -> Comparison:
        """Compare the scores of a model with those of its baseline on the same samples."""
        if self.relate is None:
            return Comparison(model, baseline, self.metric, plan=plan)
        related = self.relate(model, baseline)
        return Comparison(related, baseline, self.metric, tested=False, plan=plan)

    def find_silent(self, names: Sequence[str], outputs: Outputs, baseline: Outputs) -> str:
        """Return which scored output does not depend on the sample, as text; empty if all do.

        Args:
            names: the network's outputs.
            outputs, baseline: outputs of the model and of FP32 for the same samples.
        """
        for number, (values, exact) in enumerate(zip(outputs.values, baseline.values, strict=True)):
            if self.scored_output in (None, number) and is_silent(exact, values):
                name = f"output {names[number]}" if len(names) == len(outputs.values) else "output"
                state = "the same" if values[:1].any() else "zero"
                return f"{name} is {state} for every sample"
        return ""

    def metrics(self, comparison: Comparison) -> Metrics:
        """Return every metric of a comparison, by MLflow name."""
        name, model, baseline = self.metric.name, comparison.model, comparison.baseline
        metrics = {
            name: model.value,
            f"{BASELINE}{name}": baseline.value,
            "drop": comparison.drop,
            "paired/p_value": comparison.p_value,
            TOTAL: model.total,
            **_ends("ci95/value", model.per_sample.interval),
            **_ends("ci95/delta", comparison.interval),
            **model.more(),
            **{f"{BASELINE}{key}": value for key, value in baseline.more().items()},
            **self.pair_metrics(comparison),
            **comparison.stopping,
        }
        if share := model.per_sample.undefined_share(baseline.per_sample):
            metrics[UNDEFINED] = share
        if self.relate is None:
            return metrics
        # The reference was not measured itself.
        return {k: v for k, v in metrics.items() if not k.startswith(BASELINE)}

    def describe(self) -> dict[str, str]:
        """Return the task as MLflow params."""
        metric = {"metric": self.metric.name, "metric_direction": self.metric.direction}
        return {"scored_as": self.name, **metric, **self.params}


@dataclass(frozen=True)
class TaskType:
    """An entry of the registry, which makes a task.

    Attributes:
        make: makes the task for a network and data. Raises ConfigError if the data are not
            sufficient, ModelError if the outputs do not fit.
        recall: makes the task from the settings and class names of a finished run.
        fingerprint: returns a hash of the user's scoring code; empty if there is none.
    """

    make: Callable[[Any, TaskContext], Task]
    recall: Callable[[Any, tuple[str, ...]], Task]
    schema: type[TaskConfig] = TaskConfig
    fingerprint: Callable[[Any], str] = lambda config: ""


def _ends(name: str, interval: Interval | None) -> Metrics:
    low, high = interval or (None, None)
    if low is not None and math.isnan(low):  # unknown
        low, high = None, None
    return {f"{name}_low": low, f"{name}_high": high}


def check_columns(columns: Sequence[Array], kind: str) -> None:
    """Raise `ValueError` unless all arrays are 1-d, of equal length and of this NumPy kind."""
    shape = columns[0].shape
    if any(c.ndim != 1 or c.shape != shape or c.dtype.kind != kind for c in columns):
        raise ValueError("not one number for each item")


def doubt_below(shown: str, interval: Interval, expected: float | None) -> str | None:
    """Return a doubt if FP32 is significantly worse than expected; else None."""
    below = expected is not None and interval[1] < expected
    return f"BELOW report.expected_accuracy={expected:g}, {shown}" if below else None


def check_labels(task: str, setting: TaskContext, kinds: str, expected: str) -> None:
    """Raise `ConfigError` if the labels are missing, or not of these NumPy kinds."""
    labels = setting.labels
    if labels is None or labels.dtype.kind not in kinds:
        got = "none" if labels is None else f"{labels.dtype} {list(labels.shape)}"
        raise ConfigError(
            f"task={task}: the labels of {setting.data} are {got}, expected {expected}"
        )


def describe(outputs: Mapping[str, tuple[int | None, ...]]) -> str:
    """Return names and shapes of a network's outputs."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in outputs.items())
