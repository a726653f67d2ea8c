"""Passes over the calibration images."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.calibration.methods import find_method
from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core.console import track
from resnet8ptq.data.dataset import Split

Batch = NDArray[np.float32]


def run_pass(stage: str, calibration: Split, config: CalibConfig) -> Iterator[Batch]:
    """Yield the batches [n, H, W, C] of the pass `stage`, with a bar."""
    yield from track(calibration.batches(config.batch_size), f"Calibrating: {stage}")


def run_passes(calibration: Split, config: CalibConfig) -> Iterator[tuple[str, Batch]]:
    """Yield (stage, batch) of the passes that `config.name` takes.

    The stages are `ranges` and, where the method needs it, `histograms`. torch's own observer
    (`histogram`) takes one pass.
    """
    for stage in ["ranges", "histograms"] if find_method(config.name).histogram else ["ranges"]:
        for batch in run_pass(stage, calibration, config):
            yield stage, batch
