"""Test vectors: samples with the model's outputs, to check a port of the model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.preprocessing import RAW, Preprocessing

FILE = "test_vectors.npz"
COUNT = 10
# The most samples for a comparison with another version of a runtime, and their most bytes
MANY = 1000
MANY_BYTES = 2**26
TOLERANCE = 0.01  # share of an output's largest value, since other CPUs' kernels round differently


@dataclass(frozen=True)
class Vectors:
    """Stored samples, the network inputs made from them, and the outputs of one sample at a time.

    Samples with several inputs are records, see `core.records`.
    """

    samples: NDArray[Any]  # [n, ...]; the same array as `inputs` if the data are missing
    inputs: NDArray[Any]  # [n, ...]
    outputs: tuple[NDArray[np.float32], ...]  # [n, ...]; or more rows, if a sample has several
    tolerances: tuple[float, ...]  # the absolute tolerance of each output
    preprocessing: Preprocessing = RAW  # converts samples to inputs, with `layout`; see `Split`
    layout: tuple[int, ...] | None = None
    raw: dict[str, NDArray[Any]] = field(default_factory=dict)  # integers of the file, by name

    def save(self, path: Path) -> None:
        """Write `samples`, `inputs`, `tolerances`, `output_0`, ..., and the arrays in `raw`."""
        outputs = {f"output_{number}": output for number, output in enumerate(self.outputs)}
        np.savez_compressed(
            path,
            allow_pickle=False,
            samples=self.samples,
            inputs=self.inputs,
            tolerances=np.array(self.tolerances),
            **outputs,
            **self.raw,
        )


def of_split(split: Split, predictor: Predictor, many: bool = False) -> Vectors:
    """Return vectors of evenly spread samples: at most `COUNT`, or with `many` at most `MANY`."""
    count = COUNT
    if many:
        count = max(COUNT, min(MANY, MANY_BYTES // split.sample_bytes))
    samples = np.asarray(split.spaced(count).stored)
    inputs = split.prepare(samples)
    return predict(
        samples, inputs, predictor, preprocessing=split.preprocessing, layout=split.layout
    )


def predict(
    samples: NDArray[Any],
    inputs: NDArray[Any],
    predictor: Predictor,
    preprocessing: Preprocessing = RAW,
    layout: tuple[int, ...] | None = None,
) -> Vectors:
    """Return the vectors of inputs [n, ...], which the model runs one sample at a time."""
    runs = [predictor.predict(inputs[n : n + 1]) for n in range(len(inputs))]

    # Join the samples of each output; its largest value sets the tolerance
    outputs = []
    tolerances = []
    for parts in zip(*runs, strict=True):
        output = np.concatenate(parts)
        outputs.append(output)
        tolerances.append(TOLERANCE * float(np.abs(output).max(initial=0)))
    return Vectors(
        samples,
        inputs,
        tuple(outputs),
        tolerances=tuple(tolerances),
        preprocessing=preprocessing,
        layout=layout,
    )
