"""The table of runs: its headings, its cells, and the CSV of all logged values."""

from collections import Counter
from collections.abc import Collection, Sequence

from resnet8ptq.core import files
from resnet8ptq.report import equal_files
from resnet8ptq.report.facts import (
    adjusted_p,
    best_first,
    is_stopped,
    name_cells,
    task_of,
    varied,
)
from resnet8ptq.tasks.metric import BASELINE, Metric
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking.record import RunRecord

PAIRED = ("delta", "interval", "p")  # against FP32
CHOICES = ("framework", "dtype", "calibration", "weights")
COSTS = ("size kB", "reduction", "ms", "speedup")
LIMIT, VOID = "limit", "void"  # the column of the verdicts, and one of them; see `verdicts`
MANY = 50  # runs of a family that a table shows; of more, only the best
FIRST = 20  # the best of many
_BASELINE_KEYS = ("data", "model.fold", "evaluate.split")
_FIRST_NOTE = "The {first} best of {total} runs by {title}; the others: {others}."


def columns(records: Sequence[RunRecord]) -> list[str]:
    """Return the column headings; the settings that vary follow `weights`."""
    return [*CHOICES, *varied(records), *numeric(records), LIMIT, "execution", "status"]


def numeric(records: Sequence[RunRecord]) -> list[str]:
    """Return the headings of the numeric columns: the task's metrics, and the costs of a model."""
    task = task_of(records)
    return [task.metric.title, *PAIRED, *(metric.title for metric in task.beside), *COSTS]


def rows(records: Sequence[RunRecord]) -> list[list[str]]:
    """Return a row for each FP32 baseline that is not itself a run, then one for each other run.

    Runs with equal files share the row of the first, see `equal_files`.
    """
    adjusted, keys, task = adjusted_p(records), varied(records), task_of(records)
    runs = []
    for members in equal_files.group(records):
        record = members[0]
        cells = _run_cells(task, record, adjusted.get(record.run_id))
        runs.append([*name_cells(members, keys), *cells])
    return [*_baseline_rows(task, records, [""] * len(keys)), *runs]


def shorten(
    records: Sequence[RunRecord], lines: Sequence[list[str]]
) -> tuple[list[list[str]], str]:
    """Return the rows to show at once, and a note about the hidden ones.

    Up to `MANY` runs, all rows are shown, without a note; else the baselines and the best runs.
    """
    records = equal_files.distinct(records)
    if len(records) <= MANY:
        return list(lines), ""
    order, baselines = best_first(records), len(lines) - len(records)
    left = Counter(records[index].status for index in order[FIRST:])
    note = _FIRST_NOTE.format(
        first=FIRST,
        total=f"{len(records):,}",
        title=task_of(records).metric.title,
        others=", ".join(f"{count:,} {status}" for status, count in left.items()),
    )
    return [*lines[:baselines], *(lines[baselines + index] for index in order[:FIRST])], note


