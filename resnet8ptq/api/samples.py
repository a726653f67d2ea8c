"""Samples from memory as arrays in the cache, under the hash of their content.

The process that quantizes reads them there, as `data=arrays` does.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.api.keywords import to_words
from resnet8ptq.api.networks import is_of
from resnet8ptq.core import cache, files
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data.sources import SOURCES, find_settings

KIND = "samples_from_memory"  # of the cache's entries
LABELS = "labels"  # in a dict of arrays
SIDES = ("train", "test")
_EXPECTED = (
    "expected (x, y), an array, a dict of arrays by input name, a torch Dataset or DataLoader, a "
    "tf.data.Dataset, {'train': ..., 'test': ...} of these, or a path"
)

Arrays = Mapping[str, NDArray[Any]]  # of some samples, by input name or `LABELS`


def find_samples(data: Any, root: Path) -> tuple[list[str], Arrays]:
    """Return the words that name the samples, and a few samples.

    Args:
        data: a path, the name of a data source, or samples in memory; None for settings only.
        root: the cache's root.

    Raises:
        ConfigError: samples of another form.
        DataError: no sample, or samples of several shapes.
    """
    if data is None:
        return [], {}
    if isinstance(data, str | Path):
        if str(data) in SOURCES:
            return [f"data={data}"], {}
        path = Path(data).expanduser().absolute()
        settings = find_settings(path)
        return [f"data={settings.pop('data')}", *to_words(settings)], {}

    # Write the samples, then find their place by their hash
    with tempfile.TemporaryDirectory(dir=_made(root)) as scratch:
        folder = Path(scratch)
        sides = data if _is_split(data) else {"": data}
        few: Arrays = {}
        for side, samples in sides.items():
            few = _write_samples(samples, folder, f"_{side}" if side else "")
        written = sorted(folder.iterdir())
        key = _hash_files(written)
        target = cache.entry(
            root, kind=KIND, key={"content": key}, make=lambda made: _move(written, made)
        )

    # The keys that name them
    inputs = [name for name in few if name != LABELS]
    files = {name: _file_of(name, inputs) for name in inputs}
    named: dict[str, Any] = {"data.root": target}
    if len(inputs) > 1:
        named["data.inputs"] = files
    if LABELS not in few:
        named["data.labels"] = "none"
    return ["data=arrays", *to_words(named)], few


def _is_split(data: Any) -> bool:
    return isinstance(data, Mapping) and {*data} == {*SIDES}


def _write_samples(data: Any, folder: Path, end: str) -> Arrays:
    """Write the samples of one side as `.npy` files; return a few of them."""
    writers: dict[str, _Writer] = {}
    few: Arrays = {}
    for batch in _batches(data):
        if not few:  # the first batch names the files
            few = {name: values[:2] for name, values in batch.items()}
            inputs = [name for name in batch if name != LABELS]
            for name in batch:
                file = LABELS if name == LABELS else _file_of(name, inputs)
                writers[name] = _Writer(folder / f"{file}{end}.npy")
        if {*batch} != {*few}:
            raise DataError(
                f"data: got a sample with {', '.join(batch)}, expected {', '.join(few)}"
            )
        for name, values in batch.items():
            writers[name].append(values)
    if not writers:
        raise DataError("data: got no sample, expected two or more")
    for writer in writers.values():
        writer.close()
    return few


def _file_of(name: str, inputs: list[str]) -> str:
    """Return the file of an input; a framework's name may hold signs that no file name has."""
    return "x" if len(inputs) == 1 else f"input_{inputs.index(name)}"


class _Writer:
    """An `.npy` file [N, ...] that is written batch by batch."""

    _HEADER_BYTES = 256  # reserved: the number of samples is known at the end

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._file.write(bytes(self._HEADER_BYTES))
        self._shape: tuple[int, ...] | None = None
        self._dtype = np.dtype("f4")
        self._samples = 0

    def append(self, values: NDArray[Any]) -> None:
        """Write a batch [n, ...]; all batches have one shape of a sample, and one dtype."""
        if self._shape is None:
            self._shape = values.shape[1:]
            self._dtype = values.dtype
        if values.shape[1:] != self._shape:
            raise DataError(
                f"data: got samples of the shapes {self._shape} and {values.shape[1:]}, expected "
                "one shape"
            )
        self._file.write(np.ascontiguousarray(values, self._dtype).tobytes())
        self._samples += len(values)

    def close(self) -> None:
        """Write the header, padded with spaces as the format allows."""
        assert self._shape is not None
        described = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._samples, *self._shape),
        }
        text = repr(described).encode("latin1")
        start = np.lib.format.magic(1, 0)
        length = self._HEADER_BYTES - len(start) - 2
        header = start + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"
        self._file.seek(0)
        self._file.write(header)
        self._file.close()


def _batches(data: Any) -> Iterator[Arrays]:
    """Yield samples as arrays [n, ...] by input name.

    Raises:
        ConfigError: data of another form.
    """
    if is_of(data, "torch", "utils.data.DataLoader"):
        yield from map(_named, data)
    elif is_of(data, "torch", "utils.data.Dataset"):
        items = data if hasattr(data, "__iter__") else map(data.__getitem__, range(len(data)))
        for item in items:
            yield _with_batch_axis(_named(item))
    elif hasattr(data, "as_numpy_iterator"):  # tf.data.Dataset
        batched = _is_batched(data.element_spec)
        for item in data.as_numpy_iterator():
            yield _named(item) if batched else _with_batch_axis(_named(item))
    elif isinstance(data, tuple | Mapping) or hasattr(data, "__array__"):
        yield _named(data)
    else:
        raise ConfigError(f"data: got a {type(data).__name__}, {_EXPECTED}")


def _named(item: Any) -> Arrays:
    """Return inputs and labels by name, of x, (x, y), a dict, or (dict, y)."""
    labels = None
    if isinstance(item, tuple | list):
        if len(item) != 2:
            raise ConfigError(f"data: got {len(item)} values in a sample, expected (x, y)")
        item, labels = item
    inputs = item if isinstance(item, Mapping) else {"x": item}
    arrays = {str(name): _to_array(values) for name, values in inputs.items()}
    if labels is not None:
        arrays[LABELS] = _to_array(labels)
    is_batch = all(values.ndim for values in arrays.values())
    counts = {len(values) for values in arrays.values()} if is_batch else set()
    if len(counts) > 1:
        sizes = ", ".join(f"{name} {len(values)}" for name, values in arrays.items())
        raise DataError(f"data: got different numbers of samples ({sizes}), expected equal ones")
    return arrays


def _to_array(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):  # torch's
        values = values.detach().cpu()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"data: got values of {array.dtype}, expected numbers")
    return array


def _with_batch_axis(arrays: Arrays) -> Arrays:
    return {name: values[np.newaxis] for name, values in arrays.items()}


def _is_batched(spec: Any) -> bool:
    """Return whether a tf.data.Dataset yields batches.

    Labels tell it by their rank; without labels, a free first axis does.
    """
    if isinstance(spec, tuple) and len(spec) == 2:
        return spec[1].shape.rank != 0
    first = next(iter(spec.values())) if isinstance(spec, Mapping) else spec
    return first.shape.rank is not None and first.shape.rank > 0 and first.shape[0] is None


def _hash_files(paths: Iterable[Path]) -> str:
    hashes = {path.name: files.sha256(path) for path in paths}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _move(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        shutil.move(path, folder / path.name)


def _made(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    return root
