"""Opens the arrays of .npz, .npy and idx files, by name.

No file is unpickled. Arrays are mapped from files, because they may exceed the memory. Those of
.npz and idx files are first unpacked into the cache.
"""

import gzip
import math
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import cache, code, files
from resnet8ptq.core.errors import DataError, PtqError
from resnet8ptq.core.text import one_line
from resnet8ptq.data.lazy import AT_ONCE, in_parts
from resnet8ptq.data.sources import SOURCES

EXPECTED = f"expected {SOURCES['arrays'].takes}"

# The format: http://yann.lecun.com/exdb/mnist/, "the IDX file format"; big-endian.
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP = b"\x1f\x8b"
# The limits of an unpacked file, of which the larger one applies
PACKED_BYTES = 2**28
PACKED_RATIO = 100

Array = NDArray[Any]
# Functions by name, each of which reads an array when called
Arrays = Mapping[str, Callable[[], Array]]


@dataclass(frozen=True)
class SourcedArray:
    """An array, and its source in messages."""

    source: str
    values: Array

    def __str__(self) -> str:
        return self.source

    def describe(self) -> str:
        """Return dtype and shape for a message."""
        return describe(self.values)

    def check_finite(self) -> None:
        """Raise `DataError` for NaN or infinity in floats."""
        if self.values.dtype.kind != "f":
            return
        for index, part in enumerate(in_parts(self.values)):
            finite = np.isfinite(part)
            if not finite.all():
                first = index * AT_ONCE + int(np.argwhere(~finite)[0, 0])
                raise DataError(
                    f"{self}: NaN or infinity in sample {first}; expected finite values"
                )


def describe(values: Array) -> str:
    """Return an array's dtype and shape for a message."""
    return f"{values.dtype} {list(values.shape)}"


def open_arrays(root: Path, cache_root: Path) -> Arrays:
    """Return functions that read the arrays of a file or a folder, by name of the array.

    Raises:
        DataError: a folder has no arrays or two with the same name, a file is no array, or an
            archive or gzipped file is damaged. The functions raise it for damaged arrays.
    """
    arrays: dict[str, Callable[[], Array]] = {}
    if root.is_dir():
        paths = _find_files(root)
        if not paths:
            raise DataError(f"{root}: holds no array; {EXPECTED}")
        for name, path in _name_files(paths).items():
            arrays[name] = prepare_array(path, cache_root)
        return arrays
    if root.suffix.lower() != ".npz":
        return {"inputs": prepare_array(root, cache_root)}

    # Hash an archive once for all its arrays
    members = _find_members(root)
    digest = files.sha256(root)
    for member in members:
        name = member.removesuffix(".npy")
        arrays[name] = partial(_unpack, root, digest, member, _copy_member, cache_root)
    return arrays


def _find_files(folder: Path) -> list[Path]:
    arrays = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and (path.suffix == ".npy" or _is_idx(path)):
            arrays.append(path)
    return arrays


def _name_files(paths: Iterable[Path]) -> dict[str, Path]:
    """Return array files by their names up to the first dot; an unpacked file hides its .gz.

    Args:
        paths: the files, sorted by name.

    Raises:
        DataError: two arrays have the same name, such as x.train.npy and x.test.npy.
    """
    named: dict[str, Path] = {}
    for path in paths:
        name = path.name.partition(".")[0]
        other = named.setdefault(name, path)
        if other.name.removesuffix(".gz") != path.name.removesuffix(".gz"):
            raise DataError(
                f"{path}: has the name {name!r}, like {other.name}; expected different names "
                "before the first dot, such as x_train.npy and x_test.npy"
            )
    return named


def find_names(root: Path) -> list[str]:
    """Return the names of the arrays in a folder or an .npz file; empty for other files.

    Raises:
        DataError: an archive or gzipped file is damaged.
    """
    if root.is_dir():
        return [path.name.partition(".")[0] for path in _find_files(root)]
    if root.suffix.lower() == ".npz":
        return [name.removesuffix(".npy") for name in _find_members(root)]
    return []


def _find_members(root: Path) -> list[str]:
    with _reading(root), zipfile.ZipFile(root) as archive:
        return [name for name in archive.namelist() if name.endswith(".npy")]


def prepare_array(path: Path, cache_root: Path) -> Callable[[], Array]:
    """Return a function that reads the array of an .npy or idx file.

    Raises:
        DataError: the file is neither, or is gzipped and damaged.
    """
    if path.suffix.lower() == ".npy":
        return partial(_map, path, path)
    if not _is_idx(path):
        raise DataError(f"{path}: is not an array; {EXPECTED}")
    return lambda: _unpack(path, files.sha256(path), "", _copy_idx, cache_root)


