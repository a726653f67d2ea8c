"""Files: atomic writing, bounded reading, free disk space, nearest names, CSV and hashes."""

import csv
import errno
import hashlib
import io
import mmap
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from resnet8ptq.core.text import nearest, show


def expand(name: object) -> Path:
    """Return a path with the home folder for a leading `~` or `~user`.

    The name of an unknown user stays, so that the message on a missing file shows it.
    """
    path = Path(str(name))
    try:
        return path.expanduser()
    except RuntimeError:
        return path


@contextmanager
def atomic(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` unless the block raises.

    A process that is killed leaves at `path` either the whole new file or the state before.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)  # mkstemp makes 0600, which other users of a shared store cannot read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically."""
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` to `path` in UTF-8, atomically."""
    with atomic(path, mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file; refuse pipes, which could block, and endless devices.

    Raises:
        OSError: the file is not regular, cannot be read, or is larger than `most` bytes.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if state.st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
        return file.read(state.st_size)


def name_substitute(path: Path) -> str:
    """Return the end of a message about a file that is not the expected download.

    The file may be empty, a pointer of Git LFS or a web page; for others, the text is empty.
    """
    with path.open("rb") as file:
        start = file.read(64).lstrip().lower()
    if not start:
        return "is empty; copy or download it again"
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the file itself; try git lfs pull"
    if start.startswith((b"<!doctype html", b"<html")):
        return "is a web page; try the address of the file itself"
    return ""


def check_room(size: int, folder: Path) -> None:
    """Check that the disk of `folder` has `size` bytes free.

    A write to a mapped file on a full disk ends the process.

    Raises:
        ValueError: the disk has less free space.
    """
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(f"it unpacks to {size:,} bytes, but the cache has {free:,} free")


# The last two patterns match NumPy's messages, which lack the error number
_FULL = re.compile(
    "no space left on device|disk is full|quota exceeded|not enough free space"
    r"|\d+ requested and \d+ written",
    re.IGNORECASE,
)


def find_nearest(path: Path) -> Path | None:
    """Return the file or folder beside a missing path with the closest name, if one is close."""
    try:
        names = [child.name for child in expand(path).parent.iterdir()]
    except OSError:
        return None
    close = nearest(path.name, names)
    if close is None:
        return None
    return path.with_name(close)


def name_nearest(path: object) -> str:
    """Return the end of a message about a missing path: the nearest path, or nothing."""
    if not path:
        return ""
    close = find_nearest(Path(str(path)))
    if close is None:
        return ""
    return f" (nearest: {close})"


def full_disk(error: BaseException) -> str:
    """Return the part of an error that reports a full disk or quota; empty for other errors.

    The texts of the error and of its causes are searched, because libraries and other processes
    pass on only the text of the operating system's error.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return os.strerror(error.errno)
    match = _FULL.search(str(error))
    if match:
        return match[0]
    cause = error.__cause__ or error.__context__
    if cause is not None:
        return full_disk(cause)
    return ""


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Return rows of values as CSV, safe for terminals and spreadsheets.

    Unprintable characters except line breaks become `?`, including marks of text direction. Text
    that a spreadsheet would read as a formula gets a leading `'`.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_make_safe, row) for row in rows)
    return text.getvalue()


def _make_safe(value: object) -> object:
    if not isinstance(value, str):
        return value
    safe = show(value)
    is_formula = _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    return f"'{safe}" if is_formula else safe


_FORMULA = re.compile(r"[\t\r]|\s*[=+\-@\uFF1D\uFF0B\uFF0D\uFF20]")  # \uFF..: full-width characters
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|-?inf", re.IGNORECASE)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_folder(folder: Path, pattern: str = "*") -> str:
    """Return the hexadecimal SHA-256 of the names and contents of matching files below a folder."""
    digest = hashlib.sha256()
    paths = [path for path in folder.rglob(pattern) if path.is_file()]
    for path in sorted(paths):
        digest.update(f"{path.relative_to(folder)}: {sha256(path)}\n".encode())
    return digest.hexdigest()


def hash_with_data(path: Path) -> str:
    """Return a SHA-256 of a file; for an ONNX file, it covers the external data files beside it.

    Exporters may write the weights into a file beside the model (torch's do by default). The model
    names such a data file in entries `location: NAME`.
    """
    hashes = []
    for name in sorted(find_data_names(path)):
        file = path.parent / name
        if Path(name).name == name and file.is_file():  # only files beside the model count
            hashes.append(sha256(file))
    digest = sha256(path)
    if not hashes:
        return digest
    return hashlib.sha256(" ".join([digest, *hashes]).encode()).hexdigest()


def find_data_names(path: Path) -> set[str]:
    """Return the names of the external data files of an ONNX file, without parsing it.

    Code that reads the network must read no other files, because `hash_with_data` does not cover
    them.
    """
    if path.suffix.lower() != ".onnx" or not path.stat().st_size:
        return set()
    # Map the file, so that it is not read into memory
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _find_named(content)


def _find_named(content: mmap.mmap) -> set[str]:
    """Return the values of all entries `location` in a protobuf message."""
    names = set()
    for location in _LOCATION.finditer(content):
        start = location.end()
        size = int.from_bytes(location[1][:1]) & 127
        size += int.from_bytes(location[1][1:]) << 7
        names.add(content[start : start + size].decode(errors="replace"))
    return names


# A StringStringEntryProto: the key `location`, then the value's length in one or two bytes.
_LOCATION = re.compile(rb"\n\x08location\x12([\x01-\x7f]|[\x80-\xff][\x01-\x7f])", re.DOTALL)
