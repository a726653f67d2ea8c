"""The table of runs: its columns and rows; and the CSV of all params and metrics."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from resnet8ptq.core import files
from resnet8ptq.core.table import Column, Table, number, show_kb
from resnet8ptq.report import equal_files
from resnet8ptq.report.equal_files import RUN_ON, adjusted_p
from resnet8ptq.report.families import best_first, records_of, task_of
from resnet8ptq.report.naming import name_cells, varied
from resnet8ptq.tasks.scoring.metric import BASELINE, Metric
from resnet8ptq.tracking.record import RunRecord

CHOICES = ("framework", "dtype", "calibration", "weights")
# The column of the verdicts, and one verdict, see `verdicts`
LIMIT = "limit"
VOID = "void"
SOUND = ("ok", "baseline")  # statuses of a row without a mark in the terminal
MANY = 50  # most runs of a family that a table shows completely
FIRST = 20  # best runs that are shown of more
_BASELINE_KEYS = ("data", "model.fold", "evaluate.split", *RUN_ON)
_FIRST_NOTE = "The {first} best of {total} runs by {title}; the others: {others}."


@dataclass(frozen=True)
class Row:
    """A row: a group of `equal_files`, or an FP32 baseline that is not itself a run.

    Attributes:
        record: the record of the first run, or the record that the baseline would have.
        names: combination and varying settings, joined over the runs, see `name_cells`.
        p: the p-value of the difference from FP32, corrected for all models; None without one.
        ms: latency of one sample, as text; for a baseline, the smallest and the largest of those
            measured with the runs; empty if not measured.
        is_run: False for a baseline that is not itself a run.
    """

    record: RunRecord
    names: tuple[str, ...]
    p: float | None
    ms: str
    is_run: bool = True

    @property
    def against(self) -> RunRecord | None:
        """The record of a quantized run, which is compared with FP32; None for FP32 itself."""
        return self.record if self.is_run and self.record.quantized else None

    @property
    def status(self) -> str:
        """The status of the run; `baseline` for FP32 without a run, or with one that is `ok`."""
        if self.is_run and (self.record.quantized or self.record.status != "ok"):
            return self.record.status
        return "baseline"


def make(records: Sequence[RunRecord]) -> Table[Row]:
    """Return the table: a row for each FP32 baseline, then one for each group of `equal_files`.

    Baselines are sorted by framework; those that are themselves runs have no second row. Runs keep
    the order of `records`, which in a sweep is that of the jobs (`history.load_children`).
    `shorten` sorts more than `MANY` rows of runs by the metric. The settings that vary have columns
    after `weights`.
    """
    adjusted = adjusted_p(records)
    keys = varied(records)
    rows = _make_baselines(records, keys)

    # Add the runs, with a text for their latency
    for members in equal_files.group(records):
        record = members[0]
        names = tuple(name_cells(members, keys))
        ms = ""
        if record.latency_ms is not None:
            ms = show_ms(record.latency_ms)
        rows.append(Row(record, names, p=adjusted.get(record.run_id), ms=ms))
    named = [_name(head, index) for index, head in enumerate([*CHOICES, *keys])]
    return Table([*named, *_measured(records)], rows)


def _name(head: str, index: int) -> Column[Row]:
    return Column(head, lambda row: row.names[index])


def _value(metric: Metric) -> Column[Row]:
    return number(metric.title, lambda row: row.record.value_of(metric), metric.show)


def _measured(records: Sequence[RunRecord]) -> list[Column[Row]]:
    """Return the columns after the names."""
    task = task_of(records)
    metric = task.metric
    return [
        _value(metric),
        number("delta", lambda row: row.against and row.against.delta(metric), metric.show_change),
        number("interval", lambda row: row.against and show_interval(metric, row.against)),
        number("p", lambda row: row.p, _show_p),
        *map(_value, task.beside),
        number("size kB", lambda row: row.record.size_bytes, show_kb),
        number("reduction", lambda row: row.against and row.against.size_reduction, ".1%"),
        number("ms", lambda row: row.ms),
        number("speedup", lambda row: row.against and row.against.speedup, ".2f"),
        Column(LIMIT, lambda row: row.record.verdict_text),
        Column("execution", lambda row: row.record.execution),
        Column("status", lambda row: row.status),
    ]


def _show_p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def rows_of_runs(table: Table[Row]) -> list[Row]:
    """Return the rows of runs, without those of baselines that are not runs."""
    return [row for row in table.rows if row.is_run]


def style_of(status: str) -> str:
    """Return the style of a row in the terminal: yellow if the status is not `ok` or `baseline`."""
    return "" if status in SOUND else "yellow"


def say_counts(counts: Mapping[str, int]) -> str:
    """Return words with their counts as text.

    >>> say_counts({"ok": 1200, "failed": 2})
    '1,200 ok, 2 failed'
    """
    return ", ".join(f"{count:,} {word}" for word, count in counts.items())


def shorten(records: Sequence[RunRecord], whole: Table[Row]) -> tuple[Table[Row], str]:
    """Return the table of the rows to show at first, and a note about the hidden rows.

    With up to `MANY` rows of runs, all rows are shown, without a note; otherwise the baselines that
    are not runs, and the `FIRST` best runs.
    """
    runs = rows_of_runs(whole)
    if len(runs) <= MANY:
        return whole, ""

    # Keep the baselines and the best runs; count the others by status
    order = best_first(records_of(runs))
    shown = [row for row in whole.rows if not row.is_run]
    hidden: Counter[str] = Counter()
    for rank, index in enumerate(order):
        if rank < FIRST:
            shown.append(runs[index])
        else:
            hidden[runs[index].record.status] += 1
    title = task_of(records).metric.title
    total = f"{len(runs):,}"
    note = _FIRST_NOTE.format(first=FIRST, total=total, title=title, others=say_counts(hidden))
    return replace(whole, rows=shown), note


def brief(
    records: Sequence[RunRecord], whole: Table[Row], more: Collection[str] = ()
) -> Table[Row]:
    """Return a table of the six columns that fit into a terminal, and of the columns `more`.

    The first column is the configuration. The last column holds the verdict; without one, a status
    other than `ok`.
    """
    heads = whole.heads[: len(CHOICES) + len(varied(records))]
    metric = task_of(records).metric.title

    def label(row: Row) -> str:
        words = []
        for head, text in zip(heads, row.names, strict=True):
            if text and head in CHOICES:
                words.append(text)
            elif text:
                words.append(f"{head}={text}")
        return " ".join(words)

    def outcome(row: Row) -> str:
        if row.record.verdict_text or row.status == "ok":
            return row.record.verdict_text
        return row.status

    # The last column replaces the one of the verdicts
    named = {metric, "delta", *more, "size kB", "ms"} - {LIMIT}
    shown = [column for column in whole.columns if column.head in named]
    return replace(whole, columns=[Column("model", label), *shown, Column(LIMIT, outcome)])


def to_csv(records: Sequence[RunRecord]) -> str:
    """Return a CSV with a line for each run.

    The columns are id, status and reason, then each param and metric that any run has.
    """
    all_params: set[str] = set()
    all_metrics: set[str] = set()
    for record in records:
        all_params.update(record.params)
        all_metrics.update(record.metrics)
    params = sorted(all_params)
    metrics = sorted(all_metrics)

    # A run without a value has an empty cell
    lines: list[list[object]] = [["run_id", "status", "reason", *params, *metrics]]
    for run in records:
        values = [*map(run.params.get, params), *map(run.metrics.get, metrics)]
        lines.append([run.run_id, run.status, run.reason, *values])
    return files.to_csv(lines)


def _make_baselines(records: Sequence[RunRecord], keys: Sequence[str]) -> list[Row]:
    """Return a row for each FP32 baseline that is not itself a run."""
    # Collect the baselines, and their latencies in all runs
    with_row = set()
    baselines: dict[tuple[str | None, ...], RunRecord] = {}
    latencies: dict[tuple[str | None, ...], list[float]] = {}
    for record in records:
        key = _baseline_key(record)
        if not record.quantized:
            with_row.add(key)
        if record.fp32_size_bytes is not None:
            baselines[key] = record
        if record.fp32_latency_ms is not None:
            latencies.setdefault(key, []).append(record.fp32_latency_ms)

    # FP32 has another value on the samples of each run that stopped early
    sizes = {record.samples for record in records}
    any_stopped = any(record.stopped_early for record in records)
    is_same = len(sizes) < 2 or not any_stopped

    # Make a row for each baseline
    rows = []
    for key in sorted(baselines.keys() - with_row, key=str):
        record = baselines[key]
        names = [record.combination.baseline, "fp32", "", ""]
        for name in keys:
            shown = ""  # a baseline shows only provider and machine
            if name in RUN_ON:
                shown = record.params.get(name, "")
            names.append(shown)
        baseline = _to_baseline(record, scored=is_same)
        ms = _show_extremes(latencies.get(key, []))
        rows.append(Row(baseline, tuple(names), p=None, ms=ms, is_run=False))
    return rows


def _show_extremes(latencies_ms: Sequence[float]) -> str:
    """Return the smallest and the largest latency as text; one if they look equal."""
    if not latencies_ms:
        return ""
    low = show_ms(min(latencies_ms))
    high = show_ms(max(latencies_ms))
    return low if low == high else f"{low} to {high}"


def _to_baseline(record: RunRecord, scored: bool) -> RunRecord:
    """Return the record that the FP32 baseline of a run would have.

    Args:
        scored: whether to include its metrics; otherwise, only the size of its file.
    """
    metrics = {}
    for key, value in record.metrics.items():
        is_kept = scored or key == f"{BASELINE}size_bytes"
        if key.startswith(BASELINE) and is_kept:
            metrics[key.removeprefix(BASELINE)] = value
    return record.changed(params={**record.params, "execution": "float"}, metrics=metrics)


def _baseline_key(record: RunRecord) -> tuple[str | None, ...]:
    return (record.combination.baseline, *record.select(*_BASELINE_KEYS))


def show_interval(metric: Metric, record: RunRecord) -> str:
    """Return the 95% interval of a run's `delta` as text; empty if unknown or of zero width."""
    low, high = record.interval("delta") or (0, 0)
    return "" if low == high else f"{metric.show_change(low)} to {metric.show_change(high)}"


def say_size(size_bytes: int | float, reduction: float | None) -> str:
    """Return a size as text, compared with FP32 if `reduction`, the fraction saved, is known.

    >>> say_size(96_000, reduction=0.7)
    '96.0 kB, 70.0% less than FP32'
    """
    size = f"{show_kb(size_bytes)} kB"
    if reduction is None:
        return size
    word = "less" if reduction >= 0 else "more"
    return f"{size}, {abs(reduction):.1%} {word} than FP32"


def show_ms(latency_ms: float) -> str:
    """Return a latency as text, without the unit."""
    return f"{latency_ms:.3f}"
