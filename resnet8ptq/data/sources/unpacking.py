"""Packed tables, unpacked into the cache in a process of its own.

A file of some kilobytes can stand for a hundred gigabytes, and Arrow unpacks a row before it says
how large that is. So another process, whose memory is limited, writes the rows as they lie in
memory; from there they are mapped.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from resnet8ptq.core import cache, code, isolation
from resnet8ptq.core.errors import DataError, PtqError
from resnet8ptq.core.text import one_line
from resnet8ptq.data.sources import columns
from resnet8ptq.data.sources.columns import Limits

Read = Callable[[Path, Limits], tuple[pa.Schema, Iterator[pa.RecordBatch]]]


def unpack(path: Path, read: Read, sha256: str, takes: str, cache_root: Path) -> pa.Table:
    """Return a table that is mapped from the cache.

    Args:
        read: a function of a module, which returns the schema and the rows.
        sha256: of all that it reads.
        takes: what is taken instead of a file that cannot be read.

    Raises:
        DataError: it cannot be read, or is larger than `columns.limits`.
    """
    limits = columns.limits()
    crashed = DataError(f"{path}: reading it crashed, or took too much memory or time; {takes}")

    def make(folder: Path) -> None:
        taken = (path, read, takes, limits, folder / "table.arrow")
        isolation.call(_write, *taken, crashed=crashed)

    key: cache.Key = {
        "sha256": sha256,
        "limits": str(limits),
        "code": code.behind(read.__module__),
    }
    entry = cache.entry(cache_root, "unpacked", key, make)
    with pa.memory_map(str(entry / "table.arrow")) as file:
        return pa.ipc.open_file(file).read_all()


def _write(path: Path, read: Read, takes: str, limits: Limits, to: Path) -> None:
    """Write the rows, each of whose offsets and lengths lies within the file."""
    try:
        schema, batches = read(path, limits)
        size = 0
        with pa.OSFile(str(to), "wb") as file, pa.ipc.new_file(file, schema) as rows:
            for batch in batches:
                batch.validate(full=True)
                size += batch.nbytes
                columns.check_bytes(path, size, limits)
                rows.write_batch(batch)
    except PtqError:
        raise
    except Exception as error:  # Arrow's own, and those of datasets
        raise DataError(f"{path}: cannot be read ({one_line(error)}); {takes}") from None
