"""The metrics of a run in MLflow: a selection, mostly rounded, in the units of a table.

Accuracy is in percent, its loss in points, a file in kB, a latency in ms. For programs that read
MLflow, the fraction and the bytes are logged too, by their names in the record. MLflow sorts
metrics by name, and folds metrics with a slash into groups; the main metrics therefore have no
group. `result.json` has all exact values; see `details`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tasks import registry
from resnet8ptq.tasks.scoring.metric import BASELINE, CHOICE, DIGITS, TOTAL, Metric
from resnet8ptq.tracking.journal import Journal, Point

MOST = 30  # most metrics that MLflow shows of a run, including its curves
FEW_CLASSES = 10  # with more classes, only the run's files have the accuracy of each class
FP32 = "unquantized/"  # a group, which follows the metrics without a group
TEST = "test/"
ALONE = "timed_alone/"  # the group of latencies that were not measured in turns
SAMPLES = f"{TEST}samples"  # the number of scored samples
_SYSTEM = "system/"  # MLflow's group, on a separate page
# Groups of the record's metrics. From these groups, MLflow shows only the metrics described here.
_FILED = (
    "baseline",
    "batch1",
    "choice",
    "ci95",
    "class",
    "counts",
    "output",
    "paired",
    "system",
)


@dataclass(frozen=True)
class Shown:
    """A metric as MLflow shows it.

    Attributes:
        key: the name in the record.
        name: the name in MLflow, with its group.
        factor: converts the value of the record into the shown unit.
        digits: digits after the point, to which the value is rounded.
    """

    key: str
    name: str
    factor: float = 1.0
    digits: int = 4

    def of(self, value: float) -> float:
        """Return the value that MLflow shows.

        >>> Shown("size_bytes", "size_kb", factor=1e-3, digits=1).of(96_471)
        96.5
        """
        return round(value * self.factor, self.digits)


LATENCIES = (
    Shown("latency_p50_ms", "latency_ms", digits=3),
    Shown("speedup", "speedup", digits=2),
    Shown("latency_batch_p50_ms", "latency_batch_ms", digits=3),
    Shown("speedup_batch", "speedup_batch", digits=2),
    Shown(f"{BASELINE}latency_p50_ms", f"{FP32}latency_ms", digits=3),
    Shown(f"{BASELINE}latency_batch_p50_ms", f"{FP32}latency_batch_ms", digits=3),
)


def value(metric: Metric, group: str = "", prefix: str = "") -> Shown:
    """Return how MLflow shows a task's metric: in percent if `Metric.percent` is set.

    Args:
        group: the group in MLflow, and the beginning of the name in it.
        prefix: the prefix of the name in the record, such as `BASELINE`.
    """
    if metric.percent:
        return Shown(f"{prefix}{metric.name}", f"{group}{metric.name}_percent", 100, 2)
    return Shown(f"{prefix}{metric.name}", f"{group}{metric.name}")


def loss(metric: Metric, group: str = "", prefix: str = "") -> Shown:
    """Return how MLflow shows the loss against FP32: in points, percent, or the metric's unit.

    `group` and `prefix` are those of `value`.
    """
    if metric.percent:
        return Shown(f"{prefix}drop", f"{group}loss_points", 100, 2)
    if metric.bounded:
        return Shown(f"{prefix}drop", f"{group}loss")
    return Shown(f"{prefix}drop", f"{group}loss_percent", 100, 2)


def _main(metric: Metric) -> Iterator[Shown]:
    """Yield the main metrics of the run, then those of FP32, and the number of scored samples."""
    yield value(metric)
    yield loss(metric)
    yield Shown("size_bytes", "size_kb", 1e-3, 1)
    if metric.percent:
        yield Shown(metric.name, metric.name, digits=DIGITS)
    yield Shown("size_bytes", "size_bytes", digits=0)
    yield Shown("sqnr_db", "sqnr_db", digits=2)
    yield value(metric, FP32, BASELINE)
    yield Shown(f"{BASELINE}size_bytes", f"{FP32}size_kb", 1e-3, 1)
    yield Shown(TOTAL, SAMPLES)


def _further(
    metric: Metric, beside: tuple[Metric, ...], class_names: Sequence[str]
) -> Iterator[Shown]:
    """Yield further metrics; `select` shows the first of them, as far as `MOST` allows."""
    for name in class_names:
        yield Shown(f"class/{name}/accuracy", f"class/{name}/accuracy")
    # The main metric's statistics on the scored samples
    yield Shown("agreement", f"{TEST}agreement_percent", 100, 2)
    yield Shown("paired/p_value", f"{TEST}p_value", digits=6)
    unit = value(metric)
    for end in ("low", "high"):
        yield Shown(f"ci95/value_{end}", f"{TEST}{unit.name}_{end}", unit.factor, unit.digits)
    yield Shown("paired/right_to_wrong", f"{TEST}right_to_wrong")
    yield Shown("paired/wrong_to_right", f"{TEST}wrong_to_right")
    # The main metric elsewhere, other metrics, and the run's costs
    yield value(metric, f"{TEST}selection_", CHOICE)
    yield loss(metric, f"{TEST}selection_", CHOICE)
    yield value(metric, f"{TEST}batch1_", "batch1/")
    for other in beside:
        yield value(other, TEST)
    yield Shown("peak_memory_bytes", f"{_SYSTEM}peak_memory_mb", 1e-6, 1)
    for step in ("quantize_s", "prepare_s", "evaluate_s"):
        yield Shown(f"{_SYSTEM}{step}", f"{_SYSTEM}{step}", digits=3)


def select(journal: Journal) -> list[Point]:
    """Return the metrics that MLflow shows of a run, besides its curves.

    A job of a sweep has no latency here, because the end of the sweep decides which to log.
    """
    curves = _curve_keys(journal)
    values = {key: number for key, number in journal.metrics.items() if key not in curves}
    main, further = _describe(journal)
    shown = _show(main, values)
    room = MOST - len(curves)
    if journal.parent_id is None:
        shown |= show_latencies(values, ALONE)
    else:  # the end of the sweep adds latencies
        room -= len(LATENCIES)

    # Add metrics of an analysis or of a search, which have no description
    described = {one.key for one in (*main, *further, *LATENCIES)}
    for key, number in values.items():
        group, slash, _ = key.partition("/")
        if slash and group not in _FILED and key not in described:
            shown[key] = number
    shown |= _show(further, values)
    last_ms = max((when for _, _, when, _ in journal.points), default=0)
    points = [(name, number, last_ms, 0) for name, number in shown.items()]
    return points[: max(0, room)]


def _show(described: Iterable[Shown], values: Mapping[str, float]) -> dict[str, float]:
    """Return the described metrics among `values`, converted, by their names in MLflow."""
    shown = {}
    for one in described:
        if one.key in values:
            shown[one.name] = one.of(values[one.key])
    return shown


def select_curves(journal: Journal) -> list[Point]:
    """Return all points of the metrics that are curves."""
    curves = _curve_keys(journal)
    return [point for point in journal.points if point[0] in curves]


def _curve_keys(journal: Journal) -> set[str]:
    """Return the metrics that are curves: they have a point at a step other than 0."""
    return {key for key, _, _, step in journal.points if step}


def show_latencies(values: Mapping[str, float], group: str = "") -> dict[str, float]:
    """Return the latencies and speedups in `values`, by their names in MLflow below `group`."""
    shown = _show(LATENCIES, values)
    return {f"{group}{name}": number for name, number in shown.items()}


def read_latencies(shown: Mapping[str, float]) -> dict[str, float]:
    """Return latencies and speedups of MLflow's metrics by their names in a record.

    Metrics in the group `ALONE` are left out.
    """
    return {one.key: shown[one.name] for one in LATENCIES if one.name in shown}


def _describe(journal: Journal) -> tuple[list[Shown], list[Shown]]:
    """Return how MLflow shows a run's main and further metrics; empty if its task is damaged."""
    try:
        task = registry.recall(journal.params)
    except TrackingError:  # the folder comes from other people
        return [], []
    names = []
    for key in journal.metrics:
        kind, _, rest = key.partition("/")
        name, _, metric = rest.partition("/")
        if kind == "class" and metric == "accuracy":
            names.append(name)
    if len(names) > FEW_CLASSES:
        names = []
    return [*_main(task.metric)], [*_further(task.metric, task.beside, names)]
