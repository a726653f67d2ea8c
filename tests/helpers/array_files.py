"""Arrays of a user, and their data set."""

import io
from pathlib import Path

import numpy as np

from resnet8ptq.config.schema import ArraysConfig, PreprocessConfig
from resnet8ptq.data import locate, registry
from resnet8ptq.data.sources import array_files
from tests.helpers.arrays import whole

COUNT = 12
LABELS = np.arange(COUNT) % 3
INPUTS = np.random.default_rng(0).integers(-128, 128, (COUNT, 5, 2), dtype=np.int8)


def unpack(content: bytes, folder: Path):
    array_files.unpack_idx(io.BytesIO(content), len(content), folder / "idx.npy")
    return np.load(folder / "idx.npy")


def read(root, **settings):
    config = locate.find_data(ArraysConfig(root=str(root), **settings))
    return registry.read(config, PreprocessConfig(), root.parent / "cache")


def same_samples(data, inputs=INPUTS, labels=LABELS):
    result = whole(data)
    order = np.lexsort(inputs.reshape(len(inputs), -1).T)
    np.testing.assert_array_equal(result[0], inputs[order])
    np.testing.assert_array_equal(result[1], labels[order])


IDS = np.random.default_rng(1).integers(0, 90, (COUNT, 7))
MASK = (np.arange(7) < 1 + np.arange(COUNT)[:, None] % 7).astype(np.int32)
