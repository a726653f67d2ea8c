"""The inputs and outputs of a model file, read from the file if possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resnet8ptq.core.records import feed, names_of
from resnet8ptq.core.text import printable
from resnet8ptq.deploy.vectors import Vectors


@dataclass(frozen=True)
class Tensor:
    """An input or output of a file."""

    name: str
    shape: tuple[int | str, ...]  # with the batch axis; `n` or a name for a free size
    dtype: str
    scale: float | None = None  # real = (integer - zero_point) * scale; None for floats
    zero_point: int | None = None

    @property
    def shown(self) -> str:
        """The shape in brackets."""
        return f"[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs, in the network's order."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def read(path: Path, vectors: Vectors, names: Sequence[str]) -> Interface:
    """Return the inputs and outputs of a file.

    Args:
        names: names of the outputs, for formats without useful names (all but ONNX).
    """
    if path.suffix in (".onnx", ".ort"):
        from resnet8ptq.graph.session import open_session

        session = open_session(str(path), 1)
        inputs = session.get_inputs()
        outputs = session.get_outputs()
        return Interface(tuple(map(_of_onnx, inputs)), tuple(map(_of_onnx, outputs)))
    if path.suffix == ".tflite":
        from resnet8ptq.backends.tflite.predictor import open_interpreter

        interpreter = open_interpreter(path.read_bytes(), 1)
        (taken,), details = interpreter.get_input_details(), interpreter.get_output_details()
        pairs = zip(details, names, strict=True)
        return Interface((_of_tflite(taken, taken["name"]),), tuple(_of_tflite(*p) for p in pairs))
    shapes = [("n", *output.shape[1:]) for output in vectors.outputs]
    floats = tuple(Tensor(*pair, "float32") for pair in zip(names, shapes, strict=True))
    inputs = feed(vectors.inputs, names_of(vectors.inputs.dtype) or ["input"])
    taken = (Tensor(n, ("n", *v.shape[1:]), v.dtype.name) for n, v in inputs.items())
    return Interface(tuple(taken), floats)


def _of_onnx(tensor: Any) -> Tensor:
    shape = tuple(
        size if isinstance(size, int) else "n" if axis == 0 else printable(str(size))
        for axis, size in enumerate(tensor.shape)
    )
    dtype = tensor.type.removeprefix("tensor(").removesuffix(")")
    return Tensor(tensor.name, shape, "float32" if dtype == "float" else dtype)


def _of_tflite(detail: Any, name: str) -> Tensor:
    dtype = np.dtype(detail["dtype"]).name
    scale, zero_point = detail["quantization"]
    integers = () if dtype == "float32" else (float(scale), int(zero_point))
    return Tensor(name, tuple(map(int, detail["shape"])), dtype, *integers)
