"""`data=arrays`: .npz, .npy and idx files, in which what is what is found by the usual names.

None of them is unpickled, and none is read into memory whole: what is packed is unpacked into the
cache once, and mapped from there.
"""

import gzip
import logging
import math
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import ArraysConfig, PreprocessConfig
from resnet8ptq.core import cache, code, files
from resnet8ptq.core.errors import ConfigError, DataError, PtqError
from resnet8ptq.core.text import one_line, printable
from resnet8ptq.data.dataset import SIDES, Dataset, Split
from resnet8ptq.data.lazy import AT_ONCE
from resnet8ptq.data.sources import SOURCES
from resnet8ptq.data.splitting import Named, keep_split, split_one

log = logging.getLogger(__name__)

INPUTS = ("x", "inputs", "images", "features", "data")
LABELS = ("y", "labels", "targets")
GROUPS = ("groups", "clips")
CLASSES = ("classes", "class_names")
STEPS = {"scale": "data.scale", "zero_point": "data.offset", "offset": "data.offset"}
KEYS = ("data.inputs", "data.labels", "data.groups")
NO_LABELS = "none"
MAX_CLASSES = 1000
MAX_SAMPLES = 10_000_000  # each is hashed
TAKES = f"takes {SOURCES['arrays'].takes}"

# The format: http://yann.lecun.com/exdb/mnist/, "the IDX file format"; big-endian.
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MNIST = re.compile(r"(train|t10k)-(images|labels)(-idx\d-ubyte)?")  # its files, of either side
GZIP = b"\x1f\x8b"
PACKED_BYTES, PACKED_RATIO = 2**28, 100  # what a packed file may hold, whichever is more

Array = NDArray[Any]
Open = Callable[[], Array]


