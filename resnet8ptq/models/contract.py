"""The contract of a network: names, shapes and dtypes of its inputs and outputs.

The module also finds the layout and dtype that the inputs need. Shapes omit the batch axis, axis 0.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.records import find_mask, names_of
from resnet8ptq.data.fields import Field, Fields, Layout, find_masked, steps_of
from resnet8ptq.data.preprocessing import RAW, Preprocessing, arrange
from resnet8ptq.models.gates.onnx import graph_inputs

Shape = tuple[int | None, ...]
SampleArray = NDArray[Any]  # values [n, ...] of one input, or records [n] of several


@dataclass(frozen=True)
class Tensor:
    """An input or output of a network.

    Attributes:
        shape: the sizes without the batch axis; a free size is None.
        dtype: NumPy's name, such as `float32`.
    """

    name: str
    shape: Shape
    dtype: str

    @property
    def is_integer(self) -> bool:
        """Whether values are integers or booleans, which preprocessing must not change."""
        return np.dtype(self.dtype).kind in "iub"

    def __str__(self) -> str:
        return f"{self.name} [{_show(self.shape)[1:-1]}] {self.dtype}"


# The dtypes of inputs that samples can have
INPUT_DTYPES = ("float32", "float16", "int8", "int32", "int64", "uint8", "bool")

IF_PICTURES = "; if they are pictures: "  # introduces the settings that make pictures fit


@dataclass(frozen=True)
class Contract:
    """The inputs and outputs of a network.

    Attributes:
        batch: the fixed size of the inputs' first axis, read from the first input that has axes;
            None for any size.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    batch: int | None = None

    @property
    def input_names(self) -> str:
        """Names of the inputs, for messages."""
        return ", ".join(tensor.name for tensor in self.inputs)


def read_contract(graph: onnx.GraphProto) -> Contract:
    """Return the inputs and outputs that an ONNX graph declares.

    Raises:
        ModelError: an input or output is not a tensor, or has no dtype.
    """
    inputs = graph_inputs(graph)
    batch: int | None = None
    for value in inputs:
        sizes = _sizes(value)
        if sizes:  # a scalar has no batch axis
            batch = sizes[0]
            break
    return Contract(
        inputs=tuple(map(_tensor, inputs)),
        outputs=tuple(map(_tensor, graph.output)),
        batch=batch,
    )


def is_scalar(value: onnx.ValueInfoProto) -> bool:
    """Return whether an input or output is declared a single number, without a batch axis."""
    kind = value.type.tensor_type
    return kind.HasField("shape") and not kind.shape.dim


def ask_for_values(inputs: Sequence[Tensor], key: str = "model.inputs") -> str:
    """Return a setting with `...` in place of the value of each input, for messages.

    >>> ask_for_values([Tensor("size", (2,), "int64"), Tensor("rate", (), "float32")])
    'model.inputs={size: ..., rate: ...}'
    """
    values = ", ".join(f"{tensor.name}: ..." for tensor in inputs)
    return f"{key}={{{values}}}"


def _tensor(value: onnx.ValueInfoProto) -> Tensor:
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    except KeyError:
        raise ModelError(f"{value.name!r} is not a tensor of numbers") from None
    return Tensor(value.name, _sizes(value)[1:], dtype.name)


def _sizes(value: onnx.ValueInfoProto) -> Shape:
    """Return the size of each axis; a free size is None."""
    sizes: list[int | None] = []
    for dim in value.type.tensor_type.shape.dim:
        sizes.append(dim.dim_value if dim.dim_value > 0 else None)
    return tuple(sizes)


@dataclass(frozen=True)
class Match:
    """The conversion from stored samples to network inputs; see `data.dataset.Split`.

    Attributes:
        layout: the permutation of a sample's axes, see `find_layout`; None if they stay.
        dtype: the dtype of the input.
        fields: the conversion of records, in place of `layout` and `dtype`.
    """

    layout: Layout | None = None
    dtype: str = "float32"
    fields: Fields | None = None

    def prepare(self, stored: SampleArray, steps: Preprocessing) -> SampleArray:
        """Return stored samples [n, ...] as network inputs."""
        if self.fields is not None:
            return self.fields.prepare(stored)
        return arrange(steps.apply(stored, self.dtype), self.layout)


