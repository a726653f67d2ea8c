"""CIFAR-10's files as Python 2 wrote the published ones.

Python 3 pickles strings and arrays differently, so that its own pickler cannot stand in.
"""

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np

from resnet8ptq.data.sources import cifar10

WIDTH = 3072


def pickle_published(value: object) -> bytes:
    """Pickle as Python 2 and numpy 1 did at protocol 2."""
    return b"\x80\x02" + _encode(value) + b"."


def _encode(value: Any) -> bytes:
    match value:
        case dict():
            items = b"".join(_encode(key) + _encode(item) for key, item in value.items())
            return b"}(" + items + b"u"
        case list():
            return b"](" + b"".join(map(_encode, value)) + b"e"
        case str():
            return _encode_string(value.encode("latin1"))
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return b"J" + struct.pack("<i", value)
        case np.ndarray():
            shape = b"(" + b"".join(map(_encode, value.shape)) + b"t"
            kind = value.dtype.str.encode()
            dtype = b"cnumpy\ndtype\n" + _encode_string(kind[1:]) + b"K\x00K\x01\x87R"
            unset = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
            dtype += b"(K\x03" + _encode_string(kind[:1]) + unset + b"tb"
            empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
            return (
                empty
                + b"(K\x01"
                + shape
                + dtype
                + b"\x89"
                + _encode_string(value.tobytes())
                + b"tb"
            )
        case _:
            return pickle.dumps(value, protocol=2)[2:-1]


def _encode_string(raw: bytes) -> bytes:
    if len(raw) < 256:
        return b"U" + bytes([len(raw)]) + raw
    return b"T" + struct.pack("<i", len(raw)) + raw


def make_batch(count: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "batch_label": "training batch",
        "labels": [number % 10 for number in range(count)],
        "data": random.integers(0, 256, (count, WIDTH), dtype=np.uint8),
        "filenames": [f"{number}.png" for number in range(count)],
    }


def write_folder(folder: Path, train: int = 4, test: int = 3) -> Path:
    """Write a small copy of the published folder: `train` images in each of the five batches."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(cifar10.BATCHES["train"]):
        (folder / name).write_bytes(pickle_published(make_batch(train, seed=number)))
    (folder / "test_batch").write_bytes(pickle_published(make_batch(test, seed=99)))
    return folder


def read_test(folder: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    (folder / "test_batch").write_bytes(content)
    return cifar10.read_split(folder, "test")
