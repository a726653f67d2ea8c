"""Ten samples with what the network returns for them: what checks a port of the model."""

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
MANY, MANY_BYTES = 1000, 2**26  # what another version of a runtime is compared on
TOLERANCE = 0.01  # of an output's largest value: kernels of other CPUs round differently


@dataclass(frozen=True)
class Vectors:
    """Samples, as stored and as the network takes them, and the outputs, one sample at a time.

    Attributes:
        samples: [n, ...] as stored; the same as `inputs` where only those are at hand.
        inputs: [n, ...].
        outputs: each [n, ...]; where the number of rows depends on the sample, all rows.
        tolerances: of each output, absolute.
        preprocessing, layout: what makes inputs of samples, see `Split`.
        raw: integers that go in and come out, where the file takes them, by name.
    """

    samples: NDArray[Any]
    inputs: NDArray[np.float32]
    outputs: tuple[NDArray[np.float32], ...]
    tolerances: tuple[float, ...]
    preprocessing: Preprocessing = RAW
    layout: tuple[int, ...] | None = None
    raw: dict[str, NDArray[Any]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write them as arrays: `samples`, `inputs`, `output_0`, ..., `tolerances`, and `raw`."""
        outputs = {f"output_{number}": found for number, found in enumerate(self.outputs)}
        np.savez_compressed(
            path,
            allow_pickle=False,
            samples=self.samples,
            inputs=self.inputs,
            tolerances=np.array(self.tolerances),
            **outputs,
            **self.raw,
        )


def of_split(split: Split, predictor: Predictor, count: int = COUNT) -> Vectors:
    """Return `count` samples from all over a split; fewer where it has fewer."""
    places = np.unique(np.linspace(0, len(split) - 1, count).astype(np.int64))
    samples = np.asarray(split.images[places])
    return _run(samples, split.prepare(samples), predictor, split.preprocessing, split.layout)


def many_of_split(split: Split, predictor: Predictor) -> Vectors:
    """Return as many samples as another version of a runtime is compared on."""
    size = 4 * int(np.prod(split.input_shape))
    return of_split(split, predictor, max(COUNT, min(MANY, MANY_BYTES // size)))


def of_inputs(inputs: NDArray[np.float32], predictor: Predictor) -> Vectors:
    """Return network inputs [n, ...], of which the samples are not at hand."""
    return _run(inputs, inputs, predictor, RAW, None)


def _run(
    samples: NDArray[Any],
    inputs: NDArray[np.float32],
    predictor: Predictor,
    preprocessing: Preprocessing,
    layout: tuple[int, ...] | None,
) -> Vectors:
    found = [predictor.predict(inputs[n : n + 1]) for n in range(len(inputs))]
    # The interpreter of TFLite may return its own memory.
    outputs = tuple(
        np.concatenate([np.array(o) for o in each]) for each in zip(*found, strict=True)
    )
    tolerances = tuple(TOLERANCE * float(np.abs(each).max(initial=0)) for each in outputs)
    return Vectors(samples, inputs, outputs, tolerances, preprocessing, layout)