def brief(
    records: Sequence[RunRecord], lines: Sequence[list[str]], more: Collection[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Return the six columns that fit into a terminal or beside a figure, and those of `more`.

    The first column is the configuration. The last one holds the verdict, or else the status.

    Args:
        lines: the rows of `rows`.
    """
    heads, settings = columns(records), len(CHOICES) + len(varied(records))
    metric = task_of(records).metric.title
    named = (metric, PAIRED[0], *more, "size kB", "ms", LIMIT)
    shown = sorted({heads.index(head) for head in named if head in heads})
    return ["model", *(heads[column] for column in shown)], [
        [_label(heads[:settings], line), *(line[column] for column in shown[:-1]), _outcome(line)]
        for line in lines
    ]


def _label(heads: Sequence[str], line: Sequence[str]) -> str:
    pairs = zip(heads, line, strict=False)  # the row goes on
    return " ".join(text if head in CHOICES else f"{head}={text}" for head, text in pairs if text)


def _outcome(line: Sequence[str]) -> str:
    limit, _, status = line[-3:]
    return limit or (status if status != "ok" else "")


def without_empty(
    heads: Sequence[str], lines: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return a table without its empty columns."""
    kept = [column for column in range(len(heads)) if any(line[column] for line in lines)]
    return [heads[column] for column in kept], [[line[c] for c in kept] for line in lines]


def to_csv(records: Sequence[RunRecord]) -> str:
    """Return every parameter and metric of every run, one line for each run."""
    params = sorted({key for record in records for key in record.params})
    metrics = sorted({key for record in records for key in record.metrics})
    lines: list[list[object]] = [["run_id", "status", "reason", *params, *metrics]]
    for run in records:
        values = [*map(run.params.get, params), *map(run.metrics.get, metrics)]
        lines.append([run.run_id, run.status, run.reason, *values])
    return files.to_csv(lines)


def _baseline_rows(task: Task, records: Sequence[RunRecord], extra: list[str]) -> list[list[str]]:
    shown = {_baseline_key(record) for record in records if not record.quantized}
    baselines = {_baseline_key(r): r for r in records if r.fp32_size_bytes is not None}
    # FP32 has another value on the samples of each run that stopped early.
    unequal = any(map(is_stopped, records)) and len({record.samples for record in records}) > 1
    nothing = [""] * (len(numeric(records)) - len(COSTS))
    return [
        [
            *(record.combination.baseline, "fp32", "", "", *extra),
            *(nothing if unequal else _metric_cells(task, record, BASELINE)),
            *(show_kb(record.fp32_size_bytes), "", _baseline_ms(records, key), ""),
            *("", "float", "baseline"),
        ]
        for key, record in sorted(baselines.items(), key=lambda item: str(item[0]))
        if key not in shown  # its own run is a row
    ]


def _baseline_ms(records: Sequence[RunRecord], key: tuple[str | None, ...]) -> str:
    """Return the smallest and the largest latency of a baseline, which each run measured once."""
    own = (record.fp32_latency_ms for record in records if _baseline_key(record) == key)
    times = sorted(ms for ms in own if ms is not None)
    return " to ".join(dict.fromkeys(show_ms(ms) for ms in (*times[:1], *times[-1:])))


def _baseline_key(record: RunRecord) -> tuple[str | None, ...]:
    return (record.combination.baseline, *record.select(*_BASELINE_KEYS))


def _run_cells(task: Task, record: RunRecord, p: float | None) -> list[str]:
    """Return the cells from the metric on, with the corrected p-value; empty if not measured."""
    scored, quantized = _metric_cells(task, record), record.quantized
    costs = [show_kb(record.size_bytes), "", show_ms(record.latency_ms), ""]
    if quantized:
        change = record.delta(task.metric)
        delta = "" if change is None else task.metric.show_change(change)
        scored[1:3] = delta, show_interval(task.metric, record)
        costs[1], costs[3] = _number(record.size_reduction, ".1%"), _number(record.speedup, ".2f")
    if p is not None:
        scored[3] = "<0.001" if p < 0.001 else f"{p:.3f}"
    status = "baseline" if record.status == "ok" and not quantized else record.status
    return [*scored, *costs, record.verdict_text, record.execution, status]


def show_interval(metric: Metric, record: RunRecord) -> str:
    """Return the 95% interval of a run's `delta`; empty if unknown or of zero width."""
    low, high = record.interval("delta") or (0, 0)
    return "" if low == high else f"{metric.show_change(low)} to {metric.show_change(high)}"


def say_size(size_bytes: int | float, reduction: float | None) -> str:
    """Return a size as text, compared with FP32 if `reduction`, the fraction saved, is known."""
    size = f"{size_bytes / 1000:.1f} kB"
    if reduction is None:
        return size
    return f"{size}, {abs(reduction):.1%} {'less' if reduction >= 0 else 'more'} than FP32"


def _metric_cells(task: Task, record: RunRecord, prefix: str = "") -> list[str]:
    """Return the metric, placeholders for `PAIRED`, and the task's other metrics."""
    values = [(metric, record.value_of(metric, prefix)) for metric in (task.metric, *task.beside)]
    first, *others = ("" if value is None else metric.show(value) for metric, value in values)
    return [first, *[""] * len(PAIRED), *others]


def show_kb(size_bytes: float | None) -> str:
    """Return a size in kB; empty if it was not measured."""
    return "" if size_bytes is None else f"{size_bytes / 1000:.1f}"


def show_ms(latency_ms: float | None) -> str:
    """Return a latency; empty if it was not measured."""
    return _number(latency_ms, ".3f")


def _number(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)
