"""`data=arrays`: data sets of arrays in .npz, .npy and idx files.

No file is unpickled. Arrays are mapped from files, because they may exceed the memory. Those of
.npz and idx files are first unpacked into the cache.
"""

import gzip
import hashlib
import logging
import math
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import ArraysConfig, DataConfig, PreprocessConfig
from resnet8ptq.core import cache, code, files
from resnet8ptq.core.errors import ConfigError, DataError, PtqError
from resnet8ptq.core.records import pack
from resnet8ptq.core.text import nearest, one_line, printable
from resnet8ptq.data.dataset import SIDES, Dataset, Split
from resnet8ptq.data.lazy import AT_ONCE, in_parts
from resnet8ptq.data.sources import SOURCES
from resnet8ptq.data.splitting import TEST_NAMES, NamedSplit, keep_split, split_one

log = logging.getLogger(__name__)

INPUTS = ("x", "inputs", "images", "features", "data")
LABELS = ("y", "labels", "targets", "label", "target")
GROUPS = ("groups", "clips")
CLASSES = ("classes", "class_names")
FROM_MEMORY = "samples_from_memory"  # the kind of the cache's entries, see `api.samples`
STEPS = {"scale": "data.scale", "zero_point": "data.offset", "offset": "data.offset"}
KEYS = ("data.inputs", "data.labels", "data.groups")
NO_LABELS = "none"
IGNORED = -100  # the label of tokens that are not scored, as in PyTorch
MAX_CLASSES = 1000
MAX_SAMPLES = 10_000_000  # limited, since each sample is hashed
EXPECTED = f"expected {SOURCES['arrays'].takes}"

# The format: http://yann.lecun.com/exdb/mnist/, "the IDX file format"; big-endian.
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MNIST = re.compile(r"(train|t10k)-(images|labels)(-idx\d-ubyte)?")  # MNIST's file names
GZIP = b"\x1f\x8b"
# The limits of an unpacked file, of which the larger one applies
PACKED_BYTES = 2**28
PACKED_RATIO = 100

Array = NDArray[Any]
# Functions by name, each of which reads an array when called
Arrays = Mapping[str, Callable[[], Array]]


class Chosen(NamedTuple):
    """The arrays for `KEYS`, each by its name or by the path of its file.

    Attributes:
        inputs: one array, or a dict of arrays by input name.
        labels, groups: None for samples without them.
    """

    inputs: Any
    labels: str | None
    groups: str | None


