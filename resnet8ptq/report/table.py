"""The table of runs: for the terminal, and as cells and CSV for the report."""

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import files
from resnet8ptq.core.console import stdout
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.text import show
from resnet8ptq.report.families import digest, group
from resnet8ptq.tasks import registry
from resnet8ptq.tasks.contract import GROUPED, Metric, Task
from resnet8ptq.tasks.statistics import holm
from resnet8ptq.tracking.history import Record
from resnet8ptq.tracking.store import Store

PAIRED = ("delta", "interval", "p")  # against FP32
PIPE_WIDTH = 240  # of the widest table
REPORT = "report.html"
WIDE = ("interval", "ms")  # left out where there is little room
CHOICES = ("framework", "dtype", "calibration", "weights")
COSTS = ("size kB", "reduction", "ms", "speedup")
LIMIT, VOID = "limit", "void"  # see `verdicts`
MANY = 50  # runs of a family; above, not all are shown at once
FIRST = 20  # of many: the best
NAMED = 12  # runs behind one note
_BASELINE_KEYS = ("backend", "backend.flow", "data", "model.fold", "evaluate.split")
P_NOTE = (
    "p: {test} against the FP32 baseline of the same framework, on the same images{correction}."
)
LIMIT_NOTE = (
    "limit: {limit} ({key}). pass or fail: the one-sided 95% bound of the loss{several} lies "
    "within or beyond. undecided: these samples cannot tell; in brackets how many would, 4 times "
    "in 5, should the loss be the one measured; without brackets, they have no spread to judge by."
)
VOID_NOTE = (
    "void: FP32 itself is not shown to be better than chance, or is below report.expected_accuracy:"
    " what a model loses against it says nothing."
)
GROUPED_NOTE = (
    "groups: samples of one group are alike, and the tests take each for one by itself: intervals "
    "are too narrow, p is too small, and no limit is decided."
)
DYNAMIC_NOTE = (
    "{label}: ranges are taken from each batch, so that {title} depends on evaluate.batch_size; "
    "one image at a time it is {value}."
)
SIMULATED_NOTE = (
    "execution: where simulated, the run computes in float what integer kernels would; it has no "
    "latency to compare."
)
INTERVAL_NOTE = "interval: of delta, 95%; {how}."
SPEEDUP_NOTE = (
    "ms: the median latency of one image, {threads} thread(s); speedup: FP32's divided by the "
    "run's. A run and its FP32 are measured in turns, two runs at different times."
)
FIRST_NOTE = "The {first} best of {total} runs by {title}; the others: {others}."
FAMILIES_NOTE = (
    "The runs were scored on {count} different sets of images, or by different metrics. Each set "
    "stands apart: runs are ranked, tested and recommended only against runs on the same images."
)


@dataclass(frozen=True)
class Judged:
    """What `verdicts` say of the runs.

    Attributes:
        texts: by the run's id; what the column `LIMIT` shows.
        limits: what they are judged by.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    limits: ReportConfig = field(default_factory=ReportConfig)


NOTHING_JUDGED = Judged()


def task_of(records: Sequence[Record]) -> Task:
    """Return what scored the runs of a family; where none was, a classification."""
    found = next((record for record in records if "total" in record.metrics), None)
    if found is None:
        return registry.recall({})
    return registry.recall(found.params, parse_names(found.tags.get("class_names")))


def parse_names(text: str | None) -> tuple[str, ...]:
    """Return the class names that a run was tagged with.

    Raises:
        TrackingError: they are no list of names.
    """
    try:
        names = json.loads(text or "[]")
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TrackingError(f"class_names: got {(text or '')[:100]!r}, takes a list of names")
    return tuple(names)


def columns(records: Sequence[Record]) -> list[str]:
    """Return the heads of the columns; behind `weights` stands what else the runs vary."""
    return [*CHOICES, *varied(records), *numeric(records), LIMIT, "execution", "status"]


def numeric(records: Sequence[Record]) -> list[str]:
    """Return the heads of the columns of numbers: those of the task, and what a model costs."""
    task = task_of(records)
    return [task.metric.title, *PAIRED, *(metric.title for metric in task.beside), *COSTS]


def rows(records: Sequence[Record], judged: Judged = NOTHING_JUDGED) -> list[list[str]]:
    """Return one row of cells for each run, behind one for each framework's FP32 baseline."""
    adjusted, keys, task = adjusted_p(records), varied(records), task_of(records)
    runs = []
    for record in records:
        extra = [record.params.get(key, "") for key in keys]
        limit = judged.texts.get(record.run_id, "")
        figures = _figures(task, record, adjusted.get(record.run_id), limit)
        runs.append([*combination(record).cells, *extra, *figures])
    return [*_baseline_rows(task, records, [""] * len(keys)), *runs]


