"""The batch axis of a graph: freed where it is fixed, and every other size made a constant.

Exporters write the shape of one example into a graph, or let the graph compute shapes from its
input. What is computed from shapes and constants alone is worked out here, for two sizes of the
batch: what is the same for both is a constant, and what differs is the batch's.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from resnet8ptq.core.console import track
from resnet8ptq.core.errors import ModelError
from resnet8ptq.graph.session import expose, open_runner
from resnet8ptq.models.contract import read_contract
from resnet8ptq.models.gates.onnx import find_all
from resnet8ptq.models.normalization import drop_attribute, write_paddings

Samples = NDArray[Any]  # of the dtype of the network's input
Outputs = list[NDArray[Any]]
# From samples [n, ...] to the outputs [n, ...], in the order of the contract.
Predict = Callable[[Samples], Outputs]

_SIZES = (2, 3)  # of the batch
_COUNTING = ("NonMaxSuppression", "NonZero", "Compress", "Unique")
_RANDOM = re.compile(r"Random\w+|Multinomial|Bernoulli")


def in_batches(predict: Predict, samples: Samples, size: int, label: str | None = None) -> Outputs:
    """Return the outputs for all samples, predicted in batches of at most `size`.

    What has other sizes for other samples, such as their detections, is filled up with zeros.

    Args:
        label: of a progress bar; None: without one.
    """
    starts = range(0, len(samples), size)
    parts = [predict(samples[i : i + size]) for i in (track(starts, label) if label else starts)]
    return [_join(found) for found in zip(*parts, strict=True)]


def _join(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if len(parts) == 1:  # also what has no axis of samples, see `one_by_one`
        return parts[0]
    sizes = np.max([part.shape[1:] for part in parts], axis=0).astype(int)
    filled = [
        np.pad(
            part,
            [(0, 0), *((0, most - size) for most, size in zip(sizes, part.shape[1:], strict=True))],
        )
        for part in parts
    ]
    return np.concatenate(filled)


def one_by_one(predict: Predict, outputs: Sequence[int]) -> Predict:
    """Return a network that takes one sample at once as one that takes any number.

    Args:
        outputs: the places of outputs that have no batch axis; they are given one.
    """

    def run(sample: Samples) -> Outputs:
        found = predict(sample)
        return [each[np.newaxis] if n in outputs else each for n, each in enumerate(found)]

    return lambda samples: in_batches(run, samples, 1)


def filled_up(predict: Predict, size: int) -> Predict:
    """Return a network that takes `size` samples at once as one that takes any number.

    The last batch is filled up with zeros, and what comes of those is left out.
    """

    def run(samples: Samples) -> Outputs:
        missing = -len(samples) % size
        filled = np.concatenate([samples, np.zeros((missing, *samples.shape[1:]), samples.dtype)])
        outputs = in_batches(predict, filled, size)
        return [found[: len(samples)] for found in outputs] if missing else outputs

    return run


def settle(proto: onnx.ModelProto, shape: tuple[int, ...], batch: int | None) -> onnx.ModelProto:
    """Return a copy of a normalized graph for inputs [batch, *shape], all other sizes constant.

    Args:
        batch: the size that the batch stays fixed at; None frees it.

    Raises:
        ModelError: an output without a batch axis, where the batch is not 1.
        Exception: ONNX Runtime's own: the graph does not run so.
    """
    settled = copy.deepcopy(proto)
    graph = settled.graph
    static = static_tensors(graph)
    if batch is None:
        _free_reshapes(graph, read_contract(graph).batch, static)
    _set_shape(graph.input[0], ("N" if batch is None else batch, *shape))
    others = [node for node in graph.node if not static.issuperset(node.output)]
    wanted = sorted(static.intersection(name for node in others for name in _inputs(node)))
    names = [*(value.name for value in graph.output), *wanted]
    run = open_runner(expose(settled, names))
    sizes = _SIZES if batch is None else (batch,)
    dtype = read_contract(graph).inputs[0].dtype
    outputs = [run(np.zeros((size, *shape), dtype)) for size in sizes]
    found = [dict(zip(names, values, strict=True)) for values in outputs]
    for name in wanted:
        _replace(graph, name, [values[name] for values in found])
    _prune(graph)
    counted = find_counted(settled)
    for value in graph.output:
        made = found[0][value.name]
        shape_of = counted.get(value.name, made.shape)
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(made.dtype)
        if made.shape[:1] == sizes[:1]:
            _set_shape(value, ("N" if batch is None else batch, *shape_of[1:]))
        elif batch == 1:
            _give_batch_axis(graph, value, shape_of)
        else:
            raise ModelError(
                f"output {value.name!r} is {list(made.shape)} for {sizes[0]} samples; "
                "takes outputs with one row for each sample"
            )
    write_paddings(settled)
    onnx.checker.check_model(settled)
    return settled


def static_tensors(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors that are computed from constants and from shapes alone."""
    static: set[str] = set()
    constants = {tensor.name for tensor in graph.initializer} | {""}
    for node in graph.node:
        by_shape = node.op_type in ("Shape", "Size")
        alone = static.union(constants).issuperset(node.input) and not _RANDOM.match(node.op_type)
        if (by_shape or alone) and not any(find_all(node, onnx.GraphProto)):
            static.update(node.output)
    return static - {""}


