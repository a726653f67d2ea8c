"""Unpacks tables into the cache, in a separate process.

A file of a few kilobytes can unpack to a hundred gigabytes, and Arrow reports the size of a row
only after unpacking it. Another process with limited memory therefore writes the unpacked rows to a
file, from which they are mapped.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from resnet8ptq.core import cache, code, isolation
from resnet8ptq.core.confinement import MAX_SECONDS
from resnet8ptq.core.errors import DataError, errors_as
from resnet8ptq.data.sources import columns
from resnet8ptq.data.sources.columns import Limits

Read = Callable[[Path, Limits], tuple[pa.Schema, Iterator[pa.RecordBatch]]]


def unpack(path: Path, read: Read, sha256: str, takes: str, cache_root: Path) -> pa.Table:
    """Return a table that is mapped from the cache.

    Args:
        read: a module-level function that returns the schema and the rows.
        sha256: SHA-256 of the files that `read` reads.
        takes: the accepted files, for the error.

    Raises:
        DataError: the file cannot be read, or its table exceeds `columns.LIMITS`.
    """
    limits = columns.LIMITS  # passed on, because the other process may have other limits
    crashed = DataError(f"{path}: reading it crashed, or took too much memory or time; {takes}")

    def make(folder: Path) -> None:
        to = folder / "table.arrow"
        isolation.call(_write, path, read, takes, limits, to, crashed=crashed, seconds=MAX_SECONDS)

    module = code.behind(read.__module__)
    key: cache.Key = {"sha256": sha256, "limits": str(limits), "code": module}
    entry = cache.entry(cache_root, "unpacked", key, make)
    with pa.memory_map(str(entry / "table.arrow")) as file:
        return pa.ipc.open_file(file).read_all()


def _write(path: Path, read: Read, takes: str, limits: Limits, to: Path) -> None:
    """Write the rows in groups, each after checking its offsets and lengths and the total size."""
    with errors_as(DataError, f"{path}: cannot be read", takes):
        schema, batches = read(path, limits)
        size = 0
        with pa.OSFile(str(to), "wb") as file, pa.ipc.new_file(file, schema) as rows:
            for batch in batches:
                batch.validate(full=True)
                size += batch.nbytes
                limits.check(path, size=size)
                rows.write_batch(batch)