def match_samples(stored: SampleArray, steps: Preprocessing, contract: Contract) -> Match:
    """Match stored samples to the inputs of a network; records are matched by name.

    Args:
        stored: stored samples [n, ...].
        steps: the preprocessing; for records, it applies to pictures only.

    Raises:
        ModelError: see `find_layout` and `find_dtype`; or the samples are one array and the network
            does not have exactly one input, or they are records without a field for an input.
    """
    names = names_of(stored.dtype)
    if not names:
        if len(contract.inputs) != 1:
            raise ModelError(
                f"takes {len(contract.inputs)} inputs ({contract.input_names}), the samples are "
                "one array; try data=arrays with an array for each, "
                f"{ask_for_values(contract.inputs, 'data.inputs')}, or "
                f"{ask_for_values(contract.inputs[1:])}"
            )
        [tensor] = contract.inputs
        return Match(find_layout(stored.shape[1:], tensor), find_dtype(stored.dtype, steps, tensor))

    # Fill each input from the field with its name
    length = _only_length(contract, stored.dtype)
    fields = []
    for tensor in contract.inputs:
        fields.append(_fill(tensor, stored.dtype, steps, length=length))
    any_length = _any_length(contract, stored.dtype)
    return Match(fields=Fields(tuple(fields), find_mask(stored.dtype), any_length))


def _fill(tensor: Tensor, stored: np.dtype[Any], steps: Preprocessing, length: int | None) -> Field:
    """Return the field of records that fills an input.

    Args:
        length: the result of `_only_length`; shorter texts are padded to this length.
    """
    names = names_of(stored)
    if tensor.name not in names:
        raise ModelError(
            f"takes an input {tensor.name!r}, the samples have {', '.join(names)}; name them by "
            f"data.inputs={{{tensor.name}: ...}} of data=arrays"
        )
    kind = stored[tensor.name]
    taken = steps_of(kind, steps)
    shape = kind.shape

    # Compare the length of the samples with that of the network
    excess = 0  # tokens beyond the length that the network takes
    if length and _is_text(tensor.name, stored):
        excess = shape[0] - length
    if excess < 0:
        shape = (length,)  # the shape after padding

    # Name the input, and the setting that shortens texts
    try:
        layout = find_layout(shape, tensor)
        dtype = find_dtype(kind.base, taken, tensor)
    except ModelError as error:
        advice = f"; for texts, try data.max_tokens={length}" if excess > 0 else ""
        raise ModelError(f"input {tensor.name}: {error}{advice}") from None
    return Field(tensor.name, dtype, layout, taken, max(0, -excess))


def _is_text(name: str, stored: np.dtype[Any]) -> bool:
    """Return whether a field is a vector of integers or booleans that is as long as the mask.

    Padding extends only such fields, for example tokens and their types.
    """
    if name not in find_masked(stored):
        return False
    kind = stored[name]
    return kind.ndim == 1 and kind.base.kind in "iub"


def _only_length(contract: Contract, stored: np.dtype[Any]) -> int | None:
    """Return the fixed length of a network's texts.

    Returns None if the length is free or differs by input, or if no input is a text.
    """
    lengths = set()
    for tensor in contract.inputs:
        if not _is_text(tensor.name, stored):
            continue
        if tensor.shape:
            lengths.add(tensor.shape[0])
        else:
            lengths.add(None)
    return lengths.pop() if len(lengths) == 1 else None


def _any_length(contract: Contract, stored: np.dtype[Any]) -> tuple[str, ...]:
    """Return the names of the inputs of free length whose fields are as long as the mask.

    The result is empty if the mask is not among them.

    A network without the mask as an input cannot ignore padding.
    """
    masked = find_masked(stored)
    free = []
    for tensor in contract.inputs:
        if tensor.shape[:1] == (None,) and tensor.name in masked:
            free.append(tensor.name)
    return tuple(free) if find_mask(stored) in free else ()


def find_dtype(stored: DTypeLike, preprocessing: Preprocessing, takes: Tensor) -> str:
    """Return the dtype of an input after checking that these samples can have it.

    Raises:
        ModelError: the input takes integers or booleans, and the samples are neither, or
            preprocessing would change them. Only the user knows whether integers are pixels or
            indices.
    """
    if not takes.is_integer:
        return takes.dtype
    kind = np.dtype(stored)
    if kind.kind not in "iub":
        raise ModelError(
            f"takes {takes.dtype}, the samples are {kind.name}; store them as integers"
        )
    if preprocessing != RAW:
        raise ModelError(
            f"takes {takes.dtype}, which preprocessing would change; set preprocess=raw, and no "
            "data.scale or data.offset"
        )
    return takes.dtype


