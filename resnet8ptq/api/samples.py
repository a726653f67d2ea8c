"""Writes samples from memory as `.npy` files to the cache, under the hash of their content.

The process that quantizes reads the files with `data=arrays`.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.api.keywords import to_words
from resnet8ptq.api.networks import is_of
from resnet8ptq.core import cache, files
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data.sources import SOURCES, find_settings
from resnet8ptq.data.sources.array_names import LABELS as USUAL_LABELS
from resnet8ptq.data.sources.arrays import FROM_MEMORY

LABELS = "labels"  # the key of the labels in a dict of arrays
SIDES = ("train", "test")
_EXPECTED = (
    "expected (x, y), an array, a dict of arrays by input name, a torch Dataset or DataLoader, a "
    "tf.data.Dataset, {'train': ..., 'test': ...} of these, or a path"
)

Arrays = Mapping[str, NDArray[Any]]  # [n, ...] for n samples, by input name or `LABELS`


def find_samples(data: Any, root: Path, takes: Sequence[str] = ()) -> tuple[list[str], Arrays]:
    """Return the command-line words that name the samples, and a few of the samples in memory.

    Args:
        data: a path, the name of a data source, or samples in memory; None for no words.
        root: the cache's root.
        takes: names of the network's inputs, in order; empty if they are not known.

    Raises:
        ConfigError: the data have none of the forms in `_EXPECTED`, an array has an unsuitable
            dtype, or no source reads the path.
        DataError: a loader or data set is empty, the samples differ in shape, type or names, or the
            arrays of a batch differ in length.
    """
    if data is None:
        return [], {}
    if isinstance(data, str | Path):
        if str(data) in SOURCES:
            return [f"data={data}"], {}
        path = files.expand(data).absolute()
        settings = find_settings(path)
        return [f"data={settings.pop('data')}", *to_words(settings)], {}

    # Write the samples, then move them to the entry of their hash
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        folder = Path(scratch)
        few: Arrays = {}
        if _is_split(data):
            for side in SIDES:
                few = _write_samples(data[side], folder, end=f"_{side}", takes=takes, named_as=few)
        else:
            few = _write_samples(data, folder, end="", takes=takes)
        written = sorted(folder.iterdir())
        key = _hash_files(written)
        target = cache.entry(
            root, kind=FROM_MEMORY, key={"content": key}, make=lambda made: _move(written, made)
        )

    # Name the entry's files in settings
    named: dict[str, Any] = {"data.root": target}
    stems = _name_files(few)
    if LABELS in stems:
        del stems[LABELS]
    else:
        named["data.labels"] = "none"
    if len(stems) > 1:
        named["data.inputs"] = stems
    return ["data=arrays", *to_words(named)], few


def _is_split(data: Any) -> bool:
    """Return whether the samples are split into training and test samples.

    Raises:
        ConfigError: one of the two is missing, or stands beside another key.
    """
    if not isinstance(data, Mapping) or {*SIDES}.isdisjoint(data):
        return False
    if {*data} != {*SIDES}:
        raise ConfigError(f"data: got {', '.join(map(str, data))}, expected train and test")
    return True


def _write_samples(
    data: Any, folder: Path, end: str, takes: Sequence[str], named_as: Arrays | None = None
) -> Arrays:
    """Write the samples of one side as `.npy` files; return a few of them.

    Args:
        end: the end of the files' stems, such as `_train`.
        named_as: a few samples of the side that was written first, whose inputs must have the same
            names; None or empty for the first side.
    """
    writers: dict[str, _Writer] = {}
    few: Arrays = {}
    with ExitStack() as opened:
        for batch in _batches(data, takes):
            _check_counts(batch)
            if not few:  # the first batch names the files
                few = {name: values[:2] for name, values in _in_order(batch, named_as).items()}
                for name, stem in _name_files(few).items():
                    file = opened.enter_context((folder / f"{stem}{end}.npy").open("wb"))
                    writers[name] = _Writer(file, name)
            if {*batch} != {*few}:
                raise DataError(
                    f"data: got a sample with {', '.join(batch)}, expected {', '.join(few)}"
                )
            for name, values in batch.items():
                writers[name].append(values)

        # The headers follow at the end, when the number of samples is known
        if not writers:
            raise DataError("data: got no sample, expected some")
        for writer in writers.values():
            writer.finish()
    return few


def _in_order(batch: Arrays, named_as: Arrays | None) -> Arrays:
    """Return the arrays of a batch, with the inputs in the order of `named_as`.

    Raises:
        DataError: the two sides name their inputs differently, or only the first has labels.
    """
    if not named_as:
        return batch
    if LABELS in named_as and LABELS not in batch:
        raise DataError(
            "data: got test samples without labels, expected some beside the training's"
        )
    inputs = [name for name in named_as if name != LABELS]
    own = [name for name in batch if name != LABELS]
    if {*own} != {*inputs}:
        raise DataError(
            f"data: got test samples with {', '.join(own)}, expected {', '.join(inputs)}, the "
            "inputs of the training samples"
        )
    ordered = {name: batch[name] for name in inputs}
    if LABELS in batch:
        ordered[LABELS] = batch[LABELS]
    return ordered


def _name_files(batch: Arrays) -> dict[str, str]:
    """Return the file stem of each input and of the labels, by name.

    Several inputs are numbered, because their names may contain characters that file names cannot.
    """
    inputs = [name for name in batch if name != LABELS]
    stems = {name: f"input_{number}" for number, name in enumerate(inputs)}
    if len(inputs) == 1:
        stems[inputs[0]] = "x"
    if LABELS in batch:
        stems[LABELS] = LABELS
    return stems


class _Writer:
    """An `.npy` file [N, ...] that is written batch by batch."""

    _HEADER_BYTES = 256  # reserved, as the number of samples is known only at the end

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Begin a file; `name` names its samples in errors."""
        self._name = name
        self._texts: list[NDArray[Any]] = []  # joined at the end, when the width is known
        self._file = file
        self._file.write(bytes(self._HEADER_BYTES))
        self._shape: tuple[int, ...] | None = None
        self._dtype = np.dtype("f4")
        self._samples = 0

    def append(self, values: NDArray[Any]) -> None:
        """Write a batch [n, ...]; texts are kept until the end.

        Raises:
            DataError: the samples differ from the first batch in shape, mix texts and numbers, or
                have a dtype that cannot be cast safely to that of the first batch.
        """
        if self._shape is None:
            self._shape = values.shape[1:]
            self._dtype = values.dtype
        if values.shape[1:] != self._shape:
            raise DataError(
                f"data: {self._name}: got samples of the shapes {self._shape} and "
                f"{values.shape[1:]}, expected one shape; pad them"
            )

        # The width of texts is known only at the end
        if values.dtype.kind == self._dtype.kind == "U":
            self._texts.append(values)
            return
        is_text = "U" in (values.dtype.kind, self._dtype.kind)
        if is_text or not np.can_cast(values.dtype, self._dtype):
            raise DataError(
                f"data: {self._name}: got {self._dtype}, then {values.dtype}, expected one type"
            )
        self._file.write(np.ascontiguousarray(values, self._dtype).tobytes())
        self._samples += len(values)

    def finish(self) -> None:
        """Write the header, padded with spaces as the format allows; for texts, the whole file."""
        assert self._shape is not None
        self._file.seek(0)
        if self._texts:
            self._file.truncate()
            np.save(self._file, np.concatenate(self._texts))
            return

        # Fill the bytes that were reserved
        described = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._samples, *self._shape),
        }
        text = repr(described).encode("latin1")
        start = np.lib.format.magic(1, 0)
        length = self._HEADER_BYTES - len(start) - 2
        header = start + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"
        self._file.write(header)