def load(config: ArraysConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the data set of the arrays in `data.root`, a file or a folder.

    Raises:
        ConfigError: inputs or labels are not recognized, or a setting does not fit the arrays.
        DataError: a file is damaged or holds pickled objects, or its arrays are unsuitable.
    """
    root = Path(str(config.root))
    arrays = _open(root, cache_root)

    # Check the names in the settings before reading arrays
    if not isinstance(config.inputs, str) and config.labels in (None, NO_LABELS):
        arrays = _test_by_validation(arrays, root)
    for key in KEYS:
        name = getattr(config, key.removeprefix("data."))
        if isinstance(name, str) and name != NO_LABELS:
            _check_name(key, name, root, arrays)
    chosen = _find_split(arrays, config, root)
    if chosen is None:
        chosen = [_find_one(arrays, config, root)]

    # Read the arrays of each side, or of the only one
    find = partial(_find_array, root=root, arrays=arrays, cache_root=cache_root)
    sides = []
    for names in chosen:
        inputs = _find_inputs(find, names.inputs, cache_root)
        labels = find("data.labels", names.labels)
        groups = find("data.groups", names.groups)
        sides.append(_read_split(str(root), inputs, labels, groups))
    sides = name_binary(sides, root)

    # Scale and offset apply to stored integers only
    for split in sides:
        if split.stored.dtype.kind not in "biu" and (config.offset, config.scale) != (0, 1):
            raise ConfigError(
                f"data.offset, data.scale: got {config.offset:g} and {config.scale:g}, but the "
                f"samples in {root} are {split.stored.dtype}; expected them for one array of "
                "stored integers only"
            )
    if sides[0].stored.dtype.kind in "iu" and (config.offset, config.scale) == (0, 1):
        _warn_unused(arrays, root)

    # Name the classes, then split the samples
    highest = []
    for split in sides:
        if split.labels is not None and split.labels.dtype.kind in "ib":
            highest.append(_find_highest(split.labels))
    class_names: tuple[str, ...] = ()
    named = True
    if highest:
        class_names, named = _find_classes(arrays, config, root, max(highest))
    title = root.name.partition(".")[0] or root.name
    if root.parent.name == FROM_MEMORY:  # the folder's name is a hash
        title = "samples in memory"
    if len(sides) == 1:
        mend = "arrays x_train, y_train, x_test and y_test"
        return split_one(title, class_names, sides[0], root, config, named, mend)
    shown = []
    for split, names in zip(sides, chosen, strict=True):
        source = ", ".join(_list_keys(names.inputs)) or names.inputs
        samples = [f"{source}: sample {number}" for number in range(len(split))]
        shown.append(NamedSplit(split, samples))
    train, test = shown
    return keep_split(title, class_names, train, test, root, named)


@dataclass(frozen=True)
class _Sourced:
    """An array, and its source in messages."""

    source: str
    values: Array

    def __str__(self) -> str:
        return self.source


def _open(root: Path, cache_root: Path) -> Arrays:
    """Return functions that read the arrays of a file or a folder, by name of the array.

    Raises:
        DataError: a folder has no arrays or two with the same name, or a file is no array or is
            damaged.
    """
    arrays: dict[str, Callable[[], Array]] = {}
    if root.is_dir():
        paths = _find_files(root)
        if not paths:
            raise DataError(f"{root}: holds no array; {EXPECTED}")
        for name, path in _name_files(paths).items():
            arrays[name] = _opener(path, cache_root)
        return arrays
    if root.suffix.lower() != ".npz":
        return {"inputs": _opener(root, cache_root)}

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


def _find_members(root: Path) -> list[str]:
    with _reading(root), zipfile.ZipFile(root) as archive:
        return [name for name in archive.namelist() if name.endswith(".npy")]


def name_inputs(data: DataConfig, find_takes: Callable[[], Sequence[str]]) -> DataConfig:
    """Return the settings, with `data.inputs` set if arrays have the network's input names.

    Without this, an array with a usual name, such as `x`, would be the only input of a network of
    several inputs. Settings of other sources, and those that set `data.inputs`, stay unchanged.
    Errors of data and network are suppressed here, because loading them raises them again.

    Args:
        data: the located data set, of any source.
        find_takes: returns the names of the network's inputs; called only if needed, because it is
            slow.
    """
    if data.name != "arrays" or not isinstance(data, ArraysConfig) or data.inputs is not None:
        return data

    # After an error, the settings stay as they are
    inputs = None
    with suppress(PtqError, OSError):
        inputs = _match_names(Path(str(data.root)), find_takes)
    if inputs is None:
        return data
    log.info("data.inputs: got null; the network names its inputs: %s", inputs)
    return replace(data, inputs=inputs)


def _match_names(root: Path, find_takes: Callable[[], Sequence[str]]) -> Any:
    """Return `data.inputs` by the names of the network's inputs.

    Returns:
        One name, or a dict of names; None if an input has no array of its name, or if usual names
        identify the inputs.
    """
    names: list[str] = []
    if root.is_dir():
        names = [path.name.partition(".")[0] for path in _find_files(root)]
    elif root.suffix.lower() == ".npz":
        names = [name.removesuffix(".npy") for name in _find_members(root)]

    # Usual names identify the inputs in two cases: labels have one and no input has, so that all
    # other arrays are inputs; or the only array that may be an input has one
    others = {*LABELS, *GROUPS, *CLASSES, *STEPS}
    simple = {_without_side(_simple(name)) for name in names}
    candidates = simple - others
    all_are_inputs = candidates.isdisjoint(INPUTS) and not simple.isdisjoint(LABELS)
    at_most_one = len(candidates) < 2 and candidates <= {*INPUTS}
    if all_are_inputs or at_most_one:
        return None

    # Each input of the network needs an array, or one on each side of a split
    takes = sorted(find_takes())
    train = _of_own_names(names, "train", ())
    test = _of_own_names(names, "test", ())
    split = train.keys() & test.keys()
    has_all = split.issuperset(takes) or {*names}.issuperset(takes)
    if not takes or not has_all:
        return None
    if len(takes) == 1 and takes[0] not in split:
        return takes[0]
    return {name: name for name in takes}


def _opener(path: Path, cache_root: Path) -> Callable[[], Array]:
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
        raise DataError(f"{name}: cannot be read ({one_line(error)})") from None


def _find_split(arrays: Arrays, config: ArraysConfig, root: Path) -> list[Chosen] | None:
    """Return the arrays for `KEYS` of both sides, training first.

    Training samples may lack labels, because an anomaly detector trains on normal samples only.

    Returns:
        The arrays; None if they form no split, or if the settings name a single input or the
        labels.

    Raises:
        ConfigError: labels are not recognized, `data.groups` is set, or several arrays of a side
            have a usual name for inputs, labels or groups.
    """
    if isinstance(config.inputs, str) or config.labels not in (None, NO_LABELS):
        return None
    sides: list[Chosen] = []
    for side in SIDES:
        chosen = _find_side(arrays, config, root, side)
        if chosen is None:
            return None
        sides.append(chosen)

    # Both sides need the same inputs, and `data.groups` names one array, not two
    train, test = sides
    if _list_keys(train.inputs) != _list_keys(test.inputs):
        return None
    if config.labels is None and test.labels is None:
        _ask_for_labels_of_split(arrays, config, root, sides)
    if config.groups is not None:
        raise ConfigError(
            f"data.groups: got {config.groups}, and {root} holds a split; expected "
            f"{' | '.join(GROUPS)} with _train and _test"
        )
    return sides


def _test_by_validation(arrays: Arrays, root: Path) -> Arrays:
    """Return the arrays, with those of validation renamed if there are no test arrays.

    `x_val` becomes `x_test`, for example. Without training arrays, nothing is renamed.
    """
    if not _of_own_names(arrays, "train", ()):
        return arrays
    for name in arrays:
        if "test" in _simple(name).split("_"):
            return arrays

    # Rename the arrays of the first name of validation that occurs
    for validation in TEST_NAMES[1]:
        own = _of_own_names(arrays, validation, ())
        if own:
            log.info("%s: has no test arrays; tested: %s", root, list_names(own.values()))
            renamed = {name: f"{base}_test" for base, name in own.items()}
            return {renamed.get(name, name): read for name, read in arrays.items()}
    return arrays


def _list_keys(inputs: Any) -> list[str]:
    """Return the input names if `inputs` is a dict by them; empty for one array."""
    return list(inputs) if isinstance(inputs, dict) else []


def _find_side(arrays: Arrays, config: ArraysConfig, root: Path, side: str) -> Chosen | None:
    """Return the arrays for `KEYS` on one side of a split; None if the side lacks an input."""
    left = _find_left(arrays, config)
    usual = _list_usual(side)
    single = pick(left, usual.inputs, root)
    labels = pick(left, usual.labels, root)
    groups = pick(left, usual.groups, root)
    own = _of_own_names(arrays, side, {labels, groups})
    if config.labels is not None:
        labels = None

    # A usual name is the only input; otherwise all arrays of this side are inputs
    if config.inputs is None and single is not None:
        return Chosen(single, labels, groups)
    inputs = own
    if config.inputs is not None:
        inputs = {}
        for key, base in config.inputs.items():
            if base not in own:
                return None
            inputs[key] = own[base]
    if not inputs:
        return None
    if len(inputs) == 1:
        [single] = inputs.values()
        return Chosen(single, labels, groups)
    return Chosen(inputs, labels, groups)


def _ask_for_labels_of_split(
    arrays: Arrays, config: ArraysConfig, root: Path, sides: Sequence[Chosen]
) -> None:
    """Raise `ConfigError` if an array may hold the labels.

    With `data.inputs=null`, several inputs are a guess, so that one of them may hold labels.
    """
    is_guessed = config.inputs is None and isinstance(sides[-1].inputs, dict)
    used = {config.groups}
    for side in sides:
        used.add(side.groups)
        if not is_guessed:
            used.update(_list_arrays(side.inputs))
    _ask_for_labels(arrays, used, root, " | ".join(f"{name}_test" for name in LABELS))


def _find_left(arrays: Arrays, config: ArraysConfig) -> list[str]:
    """Return the names of the arrays that `data.inputs` does not name.

    `x` in `data.inputs` also names `x_train` and `x_test`.
    """
    inputs: list[str] = []
    if config.inputs is not None:
        inputs = _list_arrays(config.inputs)
    left = []
    for name in arrays:
        if name not in inputs and _without_side(name) not in inputs:
            left.append(name)
    return left


def _without_side(name: str) -> str:
    for side in SIDES:
        name = name.removesuffix(f"_{side}").removeprefix(f"{side}_")
    return name


def _of_own_names(
    arrays: Iterable[str], side: str, others: Collection[str | None]
) -> dict[str, str]:
    """Return the names of one side's arrays by their names without the side.

    The names in `others` are left out.

    >>> _of_own_names(["x_train", "y_train", "x_test"], "train", others=["y_train"])
    {'x': 'x_train'}
    """
    own = {}
    for name in arrays:
        base = name.removesuffix(f"_{side}").removeprefix(f"{side}_")
        if base != name and name not in others:
            own[base] = name
    return dict(sorted(own.items()))


class _Usual(NamedTuple):
    """The usual names of arrays for each of `KEYS`."""

    inputs: Sequence[str] = INPUTS
    labels: Sequence[str] = LABELS
    groups: Sequence[str] = GROUPS


def _list_usual(side: str) -> _Usual:
    """Return the usual names on one side of a split."""
    usual = []
    for names in _Usual():
        of_side = []
        for name in names:
            of_side += [f"{name}_{side}", f"{side}_{name}"]
        usual.append(of_side)
    return _Usual(*usual)


def _find_one(arrays: Arrays, config: ArraysConfig, root: Path) -> Chosen:
    """Return the arrays for `KEYS` of samples without a split.

    Raises:
        ConfigError: inputs or labels are not recognized, or several arrays have a usual name for
            inputs, labels or groups.
    """
    usual = _Usual()
    alone = []  # the usual names in a file that holds only one side
    for side in SIDES:
        of_side = _list_usual(side)
        if pick(arrays, of_side.inputs, root):
            alone.append(of_side)
    if config.inputs is None and pick(arrays, INPUTS, root) is None and len(alone) == 1:
        [usual] = alone

    # Names in the settings have precedence over usual names
    left = _find_left(arrays, config)
    groups = config.groups or pick(left, usual.groups, root)
    labels = config.labels or pick(left, usual.labels, root)
    inputs = config.inputs or pick(left, usual.inputs, root)
    if inputs is None and labels is not None:
        inputs = _find_unnamed(arrays, (labels, groups))

    # Ask for the names that are still missing
    if inputs is None:
        held = list_names(arrays) or "nothing"
        raise ConfigError(
            f"data.inputs: got null, and {root} holds {held}; expected the name of one, or one "
            f"named {' | '.join(INPUTS)}, or x_train and x_test with y_train and y_test, or "
            "{input: name, ...} for a network of several inputs, or data.labels=none if each array "
            "is an input"
        )
    if labels is None:
        named = f"the name of one, or one named {' | '.join(LABELS)}, or an .npy or idx file"
        _ask_for_labels(arrays, {*_list_arrays(inputs), groups}, root, named)
    if labels == NO_LABELS:
        labels = None
    return Chosen(inputs, labels, groups)


def _find_unnamed(arrays: Arrays, used: Collection[str | None]) -> Any:
    """Return the arrays that are not in `used` as `data.inputs`.

    Returns:
        One name, or a dict of several by their own names; None if no array is left, or if an array
        is named after a side of a split.
    """
    if _of_own_names(arrays, "train", ()) or _of_own_names(arrays, "test", ()):
        return None
    unnamed = _list_unused(arrays, used)
    if not unnamed:
        return None
    if len(unnamed) == 1:
        return unnamed[0]
    return {name: name for name in sorted(unnamed)}


def _list_unused(arrays: Arrays, used: Collection[str | None]) -> list[str]:
    """Return the names that are not in `used` and are not usual for class names or scales."""
    unused = []
    for name in arrays:
        if name.lower() not in (*CLASSES, *STEPS) and name not in used:
            unused.append(name)
    return unused


def _ask_for_labels(
    arrays: Arrays, used: Collection[str | None], root: Path, expected: str
) -> None:
    """Raise `ConfigError` if an unused array may hold the labels."""
    if _list_unused(arrays, used):
        raise ConfigError(
            f"data.labels: got null, and {root} holds {list_names(arrays)}; expected {expected}, "
            f"or data.labels={NO_LABELS}"
        )


def _list_arrays(inputs: Any) -> list[str]:
    """Return the names in `inputs`, which is one name or a dict of names."""
    return list(inputs.values()) if isinstance(inputs, dict) else [str(inputs)]


def list_names(names: Iterable[str], separator: str = ", ", mistyped: str = "") -> str:
    """Return names for a message: at most 20, cut at 300 characters; of more, also their number.

    >>> list_names(["id", "text", "label"], mistyped="labels")
    'label, id, text'

    Args:
        mistyped: the name that the user gave; the name nearest to it comes first.
    """
    listed = list(names)
    near = nearest(mistyped, listed)
    if near is not None:
        listed.remove(near)
        listed.insert(0, near)
    shown = printable(separator.join(listed[:20]))[:300]
    if len(listed) > 20:
        shown += f"{separator}... ({len(listed)} in all)"
    return shown


def pick(names: Iterable[str], usual: Collection[str], source: object) -> str | None:
    """Return the name among `names` that is in `usual`, ignoring case; None if there is none.

    MNIST's file names count as `train_images` and so on.

    Raises:
        ConfigError: several names are usual.
    """
    known = [name for name in names if _simple(name) in usual]
    if len(known) > 1:
        raise ConfigError(
            f"data.inputs, data.labels: got null, and {source} holds {list_names(known, ' and ')}; "
            "expected the name of one"
        )
    return known[0] if known else None


def _simple(name: str) -> str:
    """Return a name in lower case; MNIST's file names become `train_images` and so on."""
    name = name.lower()
    mnist = _MNIST.fullmatch(name)
    if mnist:
        return f"{mnist[1]}_{mnist[2]}".replace("t10k", "test")
    return name


def _find_array(
    key: str, name: str | None, root: Path, arrays: Arrays, cache_root: Path
) -> _Sourced | None:
    """Return the array of this name, or of the file at this path; None without a name.

    Args:
        key: the setting that holds the name, for the error.
    """
    if name is None:
        return None
    _check_name(key, name, root, arrays)
    if name in arrays:
        source = f"{root}: {name}" if len(arrays) > 1 else str(root)
        return _Sourced(source, arrays[name]())
    path = Path(name).expanduser()
    return _Sourced(str(path), _opener(path, cache_root)())


def _check_name(key: str, name: str, root: Path, arrays: Arrays) -> None:
    """Raise `ConfigError` if `name` is neither an array nor a file."""
    if name not in arrays and not Path(name).expanduser().is_file():
        held = list_names(arrays, mistyped=name) or "nothing"
        raise ConfigError(f"{key}: got {name}, expected a file, or one of {held} in {root}")


def _find_inputs(
    find: Callable[[str, str | None], _Sourced | None], inputs: Any, cache_root: Path
) -> _Sourced:
    """Return the array of a single input, or records of the inputs in a dict, from the cache.

    Raises:
        ConfigError: there is no array of a name.
        DataError: an array cannot be read; or arrays of a dict are empty, are not finite numbers,
            or differ in their number of samples.
    """
    if not isinstance(inputs, dict):
        array = find("data.inputs", inputs)
        assert array is not None  # the name of a single input is never None
        return array
    sourced = {}
    for name, array_name in inputs.items():
        array = find(f"data.inputs.{name}", array_name)
        if array is not None:
            sourced[name] = array

    # Check the arrays here, because checks after packing cannot name an array
    first = next(iter(sourced.values()))
    for name, array in sourced.items():
        values = array.values
        if values.dtype.kind not in "biuf" or values.ndim < 1 or 0 in values.shape:
            raise DataError(f"{array}: got {_shape(values)}, expected numbers [N, ...]")
        if len(values) != len(first.values):
            raise DataError(
                f"{first} has {len(first.values)} samples, {array} has {len(values)} for the "
                f"input {name}; expected equal numbers"
            )
        _check_finite(array)

    def make(folder: Path) -> None:
        fields = {name: array.values for name, array in sourced.items()}
        pack(fields, folder / "records.npy")

    key = {}
    for name, array in sourced.items():
        key[f"input {name}"] = _hash(array.values)
    key["code"] = code.behind(__name__)
    folder = cache.entry(cache_root, "records", key, make)
    records = np.load(folder / "records.npy", mmap_mode="r")
    return _Sourced(", ".join(map(str, sourced.values())), records)


def _hash(values: Array) -> str:
    digest = hashlib.sha256(_shape(values).encode())
    for part in in_parts(values):
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _read_split(
    source: str, inputs: _Sourced, labels: _Sourced | None, groups: _Sourced | None
) -> Split:
    """Return inputs [N, ...], labels [N, ...] and groups [N] as a split.

    Raises:
        DataError: an array has a wrong dtype, shape or values.
    """
    images = inputs.values
    kind: str = images.dtype.kind
    if kind != "V" and (kind not in "biuf" or images.ndim < 2 or 0 in images.shape):
        raise DataError(f"{inputs}: got {_shape(images)}, expected numbers [N, ...]")
    if len(images) > MAX_SAMPLES:
        raise DataError(f"{inputs}: has {len(images):,} samples, expected at most {MAX_SAMPLES:,}")
    _check_finite(inputs)

    # Labels and groups must have a value for each sample
    for other, kind in ((labels, "labels"), (groups, "groups")):
        if other is not None and other.values.shape[:1] != images.shape[:1]:
            raise DataError(
                f"{inputs} has {len(images)} samples, {other} is {_shape(other.values)}; "
                f"expected {len(images)} {kind}"
            )
    split = Split(images, None, source)
    if labels is not None:
        split = replace(split, labels=_read_labels(labels))
    if groups is not None:
        split = replace(split, groups=_read_groups(groups))
    return split


def _warn_unused(arrays: Arrays, root: Path) -> None:
    """Warn if an array holds a scale or an offset for the integers, since neither is applied."""
    held = []
    settings = []
    for name in arrays:
        if name.lower() in STEPS:
            array = arrays[name]()
            if array.dtype.kind in "iuf" and array.size == 1:
                number = f"{array.item():.7g}"
                held.append(f"{name} {number}")
                settings.append(f"{STEPS[name.lower()]}={number}")
    if held:
        log.warning(
            "%s: holds %s, which are not used; %s applies them",
            root,
            ", ".join(held),
            " ".join(settings),
        )


def _check_finite(array: _Sourced) -> None:
    if array.values.dtype.kind != "f":
        return
    for index, part in enumerate(in_parts(array.values)):
        finite = np.isfinite(part)
        if not finite.all():
            first = index * AT_ONCE + int(np.argwhere(~finite)[0, 0])
            raise DataError(f"{array}: NaN or infinity in sample {first}; expected finite values")


def _find_highest(labels: Array) -> int:
    """Return the highest class number of integers of any shape, or of bools [N, classes]."""
    if labels.dtype.kind == "b":
        return labels.shape[1] - 1
    return int(labels.max())


def _read_labels(labels: _Sourced) -> Array:
    """Return labels in the form of `Split.labels`, by their dtype, shape and values.

    One-hot rows become classes. Integers [N, tokens] are classes of tokens only if one of them is
    -100.

    Raises:
        DataError: the labels have no such form.
    """
    stored = labels.values

    # Numbers for each class, values and pictures
    if _is_binary(stored):
        return read_binary(stored, labels)
    if stored.dtype.kind == "f":
        _check_finite(labels)
        return stored
    if stored.ndim == 4 and stored.dtype == np.uint8 and stored.shape[3] in (1, 3):
        return stored

    # Masks, texts and classes of tokens
    if stored.ndim == 3 and stored.dtype.kind in "iub":
        return _read_masks(labels)
    if stored.dtype.kind == "U" and stored.ndim == 1:
        return stored
    if stored.dtype.kind == "i" and stored.ndim == 2 and (stored == IGNORED).any():
        scored = stored[stored != IGNORED]
        if not len(scored):
            raise DataError(f"{labels}: every label is {IGNORED}; expected one for some tokens")
        check_labels(scored, labels)
        return stored.astype(np.int64)

    # Classes, one for each sample
    is_column = stored.shape in ((len(stored),), (len(stored), 1))
    if stored.dtype.kind not in "iub" or not is_column:
        mend = ""
        if stored.ndim > 1:
            mend = "; several labels a sample: a column of 0 and 1 for each class"
        raise DataError(
            f"{labels}: got {_shape(stored)}, expected labels as integers from 0, [N], values as "
            f"floats, [N, ...], masks as integers, [N, height, width], or pictures as uint8, "
            f"[N, height, width, 1 or 3]{mend}"
        )
    return check_labels(stored.reshape(-1), labels)


def read_binary(rows: Array, source: object) -> Array:
    """Return classes [N] of one-hot rows [N, classes], or several labels [N, classes] bool.

    Args:
        rows: labels of 0 and 1 [N, classes].
    """
    if (rows.sum(axis=1) == 1).all():
        log.info("%s: one-hot, taken as %d classes", source, rows.shape[1])
        return rows.argmax(axis=1)
    log.info("%s: 0 and 1, taken as several labels of %d classes", source, rows.shape[1])
    return rows.astype(np.bool_)


def _read_masks(labels: _Sourced) -> NDArray[np.uint8]:
    """Return masks [N, height, width] as uint8.

    Raises:
        DataError: a value is not from 0 to 255.
    """
    stored = labels.values
    low = int(stored.min())
    high = int(stored.max())
    if not 0 <= low <= high < 256:
        raise DataError(f"{labels}: masks from {low} to {high}; expected 0 to 255")
    return stored.astype(np.uint8, copy=False)


def name_binary(sides: Sequence[Split], source: object, padded: bool = False) -> list[Split]:
    """Return splits with 1 in place of 255 in their masks, if 0 and 255 are the only values.

    The values of all splits are pooled, because one split alone may be all white, or have only
    unlabelled pixels (255) beside class 0.

    Args:
        padded: whether the masks have padding of 255.

    Raises:
        ConfigError: padded masks have 0 and 255 as their only values.
    """
    # Collect the values of all masks
    values: set[int] = set()
    for split in sides:
        if split.labels is not None and split.labels.ndim == 3 and split.labels.dtype == np.uint8:
            values.update(np.unique(split.labels).tolist())
    if values != {0, 255}:
        return list(sides)
    if padded:
        raise ConfigError(
            f"preprocess.resize: got letterbox, which pads with 255, and {source} has masks of 0 "
            "and 255; expected masks of 0 and 1"
        )

    # White pixels are class 1
    log.info("%s: masks of 0 and 255, taken as classes 0 and 1", source)
    named = []
    for split in sides:
        if split.labels is not None:
            split = replace(split, labels=np.minimum(split.labels, 1))
        named.append(split)
    return named


def check_labels(labels: Array, source: object) -> NDArray[np.int64]:
    """Return integer labels [N] as int64.

    Raises:
        DataError: a label is not from 0 to 999.
    """
    wide = labels.astype(np.int64)
    if not 0 <= wide.min() <= wide.max() < MAX_CLASSES:
        raise DataError(
            f"{source}: labels from {wide.min()} to {wide.max()}; "
            f"expected 0 to {MAX_CLASSES - 1} at most, or floats for values to predict"
        )
    return wide


def _is_binary(rows: Array) -> bool:
    """Return whether the array is [N, classes] of 0 and 1, with 2 to 1,000 classes."""
    if rows.dtype.kind not in "iubf" or rows.ndim != 2 or not 1 < rows.shape[1] <= MAX_CLASSES:
        return False
    return all(np.isin(part, (0, 1)).all() for part in in_parts(rows))


def _read_groups(groups: _Sourced) -> NDArray[np.int64]:
    names = groups.values
    if names.dtype.kind not in "iuUS" or names.ndim != 1:
        raise DataError(
            f"{groups}: got {_shape(names)}, expected an integer or a name for each sample"
        )
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _shape(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _find_classes(
    arrays: Arrays, config: ArraysConfig, root: Path, highest: int
) -> tuple[tuple[str, ...], bool]:
    """Return the names of the classes, and whether the user or an array names them.

    Raises:
        ConfigError: several arrays may hold the names.
        DataError: the names are not text, more than 1,000 or not all different, or a label has no
            name.
    """
    names = config.classes
    origin = "data.classes"
    stored = pick(arrays, CLASSES, root)
    if names is None and stored is not None:
        array = arrays[stored]()
        origin = stored
        if array.dtype.kind != "U" or array.ndim != 1 or len(array) > MAX_CLASSES:
            raise DataError(
                f"{root}: {stored} is {_shape(array)}; expected at most {MAX_CLASSES} names, as "
                "text"
            )
        if len(set(array.tolist())) != len(array):
            raise DataError(
                f"{root}: {stored} is {_shape(array)}; expected different names as text"
            )
        names = [printable(name) for name in array.tolist()]
    return name_classes(root, highest, names, origin)


def name_classes(
    source: object, highest: int, names: Sequence[str] | None, origin: str = "data.classes"
) -> tuple[tuple[str, ...], bool]:
    """Return the names of the classes, and whether `names` is set; by default, numbers are names.

    >>> name_classes("labels.npy", highest=2, names=None)
    (('0', '1', '2'), False)

    Args:
        source: the file or folder of the labels, for the error.
        highest: the highest label.
        origin: the setting or array that holds `names`, for the error.

    Raises:
        DataError: the highest label has no name.
    """
    if names is None:
        return tuple(map(str, range(max(highest + 1, 2)))), False
    if highest >= len(names):
        raise DataError(
            f"{source}: labels up to {highest}, but {len(names)} class names ({origin}); expected "
            "one for each"
        )
    return tuple(names), True
