"""Puts the latencies that a sweep has measured in turns into the records of its runs.

The runs of a sweep measure latencies minutes apart, each with its own measurement of FP32. The
records of a family that was timed in turns therefore hold only the latencies of the turns, except
for runs measured elsewhere by hand. Table, figures, choice and JSON read these records.
"""

from collections.abc import Mapping
from dataclasses import replace

from resnet8ptq.evaluation.paired_latency import Blocks, PairedLatency, Ratio, ratio, typical
from resnet8ptq.report.families import Cell, Family
from resnet8ptq.target.measure import CPU
from resnet8ptq.tasks.scoring.metric import BASELINE
from resnet8ptq.tracking.params import PROVIDER
from resnet8ptq.tracking.record import RunRecord

SINGLE = "latency_p50_ms"
BATCH = "latency_batch_p50_ms"
SPEEDUPS = {SINGLE: "speedup", BATCH: "speedup_batch"}
_LATENCIES = (SINGLE, BATCH, "latency_p95_ms", "latency_batch_p95_ms")
KEYS = (*_LATENCIES, *(BASELINE + name for name in _LATENCIES), *SPEEDUPS.values())
FP32 = " fp32"  # the end of the name of an FP32 network in a timing


def fp32_name(record: RunRecord) -> str:
    """Return the name, in a timing, of the FP32 network in a run's framework."""
    provider = record.params.get(PROVIDER, CPU)
    name = record.combination.baseline
    if provider != CPU:
        name += f" {provider}"
    return name + FP32


def check(timing: PairedLatency) -> None:
    """Raise `ValueError` unless speeds relative to FP32 can be computed from a timing."""
    if timing.batch and timing.batch.keys() != timing.single.keys():
        raise ValueError("expected the same models, one by one and in batches")
    for times in filter(None, (timing.single, timing.batch)):
        counts = {len(blocks) for blocks in times.values()}
        if len(counts) > 1:
            raise ValueError("expected the same number of blocks for each model")
    if not any(name.endswith(FP32) for name in timing.single):
        raise ValueError("expected a latency of FP32")


def fastest_fp32(times: Mapping[str, Blocks]) -> str:
    """Return the name of the fastest FP32 network in a timing, to which speeds are relative."""
    names = [name for name in times if name.endswith(FP32)]
    return min(names, key=lambda name: typical(times[name]))


def speed(record: RunRecord, timing: PairedLatency, of: int) -> Ratio | None:
    """Return a run's speed relative to the fastest FP32; None if it was not timed.

    Args:
        of: number of compared models, for which the interval is corrected.
    """
    times = timing.single
    if record.run_id not in times:
        return None
    return ratio(times[record.run_id], times[fastest_fp32(times)], of)


def put_in(family: Family, timing: PairedLatency | None) -> Family:
    """Return the family with the latencies of the turns; unchanged without a timing.

    A run that was measured elsewhere by hand keeps that latency.
    """
    if timing is None:
        return family
    cells = []
    for cell in family.cells:
        if not cell.record.was_carried:
            cell = replace(cell, record=_replace(cell, timing))
        cells.append(cell)
    return replace(family, cells=tuple(cells), in_turns=True)


def without_carried(family: Family, timing: PairedLatency | None) -> PairedLatency | None:
    """Return a timing without the runs that were measured elsewhere by hand.

    Returns None without a timing, or if the removal leaves only FP32.
    """
    carried = {cell.record.run_id for cell in family.cells if cell.record.was_carried}
    if timing is None or carried.isdisjoint(timing.single):
        return timing
    single = dict(timing.single)
    batch = dict(timing.batch)
    for run_id in carried:
        single.pop(run_id, None)
        batch.pop(run_id, None)
    if all(name.endswith(FP32) for name in single):
        return None
    return replace(timing, single=single, batch=batch)


def _replace(cell: Cell, timing: PairedLatency) -> RunRecord:
    """Return the record with the latencies and speedups of the turns instead of the run's own."""
    record = cell.record
    metrics = {key: value for key, value in record.metrics.items() if key not in KEYS}
    fp32 = fp32_name(record)
    # A timing need not have every run and every FP32
    for key, times in ((SINGLE, timing.single), (BATCH, timing.batch)):
        if fp32 in times:
            metrics[BASELINE + key] = typical(times[fp32])
        if record.run_id in times:
            metrics[key] = typical(times[record.run_id])
            metrics[SPEEDUPS[key]] = typical(times[fastest_fp32(times)]) / metrics[key]
    return record.changed(metrics=metrics)