def find_layout(sample_shape: tuple[int, ...], tensor: Tensor) -> Layout | None:
    """Return the permutation of a sample's axes that fits an input.

    The permutation moves the last axis to the front or the first to the end, or keeps the order. It
    has one axis more than the sample if the sample, such as a grey [H, W] picture, lacks a channel
    axis of size 1. It has one axis less if only the sample has an axis of size 1 at its end.
    `arrange` applies the permutation.

    Args:
        sample_shape: the shape of a stored sample, without the batch.

    Returns:
        The permutation; None if samples fit unchanged.

    Raises:
        ModelError: no layout fits; the message names both shapes, and settings that help, if any.

    >>> find_layout((32, 24, 3), Tensor("pictures", (3, 32, 24), "float32"))
    (2, 0, 1)
    >>> find_layout((32, 24), Tensor("grey pictures", (1, 32, 24), "float32"))
    (2, 0, 1)
    """
    takes = tensor.shape
    if _fits(sample_shape, takes):
        return None
    rank = len(sample_shape)
    layouts = [*_moves(rank), tuple(range(rank + 1)), *_moves(rank + 1)]
    if rank and sample_shape[-1] == 1:  # the network lacks the channel axis
        layouts.append(tuple(range(rank - 1)))
    extended = (*sample_shape, 1)  # adds a channel axis, which the sample may lack
    for layout in layouts:
        arranged_shape = tuple(extended[axis] for axis in layout)
        if _fits(arranged_shape, takes):
            return layout

    # No layout fits, so name a setting that helps
    shapes = f"takes {_show(takes)}, the samples are {_show(sample_shape)}"
    sizes = [size for size in takes if size is not None]
    is_fixed = len(sizes) == len(takes)
    if is_fixed and rank == 1 and math.prod(sizes) == sample_shape[0]:
        shape = ",".join(map(str, sizes))
        raise ModelError(f"{shapes}; if they are rows of a table: data.shape=[{shape}]")
    advice = _advise(sample_shape, takes)
    if advice:
        raise ModelError(f"{shapes}{IF_PICTURES}{advice}")
    raise ModelError(shapes)


def _advise(sample_shape: tuple[int, ...], takes: Shape) -> str:
    """Return settings that may make pictures [H, W, C] fit an input; empty if none are known."""
    if len(takes) != 3 or len(sample_shape) != 3 or sample_shape[2] not in (1, 3):
        return ""
    if takes[2] in (1, 3):
        height, width, channels = takes
    else:
        channels, height, width = takes
    if channels not in (1, sample_shape[2]):
        return ""
    settings = []
    if height and width and (height, width) != sample_shape[:2]:
        settings.append(f"preprocess.size=[{height},{width}]")
    if channels < sample_shape[2]:
        settings.append("preprocess.channels=grey")
    return " ".join(settings)


def picture_size(contract: Contract, fixed: Collection[str] = ()) -> tuple[int, int] | None:
    """Return height and width of a network's input pictures, with 1 or 3 channels first or last.

    Returns None if height or width is free, or if the inputs are not exactly one such picture.

    Args:
        fixed: names of inputs with set values, which do not count.
    """
    shapes = [tensor.shape for tensor in contract.inputs if tensor.name not in fixed]
    if len(shapes) != 1 or len(shapes[0]) != 3:
        return None

    # Channels may be last or first
    first, second, third = shapes[0]
    if third in (1, 3):
        height = first
        width = second
    elif first in (1, 3):
        height = second
        width = third
    else:
        return None
    if height is None or width is None:
        return None
    return height, width


def arranged(shape: tuple[int, ...], layout: Sequence[int] | None) -> tuple[int, ...]:
    """Return a sample's shape after applying a layout of `find_layout`."""
    return arrange(np.empty((0, *shape)), layout).shape[1:]


def likely_layouts(shape: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """Return the layouts to try for a torch network: channels first, then the samples' own.

    For a vector or a number, only its own layout is tried.
    """
    rank = len(shape)
    return [None] if rank < 2 else [_moves(max(rank, 3))[0], None]


def _moves(rank: int) -> list[tuple[int, ...]]:
    """Return two layouts: the last axis moved to the front, and the first moved to the end."""
    axes = tuple(range(rank))
    return [axes[-1:] + axes[:-1], axes[1:] + axes[:1]]


def _show(shape: Shape) -> str:
    """Return a shape as text.

    >>> _show((3, None, 32))
    '(3, ?, 32)'
    """
    sizes = ["?" if size is None else str(size) for size in shape]
    return f"({', '.join(sizes)})"


def _fits(shape: tuple[int, ...], takes: Shape) -> bool:
    """Return whether an input takes samples of a shape; a size of None takes any."""
    if len(shape) != len(takes):
        return False
    pairs = zip(shape, takes, strict=True)
    return all(expected in (None, size) for size, expected in pairs)