def _batches(data: Any, takes: Sequence[str]) -> Iterator[Arrays]:
    """Yield samples as arrays [n, ...], by input name or `LABELS`.

    Raises:
        ConfigError: the data have none of the forms in `_EXPECTED`, or an array has an unsuitable
            dtype.
        DataError: the samples of a batch have several shapes.
    """
    if is_of(data, "torch", "utils.data.DataLoader"):
        for batch in data:
            yield _named(batch, takes)
    elif is_of(data, "torch", "utils.data.Dataset"):
        items = data
        if not hasattr(data, "__iter__"):
            items = map(data.__getitem__, range(len(data)))
        for item in items:
            yield _with_batch_axis(_named(item, takes))
    elif hasattr(data, "as_numpy_iterator"):  # a tf.data.Dataset
        batched = _is_batched(data.element_spec)
        for item in data.as_numpy_iterator():
            arrays = _named(item, takes)
            if not batched:
                arrays = _with_batch_axis(arrays)
            yield arrays
    elif isinstance(data, tuple | Mapping) or hasattr(data, "__array__"):
        yield _named(data, takes)
    else:
        raise ConfigError(f"data: got a {type(data).__name__}, {_EXPECTED}")


def _named(item: Any, takes: Sequence[str]) -> Arrays:
    """Return inputs and labels by name, from x, (x, y), a dict, or (dict, y).

    If x is a tuple or list of several inputs, they get the names of the network's inputs. A dict
    may hold the labels under a usual name, such as `y`, if no input of the network has that name.

    Raises:
        ConfigError: the item has none of these forms, its inputs cannot be named, or an array
            has an unsuitable dtype.
        DataError: the values of an array have several shapes.
    """
    # Separate the labels from the inputs
    labels = None
    if isinstance(item, tuple | list) and len(item) == 1:  # a loader may yield x alone
        [item] = item
    elif isinstance(item, tuple | list):
        if len(item) != 2:
            raise ConfigError(
                f"data: got {len(item)} values in a sample, expected (x, y), or ({{name: x, ...}}, "
                "y) for several inputs"
            )
        item, labels = item

    # Name the inputs
    if _is_several(item, labels, inputs=len(takes)):
        if len(takes) < len(item):
            raise ConfigError(
                f"data: got {len(item)} inputs without names, expected a dict of arrays by the "
                "names of the network's inputs"
            )
        item = dict(zip(takes, item, strict=False))
    inputs = dict(item) if isinstance(item, Mapping) else {"x": item}
    if labels is None and LABELS not in inputs:
        usual = [name for name in inputs if name in USUAL_LABELS and name not in takes]
        if len(usual) == 1 and len(inputs) > 1:
            labels = inputs.pop(usual[0])

    # Turn all into arrays
    arrays = {}
    for name, values in inputs.items():
        arrays[str(name)] = _to_array(values, str(name))
    if labels is not None:
        arrays[LABELS] = _to_array(labels, LABELS)
    return arrays