def best_first(records: Sequence[Record]) -> list[int]:
    """Return the places of the runs by their metric, the best first, those without it last."""
    metric = task_of(records).metric

    def cost(place: int) -> float:
        value = records[place].metrics.get(metric.name)  # as the column has it
        return math.inf if value is None else metric.cost(value)

    return sorted(range(len(records)), key=cost)


def shorten(records: Sequence[Record], lines: Sequence[list[str]]) -> tuple[list[list[str]], str]:
    """Return the lines of `rows` to show at once, and in words what is left out.

    All of them, and nothing, unless the runs are `MANY`; else those of the baselines and of the
    best runs.
    """
    if len(records) <= MANY:
        return list(lines), ""
    places, baselines = best_first(records), len(lines) - len(records)
    left = Counter(records[place].tags.get("status", "?") for place in places[FIRST:])
    note = FIRST_NOTE.format(
        first=FIRST,
        total=f"{len(records):,}",
        title=task_of(records).metric.title,
        others=", ".join(f"{count:,} {status}" for status, count in left.items()),
    )
    return [*lines[:baselines], *(lines[baselines + place] for place in places[:FIRST])], note


def without_empty(
    heads: Sequence[str], lines: Sequence[Sequence[str]], others: Collection[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Return a table without the columns in which no row has anything, and without `others`."""
    kept = [
        place
        for place, head in enumerate(heads)
        if head not in others and any(line[place] for line in lines)
    ]
    return [heads[place] for place in kept], [[line[place] for place in kept] for line in lines]


def varied(records: Sequence[Record]) -> list[str]:
    """Return the settings, beyond the four of every table, that differ between runs."""
    keys = set()
    for backend in {record.params.get("backend") for record in records}:
        members = [record for record in records if record.params.get("backend") == backend]
        for key in filter(_is_setting, {key for record in members for key in record.params}):
            if len({r.params.get(key) for r in members if _is_settled(r, key)}) > 1:
                keys.add(key)
    return sorted(keys)


def _is_settled(record: Record, key: str) -> bool:
    """Tell whether a run has come to know a setting, and not only what was asked for."""
    status = record.tags.get("status")
    if status == "unsupported":
        return key not in ("data.name", "planned_bits")
    return status != "failed" or record.params.get(key) not in (None, "null")


def _is_setting(key: str) -> bool:
    """Tell what a person sets from what follows from it, and from where things are kept."""
    prefixes = (
        *("backend.", "calib.", "model.", "evaluate.", "latency."),
        *("symmetric.", "corrections.", "qat.", "task."),
    )
    names = (
        *("seed", "threads", "nodes_to_quantize", "nodes_to_exclude", "op_types", "data.name"),
        *("format", "reduce_range", "float_output", "float_tail", "slim"),
        *("max_drop", "held_out_images", "precision.max_bytes", "precision.max_drop"),
        "planned_bits",  # stands for precision.plan, which is a key for each layer
    )
    shown = key.endswith(".name") or key == "backend.flow"  # in columns of their own
    return key in names or (key.startswith(prefixes) and not shown)


def title(records: Sequence[Record]) -> str:
    """Return the data sets and models that the rows speak of."""
    measured = [r for r in records if "total" in r.metrics] or records
    names = {
        (r.params.get("dataset", r.params.get("data", "?")), r.params.get("model", "?"))
        for r in measured
    }
    totals = {int(r.metrics["total"]) for r in records if "total" in r.metrics}
    held_out = any(r.params.get("evaluate.split") == "held_out" for r in measured)
    kind = "held-out training" if held_out else "test"
    images = f", {totals.pop():,} {kind} images" if len(totals) == 1 else ""
    scored = {r.params.get("scored_as", "classification") for r in measured} - {"classification"}
    tasks = "".join(f", task={name}" for name in sorted(scored))
    return "; ".join(f"{data}, {model}" for data, model in sorted(names)) + images + tasks


def headings(families: Sequence[Sequence[Record]]) -> list[str]:
    """Return the title of each family of runs; with the digest of its images where two are alike.

    Args:
        families: as `families.group` makes them.
    """
    titles = [title(family) for family in families]
    return [
        text if titles.count(text) == 1 else f"{text}, digest {_digest(family)[:16]}…"
        for text, family in zip(titles, families, strict=True)
    ]


def _digest(family: Sequence[Record]) -> str:
    return next(found for record in family if (found := digest(record)))


def notes(records: Sequence[Record], judged: Judged = NOTHING_JUDGED) -> list[str]:
    """Return what the table's cells have no room for: reasons, and what p is."""
    task, reasons = task_of(records), dict[str, list[str]]()
    column = "planned_bits" in varied(records)
    for record, label in zip(records, labels(records), strict=True):
        if record.tags.get("reason"):
            text = f"{record.tags['status']}: {record.tags['reason']}"
            reasons.setdefault(text, []).append(label)
        if record.params.get("doubt"):
            reasons.setdefault(record.params["doubt"], []).append(label)
        if record.params.get("float_operators"):
            reasons.setdefault(f"in float: {record.params['float_operators']}", []).append(label)
        if record.params.get("planned_bits") and not column:
            text = f"bits of weights, others as the dtype has it: {record.params['planned_bits']}"
            reasons.setdefault(text, []).append(label)
    lines = [f"{text} ({_name(group)})" for text, group in reasons.items()]
    if any("delta_ci95_low" in record.metrics for record in records):
        lines.append(INTERVAL_NOTE.format(how=task.test.intervals))
    if tested := len(adjusted_p(records)):
        correction = f", corrected for {tested} comparisons (Holm)" if tested > 1 else ""
        lines.append(P_NOTE.format(test=task.test.name, correction=correction))
    if texts := [judged.texts[r.run_id] for r in records if r.run_id in judged.texts]:
        together = len(texts) - texts.count(VOID)
        several = f", corrected for {together} models (Holm)," if together > 1 else ""
        metric, key = task.metric, f"report.{task.metric.limit_key}"
        limit = metric.say_limit(judged.limits)
        lines.append(LIMIT_NOTE.format(limit=limit, key=key, several=several))
        if VOID in texts:
            lines.append(VOID_NOTE)
        if any(record.params.get(GROUPED) for record in records):
            lines.append(GROUPED_NOTE)
    if task.note and any(task.metric.name in record.metrics for record in records):
        lines.append(task.note)
    alone = f"batch1_{task.metric.name}"
    dynamic = [
        pair for pair in zip(records, labels(records), strict=True) if alone in pair[0].metrics
    ]
    for record, label in dynamic[:NAMED]:
        value, title = task.metric.show(record.metrics[alone]), task.metric.title
        lines.append(DYNAMIC_NOTE.format(label=label, title=title, value=value))
    if len(dynamic) > NAMED:
        lines.append(f"The same for {len(dynamic) - NAMED:,} more runs ({alone} in runs.csv).")
    if any(r.params.get("execution") == "simulated" for r in records):
        lines.append(SIMULATED_NOTE)
    threads = {r.params.get("latency.threads", "?") for r in records if "speedup" in r.metrics}
    if threads:
        lines.append(SPEEDUP_NOTE.format(threads=" or ".join(sorted(threads))))
    return lines


def _name(group: Sequence[str]) -> str:
    more = f"; and {len(group) - NAMED:,} more" if len(group) > NAMED else ""
    return "; ".join(group[:NAMED]) + more


def print_table(
    records: Sequence[Record], console: Console | None = None, judged: Judged = NOTHING_JUDGED
) -> None:
    """Print the table and its notes to stdout: one for each family of runs."""
    console = stdout(console, PIPE_WIDTH)
    families = group(records)
    if len(families) > 1:
        console.print(FAMILIES_NOTE.format(count=len(families)), highlight=False)
    for heading, family in zip(headings(families), families, strict=True):
        _print_family(heading, family, console, judged)


def _print_family(
    heading: str, records: Sequence[Record], console: Console, judged: Judged
) -> None:
    narrow = console.width < 120
    table = Table(
        title=Text(show(heading)),
        title_justify="left",
        box=box.SIMPLE if narrow else box.HEAVY_HEAD,
        padding=(0, 0) if narrow else (0, 1),
        collapse_padding=narrow,
    )
    figures = numeric(records)
    shown, cut = shorten(records, rows(records, judged))
    heads, lines = without_empty(columns(records), shown, WIDE if narrow else ())
    for column in heads:
        # In a narrow terminal words are folded, numbers stay whole.
        figure = column in figures
        justify: JustifyMethod = "right" if figure else "left"
        table.add_column(
            Text(show(column)), justify=justify, no_wrap=figure, overflow="fold", min_width=5
        )
    for row in lines:
        cells = [Text(show(value)) for value in row]  # as it is: a setting may be in brackets
        table.add_row(*cells, style=None if row[-1] in ("ok", "baseline") else "yellow")
    console.print(table)
    if cut:
        console.print(f"{cut} All: report.html, runs.csv.", highlight=False)
    for note in notes(records, judged):
        console.print(show(note), highlight=False, markup=False, soft_wrap=True)


def print_places(folder: Path, store: Store) -> None:
    """Say where the files lie, the report where there is one, and how to browse the runs."""
    print(f"Files:  {folder}")
    if (report := folder / REPORT).exists():
        print(f"Report: {report}")
    print(f"Browse: {store.ui_command}")


def to_csv(records: Sequence[Record]) -> str:
    """Return every parameter and metric of every run, one run a line."""
    params = sorted({key for record in records for key in record.params})
    metrics = sorted({key for record in records for key in record.metrics})
    rows: list[list[object]] = [["run_id", "status", "reason", *params, *metrics]]
    for r in records:
        values = [*(r.params.get(key, "") for key in params), *(r.metrics.get(k) for k in metrics)]
        rows.append([r.run_id, r.tags.get("status"), r.tags.get("reason"), *values])
    return files.to_csv(rows)


def adjusted_p(records: Sequence[Record]) -> dict[str, float]:
    """Return the p-value of each measured quantized run, by its id, corrected for their number."""
    quantized = [record for record in records if record.params.get("dtype") != "fp32"]
    tested = [record for record in quantized if "p_value" in record.metrics]
    p_values = holm([record.metrics["p_value"] for record in tested])
    return {record.run_id: p for record, p in zip(tested, p_values, strict=True)}


def _baseline_rows(task: Task, records: Sequence[Record], extra: list[str]) -> list[list[str]]:
    shown = {_baseline_key(r) for r in records if r.params.get("dtype") == "fp32"}
    baselines = {_baseline_key(r): r for r in records if "baseline_size_bytes" in r.metrics}
    metrics = [task.metric, *task.beside]
    return [
        [
            *(combination(r).framework, "fp32", "", "", *extra),
            *_values(metrics, r, "baseline_"),
            *(f"{r.metrics['baseline_size_bytes'] / 1000:.1f}", "", _baseline_ms(records, key), ""),
            *("", "float", "baseline"),
        ]
        for key, r in sorted(baselines.items(), key=lambda item: str(item[0]))
        if key not in shown  # its own run is a row
    ]


def _baseline_ms(records: Sequence[Record], key: tuple[str | None, ...]) -> str:
    """Return what the runs measured of a baseline, each beside its own model: least and most."""
    name = "baseline_latency_p50_ms"
    own = (record.metrics for record in records if _baseline_key(record) == key)
    found = sorted(metrics[name] for metrics in own if name in metrics)
    return " to ".join(dict.fromkeys(f"{each:.3f}" for each in (*found[:1], *found[-1:])))


def _baseline_key(record: Record) -> tuple[str | None, ...]:
    return tuple(record.params.get(key) for key in _BASELINE_KEYS)


def _figures(task: Task, record: Record, adjusted_p: float | None, limit: str) -> list[str]:
    """Return the cells from the task's metric on; empty where nothing was measured."""
    metrics, quantized = record.metrics, record.params.get("dtype") != "fp32"
    scored = _values([task.metric, *task.beside], record)
    costs = ["", "", _milliseconds(record), ""]
    if task.metric.name in metrics:
        costs[0] = f"{metrics['size_bytes'] / 1000:.1f}"
        if quantized:
            costs[1] = f"{metrics['size_reduction']:.1%}"
    if quantized and "delta" in metrics:
        scored[1] = task.metric.show_change(metrics["delta"])
    if quantized:
        scored[2] = show_interval(task.metric, metrics)
    if adjusted_p is not None:
        scored[3] = "<0.001" if adjusted_p < 0.001 else f"{adjusted_p:.3f}"
    if quantized and "speedup" in metrics:
        costs[3] = f"{metrics['speedup']:.2f}"
    status, execution = record.tags.get("status", "?"), record.params.get("execution", "")
    return [
        *scored,
        *costs,
        limit,
        execution,
        status if quantized or status != "ok" else "baseline",
    ]


def show_interval(metric: Metric, metrics: Mapping[str, float]) -> str:
    """Return the 95% interval of a run's `delta`; empty where it has none, or no spread."""
    ends = [metrics[key] for end in ("low", "high") if (key := f"delta_ci95_{end}") in metrics]
    if len(set(ends)) < 2:
        return ""
    return " to ".join(map(metric.show_change, ends))


def _values(metrics: Sequence[Metric], record: Record, prefix: str = "") -> list[str]:
    """Return a metric, room for `PAIRED`, and the others; empty what was not measured."""
    found = [(metric, record.metrics.get(prefix + metric.name)) for metric in metrics]
    first, *others = ("" if value is None else metric.show(value) for metric, value in found)
    return [first, *[""] * len(PAIRED), *others]


def _milliseconds(record: Record) -> str:
    found = record.metrics.get("latency_p50_ms")
    return "" if found is None else f"{found:.3f}"


def combination(record: Record) -> Combination:
    """Return what a run is called."""
    return Combination.of_params(record.params)


def labels(records: Sequence[Record]) -> list[str]:
    """Return each run's combination in words, with what else the runs vary."""
    keys = varied(records)
    return [
        " ".join(
            [*filter(None, combination(record).cells)]
            + [f"{key}={record.params[key]}" for key in keys if key in record.params]
        )
        for record in records
    ]
