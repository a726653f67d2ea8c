"""MLPerf Tiny's tasks (`benchmark=`) in one table, each beside what the suite asks."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from resnet8ptq.core.console import stdout
from resnet8ptq.core.text import show
from resnet8ptq.report.table import PIPE_WIDTH, VOID, combination, task_of
from resnet8ptq.tracking.record import RunRecord

COLUMNS = (
    *("network", "framework", "dtype", "samples", "metric", "FP32", "found", "95% interval"),
    *("target", "met", "size kB", "status"),
)


def is_suite(records: Sequence[RunRecord]) -> bool:
    """Tell whether the runs are of tasks of a suite."""
    return any(record.params.get("benchmark.name", "null") != "null" for record in records)


def rows(records: Sequence[RunRecord]) -> list[list[str]]:
    """Return cells under COLUMNS, a row for each run; `met` is of the metric as measured."""
    return [_row(record) for record in records]


def _row(record: RunRecord) -> list[str]:
    metrics, found, metric = record.metrics, combination(record), task_of([record]).metric
    target = float(record.params.get("benchmark.target", "nan"))
    names = [record.params.get("model", "?"), found.framework, found.dtype]
    status = record.tags.get("status", "?")
    if metric.name not in metrics:
        return [*names, *[""] * 5, f"{target:g}", "", "", status]
    interval = [metrics.get(f"ci95_{end}") for end in ("low", "high")]
    return [
        *names,
        f"{metrics['total']:,.0f}",
        metric.title,
        metric.show(metrics[f"baseline_{metric.name}"]),
        metric.show(metrics[metric.name]),
        " to ".join(metric.show(end) for end in interval if end is not None),
        metric.show(target),
        VOID if "doubt" in record.params else "yes" if metrics[metric.name] >= target else "no",
        f"{metrics['size_bytes'] / 1000:.1f}",
        status,
    ]


def print_table(records: Sequence[RunRecord]) -> None:
    """Print the table to stdout."""
    console = stdout(None, PIPE_WIDTH)
    table = Table(title="The suite", title_justify="left", box=box.HEAVY_HEAD)
    for column in COLUMNS:
        table.add_column(column)
    for cells in rows(records):
        style = None if cells[-1] == "ok" else "yellow"
        table.add_row(*(Text(show(cell)) for cell in cells), style=style)
    console.print(table)
