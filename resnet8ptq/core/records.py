"""Samples of several inputs: records of a structured array, with one field for each input.

A structured array [N] is indexed, sliced, joined and mapped from a file like any other array, so
most code does not depend on the number of inputs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]


def pack(arrays: Mapping[str, Array], path: Path | None = None) -> Array:
    """Return arrays [N, ...] by name as records [N], with the fields in the same order.

    With a path, the records are written to an .npy file there and mapped, so that they may exceed
    the memory.

    >>> records = pack({"ids": np.ones((2, 3), np.int64), "mask": np.ones((2, 3), np.bool_)})
    >>> records.shape, records.dtype.names
    ((2,), ('ids', 'mask'))
    """
    fields = [(name, values.dtype, values.shape[1:]) for name, values in arrays.items()]
    count = len(next(iter(arrays.values())))
    if path is None:
        records = np.empty(count, fields)
    else:  # fill the file, whose pages the system writes out when memory is short
        records = np.lib.format.open_memmap(path, "w+", np.dtype(fields), (count,))
    for name, values in arrays.items():
        records[name] = values
    return records


def unpack(samples: Array) -> dict[str, Array]:
    """Return the fields of records [N] as contiguous arrays [N, ...] by name.

    The arrays are copies. Without a copy, the field of a single record would count as contiguous,
    although its stride is the record's size. torch refuses such a stride unless it is a multiple of
    the value's size.
    """
    return {name: samples[name].copy() for name in names_of(samples.dtype)}


def names_of(dtype: DTypeLike) -> tuple[str, ...]:
    """Return the names of the fields; empty for an array of numbers.

    >>> names_of(np.float32), names_of([("ids", "i8", 5), ("mask", "?", 5)])
    ((), ('ids', 'mask'))
    """
    return np.dtype(dtype).names or ()


def find_mask(dtype: DTypeLike) -> str | None:
    """Return the field that masks padding: `attention_mask`, else the only one named `...mask`.

    Otherwise, the result is None. Only fields [N, length] count.
    """
    masks = []
    for name in names_of(dtype):
        field = np.dtype(dtype)[name]
        is_vector = field.ndim == 1 and field.base.kind in "biuf"
        if is_vector and name.lower().endswith("mask"):
            masks.append(name)
    if "attention_mask" in masks:
        return "attention_mask"
    return masks[0] if len(masks) == 1 else None


def feed(samples: Array, names: Sequence[str]) -> dict[str, Array]:
    """Return samples by input name, as ONNX Runtime and MLflow take them.

    >>> pictures = np.zeros((2, 3, 8, 8), np.float32)
    >>> {name: array.shape for name, array in feed(pictures, ["image"]).items()}
    {'image': (2, 3, 8, 8)}
    >>> texts = pack({"ids": np.ones((2, 5), np.int64), "mask": np.ones((2, 5), np.bool_)})
    >>> {name: array.shape for name, array in feed(texts, ["ids"]).items()}
    {'ids': (2, 5)}

    Args:
        samples: records, or the values [N, ...] of a single input.
        names: the names of a network's inputs, which may be fewer than the records' fields.
    """
    if not names_of(samples.dtype):
        return dict.fromkeys(names[:1], samples)
    return {name: np.ascontiguousarray(samples[name]) for name in names}