def _unpack(
    path: Path, digest: str, member: str, copy: Callable[[Path, str, Path], None], cache_root: Path
) -> Array:
    """Return an array of an .npz or idx file, mapped from the cache.

    Args:
        member: the array's file in the archive; empty for idx files.
        copy: writes the unpacked array to a file.
    """

    def make(folder: Path) -> None:
        with _reading(path, member):
            copy(path, member, folder / "array.npy")
        _map(folder / "array.npy", path, member)

    key: cache.Key = {"sha256": digest, "member": member, "code": code.behind(__name__)}
    folder = cache.entry(cache_root, "arrays", key, make)
    return _map(folder / "array.npy", path, member)


def _copy_member(path: Path, member: str, to: Path) -> None:
    with zipfile.ZipFile(path) as archive, archive.open(member) as packed:
        entry = archive.getinfo(member)
        _check_room(entry.file_size, entry.compress_size, to)
        with to.open("wb") as file:
            shutil.copyfileobj(packed, file)


def _copy_idx(path: Path, _: str, to: Path) -> None:
    with _open_idx(path) as file:
        unpack_idx(file, path.stat().st_size, to)


def unpack_idx(file: BinaryIO, packed: int, to: Path) -> None:
    """Write an idx file, such as MNIST's, as an .npy file, in parts.

    Args:
        packed: size of the file on disk in bytes, gzipped or not, which limits the unpacked size.

    Raises:
        ValueError: the file is not an idx file, its size differs from its header, or its unpacked
            size exceeds the limit or the free disk space.
        Exception: the file is gzipped and damaged; gzip raises several types.
    """
    dtype, shape = _read_idx_header(file)
    size = math.prod(shape) * dtype.itemsize
    _check_room(size, packed, to)
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    with to.open("wb") as whole:
        np.lib.format.write_array_header_2_0(whole, header)
        for part in _exactly(file, size):
            whole.write(part)
    if file.read(1):
        raise ValueError(f"it holds more than {list(shape)}, the shape in its header")


def _check_room(size: int, packed: int, to: Path) -> None:
    """Raise `ValueError` if the unpacked `size` is implausible or exceeds the free disk space."""
    most = max(PACKED_BYTES, packed * PACKED_RATIO)
    if size > most:
        raise ValueError(f"it unpacks to {size:,} bytes, expected at most {most:,} from {packed:,}")
    files.check_room(size, to.parent)


def _is_idx(path: Path) -> bool:
    """Return whether a file begins as an idx file; False if it cannot be opened.

    Raises:
        DataError: the file is gzipped and damaged, so its content is unknown.
    """
    try:
        file = _open_idx(path)
    except OSError:
        return False
    with file, _reading(path):
        magic = file.read(4)
    return len(magic) == 4 and magic[:2] == b"\0\0" and magic[2] in _IDX_TYPES and magic[3] > 0


def _open_idx(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == GZIP
    if packed:
        return cast(BinaryIO, gzip.open(path))
    return path.open("rb")


def _read_idx_header(file: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...]]:
    zeros, kind, dimensions = struct.unpack(">HBB", b"".join(_exactly(file, 4)))
    if zeros != 0 or kind not in _IDX_TYPES or dimensions == 0:
        raise ValueError("it does not begin as an idx file")
    shape = struct.unpack(f">{dimensions}I", b"".join(_exactly(file, 4 * dimensions)))
    return np.dtype(_IDX_TYPES[kind]), shape


def _exactly(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield `size` bytes in parts, because a header may claim more than fits into memory.

    Raises:
        ValueError: the file has fewer bytes left.
    """
    missing = size
    while missing:
        part = file.read(min(missing, 2**24))
        if not part:
            raise ValueError(f"it lacks the last {missing} bytes that its header states")
        yield part
        missing -= len(part)


def _map(path: Path, source: Path, member: str = "") -> Array:
    with _reading(source, member), np.errstate(over="ignore"):  # a header may hold absurd sizes
        values = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(values, np.ndarray):  # numpy detects archives by content, not by name
            values.close()
            raise ValueError("it is an archive, expected one array")
        return values


@contextmanager
def _reading(path: Path, member: str = "") -> Iterator[None]:
    """Turn an error that is no `PtqError` into a `DataError` that names the file and `member`."""
    name = str(path)
    if member:
        name += f": {member.removesuffix('.npy')}"
    try:
        yield
    except PtqError:
        raise
    except Exception as error:  # errors of zipfile, zlib, gzip or numpy
        if "Python objects" in str(error):
            raise DataError(
                f"{name}: holds pickled Python objects, which may run code; expected numbers"
            ) from None
        reason = one_line(error)
        if "allow_pickle" in reason:  # numpy takes other files for pickles
            reason = "it is not in NumPy's format"
        raise DataError(f"{name}: cannot be read ({reason})") from None
