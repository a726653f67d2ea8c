"""What a network takes and returns: names, shapes and dtypes, and how samples are laid out for it.

The batch axis is the first of every tensor and is left out of all shapes here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from resnet8ptq.core.errors import ModelError
from resnet8ptq.data.preprocessing import arrange

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Tensor:
    """An input or output.

    Attributes:
        shape: without the batch axis; None where a size is free.
        dtype: NumPy's name of it, such as `float32`.
    """

    name: str
    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} [{_show(self.shape)[1:-1]}] {self.dtype}"


IF_PICTURES = "; if they are pictures: "  # what then makes samples fit


@dataclass(frozen=True)
class Contract:
    """What a network takes and returns.

    Attributes:
        batch: the only number of samples that it takes at once; None: any. Of the first input,
            which takes the samples: the first axis of others, such as a state, may be another.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    batch: int | None = None


def read_contract(graph: onnx.GraphProto) -> Contract:
    """Return what an ONNX graph says of its inputs and outputs.

    Raises:
        ModelError: a tensor of a type that NumPy lacks, or one without a batch axis.
    """
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]  # listed up to IR 3
    return Contract(
        tuple(_tensor(value) for value in inputs),
        tuple(_tensor(value) for value in graph.output),
        _sizes(inputs[0])[0] if inputs else None,
    )


def ask_for_values(others: Sequence[Tensor]) -> str:
    """Return the setting that gives inputs their values, which are the same for every sample."""
    return f"model.inputs={{{', '.join(f'{each.name}: ...' for each in others)}}}"


def _tensor(value: onnx.ValueInfoProto) -> Tensor:
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    except KeyError:
        raise ModelError(f"{value.name!r} is no tensor of numbers") from None
    return Tensor(value.name, _sizes(value)[1:], dtype.name)


def _sizes(value: onnx.ValueInfoProto) -> Shape:
    """Return the size of each axis; None where it is free."""
    dims = value.type.tensor_type.shape.dim
    if not dims:
        raise ModelError(f"{value.name!r} has no axes; takes one of samples first")
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in dims)


def find_layout(sample_shape: tuple[int, ...], contract: Contract) -> tuple[int, ...] | None:
    """Return how the axes of a sample are permuted for the network's one input.

    `(2, 0, 1)` where samples are [H, W, C] and the network takes [C, H, W], `(1, 2, 0)` the other
    way round; the same for any number of axes. A sample may lack a channel axis of 1, as [H, W]
    pictures in grey do, or have one too many at its end: the layout then has one axis more or one
    less than the sample. `arrange` applies it.

    Returns:
        The permutation; None: samples fit as they are.

    Raises:
        ModelError: they fit in no layout, or the network has several inputs; names both shapes,
            and the settings that would make pictures fit.
    """
    if len(contract.inputs) != 1:
        raise ModelError(f"takes {len(contract.inputs)} inputs, the samples are one")
    takes = contract.inputs[0].shape
    if _fits(sample_shape, takes):
        return None
    rank = len(sample_shape)
    layouts = [*_moves(rank), tuple(range(rank + 1)), *_moves(rank + 1)]
    if rank and sample_shape[-1] == 1:
        layouts.append(tuple(range(rank - 1)))
    for layout in layouts:
        if _fits(tuple((*sample_shape, 1)[axis] for axis in layout), takes):
            return layout
    shapes = f"takes {_show(takes)}, the samples are {_show(sample_shape)}"
    sizes = [size for size in takes if size is not None]
    if len(sizes) == len(takes) and rank == 1 and math.prod(sizes) == sample_shape[0]:
        shape = ",".join(map(str, sizes))
        raise ModelError(f"{shapes}; if they are rows of a table: data.shape=[{shape}]")
    advice = _advise(sample_shape, takes)
    raise ModelError(f"{shapes}{IF_PICTURES}{advice}" if advice else shapes)


def _advise(sample_shape: tuple[int, ...], takes: Shape) -> str:
    """Return the settings that make pictures [H, W, C] fit; empty where none do."""
    if len(takes) != 3 or len(sample_shape) != 3 or sample_shape[2] not in (1, 3):
        return ""
    height, width, channels = takes if takes[2] in (1, 3) else (*takes[1:], takes[0])
    if channels not in (1, sample_shape[2]):
        return ""
    sized = height and width and (height, width) != sample_shape[:2]
    settings = [f"preprocess.size=[{height},{width}]"] if sized else []
    return " ".join(settings + ["preprocess.channels=grey"] * (channels < sample_shape[2]))


def arranged(shape: tuple[int, ...], layout: Sequence[int] | None) -> tuple[int, ...]:
    """Return the shape of a sample in a layout that `find_layout` found."""
    return arrange(np.empty((0, *shape)), layout).shape[1:]


def likely_layouts(shape: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """Return the layouts that a torch network may take, the likeliest first: channels first."""
    rank = len(shape)
    if rank < 2:
        return [None]
    return [_moves(rank)[0] if rank > 2 else _moves(rank + 1)[0], None]


def _moves(rank: int) -> list[tuple[int, ...]]:
    """Return the layouts that move the last axis to the front, and the first to the end."""
    axes = tuple(range(rank))
    return [axes[-1:] + axes[:-1], axes[1:] + axes[:1]]


def _show(shape: Shape) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in shape)})"


def _fits(shape: tuple[int, ...], takes: Shape) -> bool:
    return len(shape) == len(takes) and all(
        wanted in (None, size) for size, wanted in zip(shape, takes, strict=True)
    )
