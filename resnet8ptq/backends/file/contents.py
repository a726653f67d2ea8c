"""The description of a quantized file of any format: inputs, outputs, and bits of its layers."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Maps a file's inputs [n, ...] to its outputs [n, ...], both in the file's order and dtypes.
RawRun = Callable[[Sequence[NDArray[Any]]], Sequence[NDArray[Any]]]

FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Port:
    """An input or output of a file.

    Attributes:
        shape: sizes without the batch axis; a free size is None.
        scale, zero_point: the quantization of an integer port; the scale is None for plain
            integers, or in a file without scales.
        low, high: the range of values that a quantized input can hold.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    scale: float | None = None
    zero_point: int = 0
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name} [{sizes}] {self.dtype}"


def _ends(scale: float, zero_point: int, levels: str) -> tuple[float, float]:
    """Return the least and greatest real values that an integer dtype holds at this scale."""
    limits = np.iinfo(levels)
    return scale * (limits.min - zero_point), scale * (limits.max - zero_point)


def rounded(port: Port, scale: float, zero_point: int, levels: str) -> Port:
    """Return a port whose values are rounded to this integer dtype.

    >>> rounded(Port("x", (2,), "uint8"), 0.5, 0, "uint8").high
    127.5
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
            not rounded.
        weights: the dequantized weights of the layer that computes the tensor, in any layout.
        bias: the layer's bias [output channels]; None without one, or if the file does not show it.
        dtype: the dtype of the tensor's levels, such as `uint8`; empty if the tensor is not
        rounded.
        weight_dtype: the stored dtype of `weights`.
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
        """Return a tensor with one scale, rounded to an integer dtype."""
        low, high = _ends(scale, zero_point, levels)
        return cls(name, low, high, step=scale, dtype=levels)


@dataclass(frozen=True)
class Tensors:
    """The float tensors inside a file, in the order of execution.

    Attributes:
        run: returns the values of the tensors for inputs of the file, as the file defines them;
            integers are dequantized.
        run_kernels: the same, as the runtime's kernels compute the values; None if these cannot be
        read.
    """

    inner: tuple[Inner, ...]
    run: RawRun
    run_kernels: RawRun | None = None


@dataclass(frozen=True)
class Layer:
    """A convolution or matrix product with weights.

    Attributes:
        weights: the stored dtype, such as `int4`.
        activations: the dtype of the layer's input, such as `uint8`.
    """

    operator: str
    name: str
    weights: str
    activations: str

    @property
    def is_quantized(self) -> bool:
        """Whether the layer's weights are integers."""
        return self.weights not in FLOATS


@dataclass(frozen=True)
class Contents:
    """The description of a file.

    Attributes:
        format: the format with its version, such as `ONNX opset 13`.
        producer: the program that the file names as its writer; may be empty.
        batch: the fixed batch size; None for any size.
        dynamic: activation ranges are measured while the file runs.
        simulated: the file computes integers in float.
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
        """The layers with integer weights."""
        return [layer for layer in self.layers if layer.is_quantized]

    @property
    def narrowed(self) -> list[Layer]:
        """The quantized layers; if there are none, those in float16 or bfloat16."""
        if self.quantized:
            return self.quantized
        return [layer for layer in self.layers if layer.weights in ("float16", "bfloat16")]

    @property
    def weight_dtype(self) -> str:
        """The stored dtypes of the layers in `narrowed`, the most frequent first."""
        return _listed(map(attrgetter("weights"), self.narrowed))

    @property
    def activation_dtype(self) -> str:
        """The input dtypes of the layers in `narrowed`, the most frequent first."""
        return _listed(map(attrgetter("activations"), self.narrowed))

    @property
    def execution(self) -> str:
        """See `backends.contract.Resolved`."""
        if self.simulated:
            return "simulated"
        if not self.quantized:
            return "float"
        in_float = all(layer.activations in FLOATS for layer in self.quantized)
        return "weights only, computed in float" if in_float else "integer"

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "Contents":
        """Return the contents from a JSON document made with `asdict`."""
        typed = dict(values)
        typed["inputs"] = _read_ports(values["inputs"])
        typed["outputs"] = _read_ports(values["outputs"])
        typed["layers"] = tuple(Layer(**layer) for layer in values["layers"])
        return cls(**typed)


def _read_ports(ports: Iterable[Mapping[str, Any]]) -> tuple[Port, ...]:
    return tuple(Port(**{**port, "shape": tuple(port["shape"])}) for port in ports)


def _listed(dtypes: Iterable[str]) -> str:
    """Return the dtypes as text, the most frequent first."""
    return ", ".join(dict(Counter(dtypes).most_common()))
