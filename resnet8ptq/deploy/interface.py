"""What a model file takes and returns, read from the file itself where it says."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resnet8ptq.deploy.vectors import Vectors


@dataclass(frozen=True)
class Tensor:
    """An input or output of a file.

    Attributes:
        shape: with the batch axis; `n` where a size is free.
        scale, zero_point: `real = (integer - zero_point) * scale`; None for floats.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    scale: float | None = None
    zero_point: int | None = None

    @property
    def shown(self) -> str:
        """The shape in brackets."""
        return f"[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Interface:
    """The one input, and the outputs in the network's order."""

    taken: Tensor
    given: tuple[Tensor, ...]


def read(path: Path, vectors: Vectors, names: Sequence[str]) -> Interface:
    """Return what a file takes and returns.

    Args:
        names: of the outputs, for files that do not name them well: all but ONNX.
    """
    if path.suffix in (".onnx", ".ort"):
        from resnet8ptq.graph.session import open_session

        session = open_session(str(path), 1)
        (taken,), given = session.get_inputs(), session.get_outputs()
        return Interface(_of_onnx(taken), tuple(map(_of_onnx, given)))
    if path.suffix == ".tflite":
        from resnet8ptq.backends.tflite.predictor import open_interpreter

        interpreter = open_interpreter(path.read_bytes(), 1)
        (taken,), given = interpreter.get_input_details(), interpreter.get_output_details()
        pairs = zip(given, names, strict=True)
        return Interface(_of_tflite(taken), tuple(_of_tflite(each, name) for each, name in pairs))
    shapes = [("n", *found.shape[1:]) for found in vectors.outputs]
    floats = tuple(Tensor(*pair, "float32") for pair in zip(names, shapes, strict=True))
    taken = Tensor("input", ("n", *vectors.inputs.shape[1:]), vectors.inputs.dtype.name)
    return Interface(taken, floats)


def _of_onnx(found: Any) -> Tensor:
    shape = tuple(size if isinstance(size, int) else "n" for size in found.shape)
    dtype = found.type.removeprefix("tensor(").removesuffix(")")
    return Tensor(found.name, shape, "float32" if dtype == "float" else dtype)


def _of_tflite(found: Any, name: str | None = None) -> Tensor:
    dtype = np.dtype(found["dtype"]).name
    scale, zero_point = found["quantization"]
    shape = tuple(map(int, found["shape"]))
    if dtype == "float32":
        return Tensor(name or found["name"], shape, dtype)
    return Tensor(name or found["name"], shape, dtype, float(scale), int(zero_point))
