"""Write a file so that a killed process leaves either all of it or none; hash what is on disk."""

import csv
import errno
import hashlib
import io
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from resnet8ptq.core.text import show


@contextmanager
def atomic(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` if the block ends well."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)  # mkstemp makes 0600, which a shared store could not read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` to `path` in UTF-8, all or nothing."""
    with atomic(path, mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file; a pipe would block, a device never end.

    Raises:
        OSError: it is not one, cannot be read, or is larger than `most` bytes.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if state.st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
        return file.read(state.st_size)


def check_room(size: int, folder: Path) -> None:
    """Refuse what would fill a disk: a process that writes to a mapped file is killed then.

    Raises:
        ValueError: it has less free.
    """
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(f"it unpacks to {size:,} bytes, of which the cache has {free:,} free")


_FULL = re.compile("no space left on device|disk is full|quota exceeded", re.IGNORECASE)


def full_disk(error: BaseException) -> str:
    """Return the words in which an error, or its cause, says that a disk is full; else nothing.

    Libraries and other processes hand on no more than the text of the operating system's error.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return os.strerror(error.errno)
    cause = error.__cause__ or error.__context__
    words = _FULL.search(str(error))
    return words[0] if words else full_disk(cause) if cause is not None else ""


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Return rows of values as CSV: no text in it steers a terminal, or is a spreadsheet's formula.

    Control characters, and marks that turn the direction of text, become `?`.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_make_safe, row) for row in rows)
    return text.getvalue()


def _make_safe(value: object) -> object:
    if not isinstance(value, str):
        return value
    safe = show(value)
    formula = _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    return f"'{safe}" if formula else safe


_FORMULA = re.compile(r"[\t\r]|\s*[=+\-@\uFF1D\uFF0B\uFF0D\uFF20]")  # and in full width
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|-?inf", re.IGNORECASE)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
