"""The description of a quantized file of any format: its inputs, outputs, layers and tensors."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Maps a file's inputs [n, ...] to outputs [n, ...], in the file's order.
RawRun = Callable[[Sequence[NDArray[Any]]], Sequence[NDArray[Any]]]

FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Port:
    """An input or output of a file.

    Attributes:
        shape: sizes without the batch axis; a free size is None (.pte files: its largest value).
        scale, zero_point: the quantization of an integer port. The scale is None for float ports,
            plain integers, and integers whose scale the file does not give.
        low, high: the values of the lowest and the highest level, also for a float input that an
            ONNX file rounds; None for other ports.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    scale: float | None = None
    zero_point: int = 0
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        sizes = []
        for size in self.shape:
            sizes.append("?" if size is None else str(size))
        return f"{self.name} [{', '.join(sizes)}] {self.dtype}"


def _ends(scale: float, zero_point: int, levels: str) -> tuple[float, float]:
    """Return the values of the lowest and the highest level of an integer dtype."""
    limits = np.iinfo(levels)
    return scale * (limits.min - zero_point), scale * (limits.max - zero_point)


def rounded(port: Port, scale: float, zero_point: int, levels: str) -> Port:
    """Return a port with the range of its levels, and for an integer port their scale.

    >>> rounded(Port("x", (2,), "uint8"), 0.5, 0, "uint8").high
    127.5

    Args:
        levels: the integer dtype of the levels.
    """
    low, high = _ends(scale, zero_point, levels)
    if port.dtype in FLOATS:
        return replace(port, low=low, high=high)
    return replace(port, scale=scale, zero_point=zero_point, low=low, high=high)


@dataclass(frozen=True)
class Inner:
    """A tensor inside a file, under its name before quantization.

    Attributes:
        low, high, step: the range of the levels and the distance between two; None if the tensor is
            not rounded with one known scale.
        weights: the dequantized weights of the layer that computes the tensor, with the axes in any
            order; None for float32 weights, unknown ones, and tensors that no layer computes.
        bias: the layer's bias [output channels]; None if it is not known.
        dtype: the dtype of the levels, such as `uint8`; empty without `step`.
        weight_dtype: the stored dtype of `weights`; empty without `weights`.
    """

    name: str
    low: float | None = None
    high: float | None = None
    step: float | None = None
    weights: NDArray[np.float32] | None = field(default=None, compare=False)
    bias: NDArray[np.float32] | None = field(default=None, compare=False)
    dtype: str = ""
    weight_dtype: str = ""

    @classmethod
    def rounded(cls, name: str, scale: float, zero_point: int, levels: str) -> "Inner":
        """Return a tensor that is rounded with one scale to the integer dtype `levels`."""
        low, high = _ends(scale, zero_point, levels)
        return cls(name, low, high, step=scale, dtype=levels)


@dataclass(frozen=True)
class Tensors:
    """The tensors inside a file, in the order of execution.

    Attributes:
        inner: the descriptions of the tensors.
        run: maps the file's inputs to the tensors' values as floats. Where the runtime can, the
            values are computed without fused integer kernels.
        run_kernels: the same with the fused kernels, for ONNX files; None for other formats.
    """

    inner: tuple[Inner, ...]
    run: RawRun
    run_kernels: RawRun | None = None


@dataclass(frozen=True)
class Layer:
    """A layer with weights, such as a convolution, a matrix product or an LSTM.

    Attributes:
        weights: the dtype in which the weights are stored or rounded, such as `int4`.
        activations: the dtype of the layer's data at inference, such as `uint8`.
    """

    operator: str
    name: str
    weights: str
    activations: str

    @property
    def is_quantized(self) -> bool:
        """Whether the layer's weights have none of the dtypes in `FLOATS`."""
        return self.weights not in FLOATS


@dataclass(frozen=True)
class Contents:
    """The inputs, outputs and layers of a quantized file of any format.

    Attributes:
        format: the format, such as `ONNX opset 13`.
        producer: the program that wrote the file; may be empty.
        operators: the number of nodes by operator.
        batch: the fixed batch size; None for any size.
        dynamic: whether activation ranges are measured while the file runs.
        simulated: whether the runtime computes rounded values in float.
    """

    format: str
    producer: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    layers: tuple[Layer, ...]
    operators: Mapping[str, int]
    batch: int | None = None
    dynamic: bool = False
    simulated: bool = False

    @property
    def quantized(self) -> list[Layer]:
        """The layers that are quantized, see `Layer.is_quantized`."""
        return [layer for layer in self.layers if layer.is_quantized]

    @property
    def narrowed(self) -> list[Layer]:
        """The quantized layers; if there are none, those in float16 or bfloat16."""
        if self.quantized:
            return self.quantized
        return [layer for layer in self.layers if layer.weights in ("float16", "bfloat16")]

    @property
    def weight_dtype(self) -> str:
        """The weight dtypes of the layers in `narrowed`, the most frequent first."""
        return _listed(map(attrgetter("weights"), self.narrowed))

    @property
    def activation_dtype(self) -> str:
        """The input dtypes of the layers in `narrowed`, the most frequent first."""
        return _listed(map(attrgetter("activations"), self.narrowed))

    @property
    def execution(self) -> str:
        """See `backends.contract.Resolved`; files without quantized layers compute in float."""
        if not self.quantized:
            return "float"
        if all(layer.activations in FLOATS for layer in self.quantized):
            return "weights only, computed in float"
        return "simulated" if self.simulated else "integer"

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "Contents":
        """Return the contents from parsed JSON, which `asdict` and `json.dumps` have made."""
        typed = dict(values)
        typed["inputs"] = _read_ports(values["inputs"])
        typed["outputs"] = _read_ports(values["outputs"])
        typed["layers"] = tuple(Layer(**layer) for layer in values["layers"])
        return cls(**typed)


def _read_ports(ports: Iterable[Mapping[str, Any]]) -> tuple[Port, ...]:
    typed = []
    for port in ports:
        shape = tuple(port["shape"])  # JSON has lists
        typed.append(Port(**{**port, "shape": shape}))
    return tuple(typed)


def _listed(dtypes: Iterable[str]) -> str:
    """Return the distinct dtypes as text, the most frequent first."""
    counts = Counter(dtypes)
    return ", ".join(dtype for dtype, _ in counts.most_common())