def find_counted(proto: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    """Return the sizes of outputs that depend on the values in the input, such as detections.

    An axis whose size is not known has a name.
    """
    counted: set[str] = set()
    for node in proto.graph.node:
        if node.op_type in _COUNTING or counted.intersection(node.input):
            counted.update(node.output)
    inferred = onnx.shape_inference.infer_shapes(proto).graph.output
    return {
        value.name: tuple(
            dim.dim_value or f"{value.name}_{axis}"
            for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        )
        for value in inferred
        if value.name in counted
    }


def _give_batch_axis(
    graph: onnx.GraphProto, value: onnx.ValueInfoProto, sizes: Sequence[int | str]
) -> None:
    """Put an axis of one sample before those of an output."""
    inner = f"{value.name}__of_one"
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [inner if name == value.name else name for name in names]
    axes = numpy_helper.from_array(np.zeros(1, np.int64), f"{inner}__axes")
    graph.initializer.append(axes)
    name = f"{value.name}__batch_axis"
    graph.node.append(helper.make_node("Unsqueeze", [inner, axes.name], [value.name], name))
    _set_shape(value, (1, *sizes))


def _free_reshapes(graph: onnx.GraphProto, fixed: int | None, static: set[str]) -> None:
    """Let constant shapes of Reshape copy the batch dimension (0) instead of naming it."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "Reshape" or node.input[1] not in constants:
            continue
        dims = numpy_helper.to_array(constants[node.input[1]]).copy()
        if node.output[0] not in static and dims.ndim == 1 and len(dims) > 1 and dims[0] == fixed:
            dims[0] = 0
            _give_shape(graph, node, dims)


def _give_shape(graph: onnx.GraphProto, node: onnx.NodeProto, dims: NDArray[np.int64]) -> None:
    """Give a Reshape a constant shape of its own: others may share the one it had.

    A 0 in it copies the size there, whatever the exporter meant by one.
    """
    drop_attribute(node, "allowzero")
    tensor = numpy_helper.from_array(dims, f"{node.name}__shape")
    graph.initializer.append(tensor)
    node.input[1] = tensor.name


def _replace(graph: onnx.GraphProto, name: str, values: list[NDArray[Any]]) -> None:
    """Put in a constant for a tensor, or for the shape of each Reshape that takes it.

    Args:
        values: of the tensor, for each size of the batch.
    """
    if all(np.array_equal(values[0], value) for value in values):
        for node in graph.node:
            node.output[:] = ["" if made == name else made for made in node.output]
        graph.initializer.append(numpy_helper.from_array(values[0], name))
        return
    first, second = values
    if first.ndim != 1 or first.shape != second.shape:
        return
    varying = np.flatnonzero(first != second)
    if len(varying) != 1:
        return
    dims = np.array(first, np.int64)
    dims[varying] = 0 if (dims == -1).any() and varying[0] == 0 else -1
    for node in graph.node:
        if node.op_type == "Reshape" and node.input[1] == name:
            _give_shape(graph, node, dims)


def _prune(graph: onnx.GraphProto) -> None:
    """Leave out what no output needs."""
    needed = {value.name for value in graph.output}
    for node in reversed(list(graph.node)):
        if needed.intersection(node.output):
            needed.update(_inputs(node))
        else:
            graph.node.remove(node)
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(constants)


def _inputs(node: onnx.NodeProto) -> Iterator[str]:
    """Yield what a node takes, and what the graphs in it do."""
    yield from (name for name in node.input if name)
    for inner in find_all(node, onnx.GraphProto):
        yield from (value.name for value in inner.output)
        for part in inner.node:
            yield from (name for name in part.input if name)


def _set_shape(value: onnx.ValueInfoProto, sizes: Sequence[int | str]) -> None:
    shape = value.type.tensor_type.shape
    del shape.dim[:]
    for size in sizes:
        shape.dim.add(**{"dim_param" if isinstance(size, str) else "dim_value": size})
