"""Prints the table of a benchmark suite such as MLPerf Tiny (`benchmark=`), with its targets."""

import math
from collections.abc import Sequence

from resnet8ptq.core.console import print_table, stdout
from resnet8ptq.report.table import VOID, style_of
from resnet8ptq.report.terminal import PIPE_WIDTH
from resnet8ptq.tasks.scoring.metric import BASELINE
from resnet8ptq.tracking.record import RunRecord

COLUMNS = (
    "network",
    "framework",
    "dtype",
    "samples",
    "metric",
    "FP32",
    "quantized",
    "95% interval",
    "target",
    "met",
    "size kB",
    "status",
)


def is_suite(records: Sequence[RunRecord]) -> bool:
    """Return whether any of the runs belongs to a benchmark suite."""
    return any(record.benchmark != "null" for record in records)


def rows(records: Sequence[RunRecord]) -> list[list[str]]:
    """Return a row of `COLUMNS` for each run; `met` says whether its metric reaches the target."""
    return [_row(record) for record in records]


def _row(record: RunRecord) -> list[str]:
    metric = record.task.metric
    target = math.nan
    if record.target != "null":  # the suite sets a target
        target = float(record.target)
    names = [record.model, record.combination.framework, record.combination.dtype]
    value = record.value_of(metric)
    fp32 = record.value_of(metric, BASELINE)
    if value is None or fp32 is None or record.samples is None or record.size_bytes is None:
        shown = "" if math.isnan(target) else f"{target:g}"
        return [*names, *[""] * 5, shown, "", "", record.status]

    # Without a target, none is met; a void baseline proves nothing about a target
    shown = ""
    met = ""
    if not math.isnan(target):
        shown = metric.show(target)
        met = "yes" if value >= target else "no"
        if record.doubt:
            met = VOID
    interval = record.interval("value") or ()
    return [
        *names,
        f"{record.samples:,.0f}",
        metric.title,
        metric.show(fp32),
        metric.show(value),
        " to ".join(map(metric.show, interval)),
        shown,
        met,
        f"{record.size_bytes / 1000:.1f}",
        record.status,
    ]


def print_suite(records: Sequence[RunRecord]) -> None:
    """Print the table of the suite to stdout."""
    lines = rows(records)
    styles = [style_of(record.status) for record in records]
    print_table(stdout(None, PIPE_WIDTH), COLUMNS, lines, title="The suite", styles=styles)
