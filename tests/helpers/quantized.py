"""Quantized models of the embedded data set, on disk."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Artifact, Predictor
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.data.dataset import Dataset
from tests.helpers.factories import THREADS, quantizer_of

TESTED = 500  # images
Probabilities = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Cell:
    """A quantized model on disk, and how to read it."""

    config: RunConfig
    artifact: Artifact
    folder: Path
    data: Dataset

    @cached_property
    def predictor(self) -> Predictor:
        """As a fresh process would: nothing but the config and the file on disk."""
        return quantizer_of(self.config).load(self.artifact.path, THREADS)

    @cache  # noqa: B019  (cells are kept as long as the tests run)
    def predict(self, batch_size: int = 256, images: int = TESTED) -> Probabilities:
        batches = self.data.test.take(np.arange(images)).batches(batch_size)
        return np.concatenate([self.predictor.predict(batch)[0] for batch in batches])


Quantize = Callable[..., Cell]
Write = Callable[[RunConfig, Path], Artifact]
