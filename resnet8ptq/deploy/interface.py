"""The inputs and outputs of a model file, read from the file if possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.records import feed, names_of
from resnet8ptq.core.text import printable
from resnet8ptq.deploy.vectors import Vectors


@dataclass(frozen=True)
class FileTensor:
    """An input or output of a file."""

    name: str
    shape: tuple[int | str, ...]  # with the batch axis; `n` or a name for a free size
    dtype: str
    scale: float | None = None  # real = (integer - zero_point) * scale; None if not quantized
    zero_point: int | None = None

    @property
    def shown(self) -> str:
        """The shape in brackets."""
        return f"[{', '.join(map(str, self.shape))}]"

    @property
    def ends(self) -> str:
        """The smallest and the largest value of the integer dtype, as text."""
        info = np.iinfo(self.dtype)
        return f"{info.min}, {info.max}"


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs, in the network's order."""

    inputs: tuple[FileTensor, ...]
    outputs: tuple[FileTensor, ...]


def read_interface(path: Path, vectors: Vectors, names: Sequence[str]) -> Interface:
    """Return the inputs and outputs of a file.

    Args:
        vectors: the test vectors of the file.
        names: names of the outputs, for formats without useful names (all but ONNX and ORT).
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
        [detail] = interpreter.get_input_details()
        only_input = _of_tflite(detail, detail["name"])
        outputs = zip(interpreter.get_output_details(), names, strict=True)
        returned = [_of_tflite(detail, name) for detail, name in outputs]
        return Interface((only_input,), tuple(returned))

    # Other files have neither names nor shapes, so the test vectors give both
    taken = []
    for name, values in feed(vectors.inputs, names_of(vectors.inputs.dtype) or ["input"]).items():
        taken.append(FileTensor(name, _free(values), values.dtype.name))
    returned = []
    for name, values in zip(names, vectors.outputs, strict=True):
        returned.append(FileTensor(name, _free(values), values.dtype.name))
    return Interface(tuple(taken), tuple(returned))


def _free(values: NDArray[Any]) -> tuple[int | str, ...]:
    """Return a shape whose batch axis is free."""
    return ("n", *values.shape[1:])


def _of_onnx(tensor: Any) -> FileTensor:
    shape: list[int | str] = []
    for size in tensor.shape:
        shown = size if isinstance(size, int) else printable(str(size))
        shape.append(shown)
    if shape and not isinstance(shape[0], int):
        shape[0] = "n"  # the batch axis counts samples
    dtype = tensor.type.removeprefix("tensor(").removesuffix(")")
    if dtype == "float":
        dtype = "float32"
    return FileTensor(tensor.name, tuple(shape), dtype)


def _of_tflite(detail: Any, name: str) -> FileTensor:
    dtype = np.dtype(detail["dtype"]).name
    shape = tuple(map(int, detail["shape"]))
    scale, zero_point = detail["quantization"]
    if not scale:  # floats, and integers that are not quantized, such as tokens
        return FileTensor(name, shape, dtype)
    return FileTensor(name, shape, dtype, scale=float(scale), zero_point=int(zero_point))
