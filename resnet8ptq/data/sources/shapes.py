"""The embedded data set: pictures that the package draws itself."""

from pathlib import Path

from resnet8ptq.config.schema import DataConfig, PreprocessConfig
from resnet8ptq.core import cache
from resnet8ptq.data.dataset import SIDES, Dataset, Side, keep
from resnet8ptq.data.shapes import pictures


def load(config: DataConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the pictures, drawn once into the cache."""
    keys: dict[Side, cache.Key] = {side: {"split": side} for side in SIDES}
    source = "resnet8ptq.data.shapes"
    return keep("shapes", pictures.CLASS_NAMES, source, pictures.draw, keys, __name__, cache_root)
