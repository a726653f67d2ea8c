"""Groups runs with equal files, such as torch's int8 and u8s8: they share one row of the table.

`facts.models_of` defines equal files. Runs that were measured in different ways, such as with other
numbers of threads, stay apart.
"""

from collections.abc import Sequence

from resnet8ptq.report.facts import models_of, varied
from resnet8ptq.tracking.record import RunRecord

# Settings of the measurement, not of the file.
_MEASURED_BY = ("threads", "data.name", "evaluate.", "latency.", "task.")


def group(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs in their order, those with equal files together."""
    measured_by = [key for key in varied(records) if key.startswith(_MEASURED_BY)]
    groups: dict[tuple[object, ...], list[RunRecord]] = {}
    for record, model in zip(records, models_of(records), strict=True):
        key: tuple[object, ...] = (record.run_id,)
        if record.status == "ok" and record.quantized:
            key = (model, record.samples_digest, record.select(*measured_by))
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def distinct(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the first run of each file."""
    return [members[0] for members in group(records)]
