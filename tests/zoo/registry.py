"""The registry of the zoo: structures that have hurt people, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

Array = NDArray[Any]
Samples = Mapping[str, Array]  # [n, ...] by input name
LEAST_DB = 25.0  # SQNR of the worst output; what 8 bits cost these networks lies above it


@dataclass(frozen=True)
class Network:
    """A small network with fixed weights.

    Attributes:
        model: an ONNX model, a torch module or a Keras model.
        samples: the samples that are reported, by input name.
        file: the network as another program has quantized it, for backend=file.
    """

    model: Any
    samples: Samples
    file: onnx.ModelProto | None = None


@dataclass(frozen=True)
class Structure:
    """A structure from public reports, or a variation of one.

    Attributes:
        reports: where it was found; empty for a variation.
        build: makes the network.
        flows: flows that it runs through besides those of every structure.
        least_db: the limit, where 8 bits cost more than usual; the builder says why.
    """

    name: str
    reports: str
    build: Callable[[], Network]
    flows: tuple[str, ...] = ()
    least_db: float = LEAST_DB


STRUCTURES: dict[str, Structure] = {}


def structure(
    reports: str = "", flows: tuple[str, ...] = (), least_db: float = LEAST_DB
) -> Callable[[Callable[[], Network]], Callable[[], Network]]:
    """Register a function that builds a network, under its own name."""

    def register(build: Callable[[], Network]) -> Callable[[], Network]:
        name = build.__name__
        STRUCTURES[name] = Structure(name, reports, build, flows, least_db)
        return build

    return register


class Draw:
    """Draws weights and samples, the same each time."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def weights(self, *shape: int, scale: float = 0.2) -> Array:
        """Return normal weights."""
        return (scale * self._random.normal(size=shape)).astype(np.float32)

    def samples(self, *shape: int, count: int = 20) -> Array:
        """Return values from -1 to 1, [count, *shape]."""
        return self._random.uniform(-1, 1, (count, *shape)).astype(np.float32)

    def integers(self, high: int, *shape: int, count: int = 20) -> Array:
        """Return integers from 0 to high - 1, [count, *shape]."""
        return self._random.integers(0, high, (count, *shape))
