"""Write a file so that a killed process leaves either all of it or none; hash what is on disk."""

import csv
import hashlib
import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


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


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, all or nothing."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Return rows of values as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