def _check_counts(batch: Arrays) -> None:
    """Raise `DataError` if an array of a batch has no axis, or the numbers of samples differ."""
    counts = {values.shape[:1] for values in batch.values()}
    if len(counts) > 1 or () in counts:
        sizes = ", ".join(f"{name} {[*values.shape]}" for name, values in batch.items())
        raise DataError(f"data: got different numbers of samples ({sizes}), expected equal ones")


def _is_several(item: Any, labels: Any, inputs: int) -> bool:
    """Return whether this is a tuple or list of several inputs, not of samples or numbers."""
    if not isinstance(item, tuple | list) or len(item) < 2:
        return False
    if not all(hasattr(value, "shape") for value in item):
        return False
    # A list with one value for each label may hold samples, if the network has one input.
    may_be_samples = isinstance(item, list) and np.ndim(labels) > 0 and len(item) == len(labels)
    return not may_be_samples or (inputs > 1 and inputs == len(item))


def _to_array(values: Any, name: str) -> NDArray[Any]:
    """Return an array of numbers, or of texts for labels.

    Args:
        name: the name of the input, or `LABELS`.

    Raises:
        ConfigError: the values are neither real numbers nor, for labels, texts.
        DataError: the values have several shapes.
    """
    if hasattr(values, "detach"):  # a tensor of torch
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # numpy has no bfloat16
            values = values.float()

    # Arrays of several shapes do not make one array
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(
            f"data: {name}: got samples of several shapes, expected one shape; pad them"
        ) from error

    # Only labels may be texts
    accepted = "biuf"
    if name == LABELS:
        accepted = "biufU"
        if array.dtype.kind == "O" and all(isinstance(label, str) for label in array.flat):
            array = array.astype(str)  # a column of pandas
    if array.dtype.kind not in accepted:
        raise ConfigError(f"data: {name}: got values of {array.dtype}, expected numbers")
    return array


def _with_batch_axis(arrays: Arrays) -> Arrays:
    return {name: values[np.newaxis] for name, values in arrays.items()}


def _is_batched(spec: Any) -> bool:
    """Return whether a tf.data.Dataset yields batches.

    The first axes of a batch are free, or have one size for all inputs and labels. A data set of
    one array with a fixed first axis yields single samples.
    """
    import tensorflow as tf

    sizes = []  # sizes of the first axis
    for part in tf.nest.flatten(spec):
        if part.shape.rank == 0:
            return False
        if part.shape.rank is not None:
            sizes.append(part.shape[0])
    different = set(sizes)
    return different <= {None} or (len(different) == 1 and len(sizes) > 1)


def _hash_files(paths: Iterable[Path]) -> str:
    hashes = {path.name: files.sha256(path) for path in paths}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _move(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        shutil.move(path, folder / path.name)
