"""Pictures that are stored as arrays, resized once and kept in the cache."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.core import cache, code, machine
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data import pictures
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.lazy import AT_ONCE


def shape(data: Dataset, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return a data set of stored pictures resized, and grey, as set.

    Raises:
        ConfigError: its samples are no pictures.
    """
    if not data.test.has_pictures or data.image_shape[2] not in (1, 3):
        sized = preprocess.size is not None
        key, got = ("size", preprocess.size) if sized else ("channels", preprocess.channels)
        raise ConfigError(
            f"preprocess.{key}: got {got}, takes pictures [N, height, width, 1 or 3] of uint8; the "
            f"samples are {data.test.images.dtype} {data.image_shape}"
        )
    train, test = (resize(split, preprocess, cache_root) for split in (data.train, data.test))
    return replace(data, train=train, test=test)


def resize(split: Split, preprocess: PreprocessConfig, cache_root: Path) -> Split:
    """Return a split of pictures [N, H, W, 1 or 3] of uint8, resized and grey as set."""
    key: cache.Key = {
        "images": split.digest,
        "settings": str(sorted(asdict(preprocess).items())),
        "code": code.behind(__name__),
        "pillow": version("pillow"),
    }

    if split.images.shape[3] == 1:
        preprocess = replace(preprocess, channels="grey")  # as they are

    def one(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        squeezed = image[..., 0] if image.shape[2] == 1 else image
        return pictures.to_array(pictures.fit(Image.fromarray(squeezed), preprocess))

    def make(folder: Path) -> None:
        shape = (len(split), *one(split.images[0]).shape)
        whole = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, shape)
        starts = range(0, len(split), AT_ONCE)
        with ThreadPoolExecutor(machine.threads(None)) as pool:
            for start in track(starts, f"Resizing {len(split)} pictures"):
                images = split.images[start : start + AT_ONCE]
                whole[start : start + AT_ONCE] = list(pool.map(one, images))
        whole.flush()

    folder = cache.entry(cache_root, "pictures", key, make)
    return replace(split, images=np.load(folder / "images.npy", mmap_mode="r"), hashes=None)