def load(config: ArraysConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Read the arrays that `data.root` names.

    Raises:
        ConfigError: no such file, or the settings do not say what is what.
        DataError: a file is damaged, holds pickled objects, or does not fit; names it.
    """
    root = Path(str(config.root))
    found = _open(root, cache_root)
    read = partial(_named, root=root, found=found, cache_root=cache_root)
    chosen = _find_split(found, config, root) or [_find_one(found, config, root)]
    sides = [_read(str(root), *map(read, KEYS, names)) for names in chosen]
    for split in sides:
        if split.images.dtype.kind == "f" and (config.offset, config.scale) != (0, 1):
            raise ConfigError(
                f"data.offset, data.scale: got {config.offset:g} and {config.scale:g}, but the "
                f"samples in {root} are {split.images.dtype}; takes them for stored integers only"
            )
    if sides[0].images.dtype.kind in "iu" and (config.offset, config.scale) == (0, 1):
        _tell_unused(found, root)
    labels = [split.labels for split in sides if split.labels is not None]
    highest = [int(each.max()) for each in labels if each.dtype.kind == "i"]
    names, named = _name_classes(found, config, root, max(highest)) if highest else ((), True)
    title = root.name.partition(".")[0] or root.name
    if len(sides) == 1:
        return split_one(title, names, sides[0], root, config, named)
    train, test = (
        Named(split, [f"{inputs}: sample {place}" for place in range(len(split))])
        for split, (inputs, *_) in zip(sides, chosen, strict=True)
    )
    return keep_split(title, names, train, test, root, named)


@dataclass(frozen=True)
class _Named:
    """An array, and where it comes from."""

    place: str
    values: Array

    def __str__(self) -> str:
        return self.place


def _open(root: Path, cache_root: Path) -> dict[str, Open]:
    """Return the arrays below `root` by name, none of them read."""
    if root.is_dir():
        inside = sorted(path for path in root.iterdir() if path.is_file())
        paths = [path for path in inside if path.suffix == ".npy" or _is_idx(path)]
        if not paths:
            raise DataError(f"{root}: holds no array; {TAKES}")
        return {path.name.partition(".")[0]: _opener(path, cache_root) for path in paths}
    if root.suffix.lower() != ".npz":
        return {"inputs": _opener(root, cache_root)}
    with _reading(root), zipfile.ZipFile(root) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
    digest = files.sha256(root)

    def member(name: str) -> Open:
        return lambda: _unpacked(root, digest, name, _copy_member, cache_root)

    return {name.removesuffix(".npy"): member(name) for name in members}


def _opener(path: Path, cache_root: Path) -> Open:
    if path.suffix.lower() == ".npy":
        return lambda: _map(path, path)
    if not _is_idx(path):
        raise DataError(f"{path}: is no array; {TAKES}")
    return lambda: _unpacked(path, files.sha256(path), "", _copy_idx, cache_root)


def _unpacked(
    path: Path, digest: str, member: str, copy: Callable[[Path, str, Path], None], cache_root: Path
) -> Array:
    """Return an array of a packed file, mapped from the cache."""

    def make(folder: Path) -> None:
        with _reading(path, member):
            copy(path, member, folder / "array.npy")
        _map(folder / "array.npy", path, member)

    key: cache.Key = {"sha256": digest, "member": member, "code": code.behind(__name__)}
    return _map(cache.entry(cache_root, "arrays", key, make) / "array.npy", path, member)


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
    """Write an idx file, such as MNIST's, as an .npy file, part by part.

    Args:
        packed: its size in bytes, gzipped or not.

    Raises:
        ValueError: it is none, holds less or more than its header says, or unpacks to too much.
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
        raise ValueError(f"it holds more than {list(shape)}, as its header has it")


def _check_room(size: int, packed: int, to: Path) -> None:
    """Refuse what a header promises before anything is unpacked.

    Raises:
        ValueError: far more than data of that size hold, or than the disk has free.
    """
    most = max(PACKED_BYTES, packed * PACKED_RATIO)
    if size > most:
        raise ValueError(f"it unpacks to {size:,} bytes, takes {most:,} at most from {packed:,}")
    files.check_room(size, to.parent)


def _is_idx(path: Path) -> bool:
    try:
        with _open_idx(path) as file:
            magic = file.read(4)
    except (OSError, EOFError):
        return False
    return len(magic) == 4 and magic[:2] == b"\0\0" and magic[2] in _IDX_TYPES and magic[3] > 0


def _open_idx(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == GZIP
    return cast(BinaryIO, gzip.open(path)) if packed else path.open("rb")


def _read_idx_header(file: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...]]:
    zeros, kind, dimensions = struct.unpack(">HBB", b"".join(_exactly(file, 4)))
    if zeros != 0 or kind not in _IDX_TYPES or dimensions == 0:
        raise ValueError("it does not begin as an idx file")
    shape = struct.unpack(f">{dimensions}I", b"".join(_exactly(file, 4 * dimensions)))
    return np.dtype(_IDX_TYPES[kind]), shape


def _exactly(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield `size` bytes in parts: a header may promise more than memory holds.

    Raises:
        ValueError: the file ends before.
    """
    missing = size
    while missing and (part := file.read(min(missing, 2**24))):
        yield part
        missing -= len(part)
    if missing:
        raise ValueError(f"it ends {missing} bytes before what its header says")


def _map(path: Path, source: Path, member: str = "") -> Array:
    with _reading(source, member), np.errstate(over="ignore"):  # sizes that no file has
        values = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(values, np.ndarray):  # numpy goes by the content
            values.close()
            raise ValueError("it is an archive, takes one array")
        return values


@contextmanager
def _reading(path: Path, member: str = "") -> Iterator[None]:
    """Name the file, and the array in it, in whatever goes wrong."""
    place = f"{path}: {member.removesuffix('.npy')}" if member else str(path)
    try:
        yield
    except PtqError:
        raise
    except Exception as error:  # zipfile, zlib, gzip and numpy each have their own
        if "Python objects" in str(error):
            raise DataError(
                f"{place}: holds pickled Python objects, which may run code; takes numbers"
            ) from None
        raise DataError(f"{place}: cannot be read ({one_line(error)})") from None


def _find_split(
    found: Mapping[str, Open], config: ArraysConfig, root: Path
) -> list[list[str | None]] | None:
    """Return the names of what `KEYS` are on both sides; None where there is no such split.

    What is normal trains a detector of anomalies: training samples may lack the labels.
    """
    if config.inputs is not None or config.labels not in (None, NO_LABELS):
        return None
    sides = []
    for usual in map(_of_side, SIDES):
        names = [_pick(found, each, root) for each in usual]
        if names[0] is None:
            return None
        sides.append(names if config.labels is None else [names[0], None, names[2]])
    return sides


def _of_side(side: str) -> list[list[str]]:
    """Return the usual names of what `KEYS` are on one side of a split."""
    return [
        [name for base in usual for name in (f"{base}_{side}", f"{side}_{base}")]
        for usual in (INPUTS, LABELS, GROUPS)
    ]


def _find_one(found: Mapping[str, Open], config: ArraysConfig, root: Path) -> list[str | None]:
    """Return the names of what `KEYS` are; None for labels and groups that there are not."""
    usual: Sequence[Sequence[str]] = (INPUTS, LABELS, GROUPS)
    alone = [names for names in map(_of_side, SIDES) if _pick(found, names[0], root)]
    if config.inputs is None and _pick(found, INPUTS, root) is None and len(alone) == 1:
        [usual] = alone
    inputs = config.inputs or _pick(found, usual[0], root)
    if inputs is None:
        raise ConfigError(
            f"data.inputs: got null, and {root} holds {_list(found)}; takes the name of one, or "
            f"one named {' | '.join(INPUTS)}, or x_train and x_test with y_train and y_test"
        )
    groups = config.groups or _pick(found, usual[2], root)
    labels = config.labels or _pick(found, usual[1], root)
    others = {name for name in found if name.lower() not in CLASSES} - {inputs, groups}
    if labels is None and others:
        raise ConfigError(
            f"data.labels: got null, and {root} holds {_list(found)}; takes the name of one, or "
            f"one named {' | '.join(LABELS)}, or an .npy or idx file, or {NO_LABELS}"
        )
    return [inputs, None if labels == NO_LABELS else labels, groups]


def _list(found: Mapping[str, Open]) -> str:
    return printable(", ".join(list(found)[:20]))[:300] or "nothing"


def _pick(found: Mapping[str, Open], names: Any, root: Path) -> str | None:
    """Return the one array that is named so, in whatever case; None where none is."""
    known = [name for name in found if _simple(name) in names]
    if len(known) > 1:
        raise ConfigError(
            f"data.inputs, data.labels: got null, and {root} holds {' and '.join(known)}; "
            "takes the name of one"
        )
    return known[0] if known else None


def _simple(name: str) -> str:
    """Return a name as the usual ones are written: `train_images` for MNIST's files of them."""
    mnist = _MNIST.fullmatch(name.lower())
    return f"{mnist[1]}_{mnist[2]}".replace("t10k", "test") if mnist else name.lower()


def _named(
    key: str, name: str | None, root: Path, found: Mapping[str, Open], cache_root: Path
) -> _Named | None:
    """Return the array of that name, or that of the file of that name; `key` named it."""
    if name is None:
        return None
    if name in found:
        return _Named(f"{root}: {name}" if len(found) > 1 else str(root), found[name]())
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"{key}: got {name}, takes a file, or one of {_list(found)} in {root}")
    return _Named(str(path), _opener(path, cache_root)())


def _read(
    source: str, inputs: _Named | None, labels: _Named | None, groups: _Named | None
) -> Split:
    """Check inputs [N, ...], labels [N, ...] and groups [N]."""
    assert inputs is not None  # they have been found
    images = inputs.values
    if images.dtype.kind not in "biuf" or images.ndim < 2 or 0 in images.shape:
        raise DataError(f"{inputs}: is {_shape(images)}; takes numbers [N, ...]")
    if len(images) > MAX_SAMPLES:
        raise DataError(f"{inputs}: has {len(images):,} samples, takes {MAX_SAMPLES:,} at most")
    _check_finite(inputs)
    for other, what in ((labels, "labels"), (groups, "groups")):
        if other is not None and other.values.shape[:1] != images.shape[:1]:
            raise DataError(
                f"{inputs} has {len(images)} samples, {other} is {_shape(other.values)}; "
                f"takes {len(images)} {what}"
            )
    found = None if labels is None else _read_labels(labels)
    return Split(images, found, source, groups=None if groups is None else _read_groups(groups))


def _tell_unused(found: Mapping[str, Open], root: Path) -> None:
    """Warn where a scale and an offset lie beside integers that they are not applied to."""
    beside = {name: found[name]() for name in found if name.lower() in STEPS}
    numbers = {
        name: a.item() for name, a in beside.items() if a.dtype.kind in "iuf" and a.size == 1
    }
    if numbers:
        held = ", ".join(f"{name} {number:.7g}" for name, number in numbers.items())
        keys = " ".join(f"{STEPS[n.lower()]}={number:.7g}" for n, number in numbers.items())
        log.warning("%s: holds %s, which are not used; %s applies them", root, held, keys)


def _check_finite(array: _Named) -> None:
    if array.values.dtype.kind != "f":
        return
    for start in range(0, len(array.values), AT_ONCE):
        finite = np.isfinite(array.values[start : start + AT_ONCE])
        if not finite.all():
            first = start + int(np.argwhere(~finite)[0, 0])
            raise DataError(f"{array}: NaN or infinity in sample {first}; takes finite values")


def _read_labels(labels: _Named) -> Array:
    """Return classes [N] as int64, or values [N, ...] as they are; one-hot rows are classes."""
    given = labels.values
    if given.ndim == 2 and given.shape[1] > 1 and _is_one_hot(given):
        log.info("%s: one-hot, taken as %d classes", labels, given.shape[1])
        return given.argmax(axis=1)
    if given.dtype.kind == "f":
        _check_finite(labels)
        return given
    if given.dtype.kind not in "iub" or given.shape not in ((len(given),), (len(given), 1)):
        raise DataError(
            f"{labels}: is {_shape(given)}; takes labels as integers from 0, [N], or values as "
            "floats, [N, ...]"
        )
    wide = given.reshape(-1).astype(np.int64)
    if not 0 <= wide.min() <= wide.max() < MAX_CLASSES:
        raise DataError(
            f"{labels}: labels from {wide.min()} to {wide.max()}; "
            f"takes 0 to {MAX_CLASSES - 1} at most, or floats for values to predict"
        )
    return wide


def _is_one_hot(rows: Array) -> bool:
    if rows.dtype.kind not in "iubf" or rows.shape[1] > MAX_CLASSES:
        return False
    parts = (rows[start : start + AT_ONCE] for start in range(0, len(rows), AT_ONCE))
    return all(np.isin(part, (0, 1)).all() and (part.sum(axis=1) == 1).all() for part in parts)


def _read_groups(groups: _Named) -> NDArray[np.int64]:
    given = groups.values
    if given.dtype.kind not in "iuUS" or given.ndim != 1:
        raise DataError(f"{groups}: is {_shape(given)}; takes an integer or a name for each sample")
    return np.unique(given, return_inverse=True)[1].astype(np.int64)


def _shape(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _name_classes(
    found: Mapping[str, Open], config: ArraysConfig, root: Path, highest: int
) -> tuple[tuple[str, ...], bool]:
    """Return the names of the classes, and whether they were given."""
    stored = _pick(found, CLASSES, root)
    if config.classes is not None:
        names = tuple(config.classes)
    elif stored is not None:
        array = found[stored]()
        if array.dtype.kind != "U" or array.ndim != 1 or len(array) > MAX_CLASSES:
            raise DataError(
                f"{root}: {stored} is {_shape(array)}; takes {MAX_CLASSES} names at most, as text"
            )
        if len(set(array.tolist())) != len(array):
            raise DataError(f"{root}: {stored} is {_shape(array)}; takes different names as text")
        names = tuple(map(printable, array.tolist()))
    else:
        return tuple(map(str, range(max(highest + 1, 2)))), False
    if highest >= len(names):
        raise DataError(
            f"{root}: labels up to {highest}, but {len(names)} class names "
            f"({'data.classes' if config.classes is not None else stored}); takes one for each"
        )
    return names, True
