"""Makes the sizes in a graph constant, except a free batch size and a free length of texts.

Exporters write the shape of one example into a graph, or let the graph compute shapes from its
inputs. Tensors that depend only on shapes and constants are computed here. If the batch size or the
length is free, two values of it are tried. Tensors with equal results become constants. Where
possible, the others follow the sizes of the inputs.

The module also wraps networks of a fixed batch size, so that they take any number of samples.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.records import feed
from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.links import (
    Links,
    find_all,
    input_at,
    input_names,
    inputs_of,
    output_names,
)
from resnet8ptq.graph.passes import Writer, end_with, remove_unused, rewrite
from resnet8ptq.graph.session import expose, open_session
from resnet8ptq.graph.shapes import infer_shapes
from resnet8ptq.models import normalization
from resnet8ptq.models.contract import SampleArray, read_contract

Outputs = list[NDArray[Any]]
# Maps samples [n, ...] to the outputs [n, ...], in the order of the contract.
Predict = Callable[[SampleArray], Outputs]

SIZES = (2, 3)  # two batch sizes, whose comparison shows which tensors depend on the batch
_LENGTH = "length"  # name of the axis of any length
# Operators that take a target shape or indices, and the index of the input with them.
_SHAPED = {"Reshape": 1, "Expand": 1, "Gather": 1, "GatherND": 1, "Resize": 3}
_COUNTING = ("NonMaxSuppression", "NonZero", "Compress", "Unique")
RANDOM = re.compile(r"Random\w+|Multinomial|Bernoulli")  # operators that draw random values
# Operators that draw values, or make lists of tensors
_NO_CONSTANT = re.compile(rf"{RANDOM.pattern}|\w*Sequence\w*")


def in_batches(predict: Predict, samples: SampleArray, size: int) -> Outputs:
    """Return the outputs for all samples, run in batches of at most `size`.

    Outputs whose sizes differ by batch, such as detections, are padded with zeros.
    """
    batches = []
    for start in range(0, len(samples), size):
        batches.append(predict(samples[start : start + size]))
    return [_join(parts) for parts in zip(*batches, strict=True)]


def _join(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return one output of several batches, padded with zeros along all axes but the first."""
    if len(parts) == 1:  # the output may lack a batch axis, see `one_by_one`
        return parts[0]
    shapes = [part.shape for part in parts]
    largest = np.max(shapes, axis=0).astype(int)
    padded = []
    for part in parts:
        missing = largest - part.shape
        missing[:1] = 0  # samples are joined, not padded
        before = np.zeros_like(missing)
        padded.append(np.pad(part, np.stack([before, missing], axis=1)))
    return np.concatenate(padded)


def one_by_one(predict: Predict, outputs: Sequence[int]) -> Predict:
    """Wrap a network of batch size 1, so that it takes any number of samples.

    Args:
        outputs: indices of the outputs without a batch axis, which is added.
    """

    def run(sample: SampleArray) -> Outputs:
        results = [*predict(sample)]
        for index in outputs:
            results[index] = results[index][np.newaxis]
        return results

    return lambda samples: in_batches(run, samples, 1)


def in_full_batches(predict: Predict, size: int | None) -> Predict:
    """Wrap a network of batch size `size`, so that it takes any number of samples.

    The last batch is padded with zeros, whose outputs are dropped. Without a fixed size, the
    function returns `predict` itself.
    """
    if size is None:
        return predict

    def run(samples: SampleArray) -> Outputs:
        missing = -len(samples) % size
        filled = np.concatenate([samples, np.zeros((missing, *samples.shape[1:]), samples.dtype)])
        outputs = in_batches(predict, filled, size)
        if not missing:
            return outputs
        return [values[: len(samples)] for values in outputs]

    return run


def fix_sizes(
    proto: onnx.ModelProto, sample: SampleArray, batch: int | None, any_length: Sequence[str] = ()
) -> onnx.ModelProto:
    """Return a copy of a normalized graph with constant sizes, for inputs like `sample`.

    Args:
        sample: a sample as the network takes it, [1, ...].
        batch: the fixed batch size; None for a free one.
        any_length: names of the inputs whose first axis after the batch stays free.

    Raises:
        ModelError: an output is an input, or lacks a row for each sample although the batch size is
            not 1.
        Exception: the graph cannot be run with these sizes; ONNX Runtime and onnx have their own
            classes.
    """
    fixed = copy.deepcopy(proto)
    graph = fixed.graph
    static = static_tensors(graph)
    if batch is None:
        _free_reshapes(graph, read_contract(graph).batch, static)
    sizes: Sequence[int] = SIZES if batch is None else (batch,)
    names_of_inputs = input_names(graph)
    inputs = [feed(zeros(sample, size), names_of_inputs) for size in sizes]

    # Declare the shapes of the inputs
    rows = _name_batch(batch)
    for value in graph.input:
        shape: list[int | str] = [rows, *inputs[0][value.name].shape[1:]]
        if value.name in any_length:
            shape[1] = _LENGTH
        _set_shape(value, shape)

    # Find the static tensors that the other nodes use
    others = []
    used: set[str] = set()
    deciding = set()  # conditions of If, which may depend on one sample
    for node in graph.node:
        if static.issuperset(node.output):
            continue
        others.append(node)
        used.update(inputs_of(node))
        if node.op_type == "If":
            deciding.add(node.input[0])
    wanted = sorted(static & used - deciding)

    # Compute the values of these tensors for each size
    shaped: dict[str, list[onnx.NodeProto]] = {name: [] for name in wanted}
    sources = set()
    for node in others:
        parameter = _parameter(node)
        if parameter in shaped:
            shaped[parameter].append(node)
            sources.add(node.input[0])
    names = [*output_names(graph), *wanted]
    names += sorted(sources - {*names, *inputs[0]})
    if any_length:
        inputs += [_shortened(inputs[0], any_length)]
    session = open_session(expose(fixed, names).SerializeToString(), 0)
    tensors = []
    for feeds in inputs:
        outputs = session.run(None, feeds)
        tensors.append(feeds | dict(zip(names, outputs, strict=True)))

    # Put constants in place of the tensors
    producers = Links(graph).producers
    for name in wanted:
        is_empty = all(values[name].size == 0 for values in tensors)
        if is_empty:
            _leave_out(others, name)
        _replace_tensor(
            graph,
            name,
            producer=producers[name],
            shaped=shaped[name],
            tensors=tensors,
            any_length=bool(any_length),
        )
    fixed = rewrite(fixed, [remove_unused])
    alone = _shape_outputs(fixed, tensors, batch=batch, sizes=sizes)
    if alone:
        fixed = rewrite(fixed, [partial(_add_batch_axis, sizes=alone)])
    fixed = normalization.write_explicitly(fixed)
    onnx.checker.check_model(fixed)
    return fixed


def _shape_outputs(
    proto: onnx.ModelProto,
    tensors: Sequence[Mapping[str, NDArray[Any]]],
    batch: int | None,
    sizes: Sequence[int],
) -> dict[str, Sequence[int | str]]:
    """Write the outputs' dtypes and shapes in place; return the sizes of those without batch axis.

    Args:
        tensors: the values of the outputs by name, for each number of samples in `sizes`, and
            perhaps for another length.

    Raises:
        ModelError: see `fix_sizes`.
    """
    graph = proto.graph
    data_sized = find_data_sized(proto)
    rows = [name for name in output_names(graph) if _has_rows(name, tensors, sizes)]
    inputs = set(input_names(graph))
    alone: dict[str, Sequence[int | str]] = {}
    for value in graph.output:
        # An unchanged input cannot be quantized, so the message suggests the other outputs
        if value.name in inputs:
            others = [name for name in rows if name not in inputs]
            raise ModelError(
                f"output {value.name!r} is an input, unchanged; expected outputs that the network "
                f"computes{_suggest_outputs(others)}"
            )

        # Declare what the first run returned, with free sizes where data decide
        example = tensors[0][value.name]
        shape = data_sized.get(value.name, example.shape)
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(example.dtype)
        if value.name in rows:
            _set_shape(value, (_name_batch(batch), *shape[1:]))
        elif batch == 1:  # the output has one value for the only sample
            alone[value.name] = shape
        else:
            raise ModelError(
                f"output {value.name!r} is {list(example.shape)} for {sizes[0]} samples; "
                f"expected outputs with one row for each sample{_suggest_outputs(rows)}"
            )
    return alone


def _suggest_outputs(names: Sequence[str]) -> str:
    """Return the end of a message: the setting that keeps only these outputs; empty without any."""
    return f"; try model.outputs=[{','.join(names)}]" if names else ""


def _has_rows(
    name: str, tensors: Sequence[Mapping[str, NDArray[Any]]], sizes: Sequence[int]
) -> bool:
    """Return whether a tensor has one row for each sample, for every number of samples."""
    pairs = zip(tensors, sizes, strict=False)  # `tensors` may end with values for another length
    return all(values[name].shape[:1] == (size,) for values, size in pairs)


def static_tensors(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the computed tensors that depend only on constants and shapes.

    Left out are random values, and the results of nodes with inner graphs and of operators with
    `Sequence` in their names, most of which make lists of tensors.
    """
    static: set[str] = set()
    known = {*Links(graph).constants, ""}  # an omitted input has no name
    for node in graph.node:
        is_static = node.op_type in ("Shape", "Size")
        if known.issuperset(node.input) and not _NO_CONSTANT.match(node.op_type):
            is_static = True
        if is_static and not any(find_all(node, onnx.GraphProto)):
            static.update(node.output)
            known.update(node.output)
    return static - {""}


def find_data_sized(proto: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes, by name, of the outputs that depend on a node of `_COUNTING`.

    The number of values that such a node returns depends on data, such as the number of detections.
    An axis of unknown size has a name in place of a size.
    """
    data_sized: set[str] = set()
    for node in proto.graph.node:
        kinds = {inner.op_type for inner in find_all(node, onnx.NodeProto)} | {node.op_type}
        if not kinds.isdisjoint(_COUNTING) or data_sized.intersection(inputs_of(node)):
            data_sized.update(filter(None, node.output))  # an omitted output has no name
    shapes: dict[str, tuple[int | str, ...]] = {}
    for value in infer_shapes(proto).output:
        if value.name in data_sized:
            sizes: list[int | str] = []
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                sizes.append(dim.dim_value or f"{value.name}_{axis}")
            shapes[value.name] = tuple(sizes)
    return shapes


def _add_batch_axis(model: ir.Model, sizes: Mapping[str, Sequence[int | str]]) -> None:
    """Put a batch axis of size 1 before the axes of each output in `sizes`."""
    for name, axes in sizes.items():
        inner = f"{name}__of_one"
        node = end_with(model, name, inner, "Unsqueeze", f"{name}__batch_axis")
        node.resize_inputs(2)
        node.replace_input_with(1, Writer(node).constant(f"{inner}__axes", np.zeros(1, np.int64)))
        node.outputs[0].shape = ir.Shape([1, *axes])


def declare_free(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that takes batches of any size, if its other shapes follow the inputs."""
    freed = copy.deepcopy(proto)
    graph = freed.graph
    _free_reshapes(graph, read_contract(graph).batch, static_tensors(graph))
    for value in graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    return freed


def _free_reshapes(graph: onnx.GraphProto, fixed: int | None, static: set[str]) -> None:
    """Write 0, which copies the batch size, in a Reshape's constant shape that begins with `fixed`.

    A shape of one axis stays.

    Args:
        fixed: the declared batch size; None for a free one, with which all shapes stay.
        static: tensors that depend on no sample; their Reshapes stay.
    """
    constants = Links(graph).constants
    for node in graph.node:
        if node.op_type != "Reshape" or node.input[1] not in constants:
            continue
        dims = numpy_helper.to_array(constants[node.input[1]]).copy()
        if node.output[0] not in static and dims.ndim == 1 and len(dims) > 1 and dims[0] == fixed:
            dims[0] = 0
            _set_target(graph, node, dims)


def _set_target(graph: onnx.GraphProto, node: onnx.NodeProto, dims: NDArray[np.int64]) -> None:
    """Give a Reshape or Expand a new constant shape; other nodes may share the old constant.

    For a Reshape, a 0 then copies the input's size, even if the exporter set `allowzero`.
    """
    normalization.drop_attribute(node, "allowzero")
    tensor = numpy_helper.from_array(dims, f"{node.name}__shape")
    graph.initializer.append(tensor)
    node.input[1] = tensor.name


def zeros(sample: SampleArray, size: int) -> SampleArray:
    """Return `size` samples of zeros in the form of `sample`."""
    return np.zeros((size, *sample.shape[1:]), sample.dtype)


def _shortened(feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the inputs; those in `names` get another length.

    Their second axis becomes shorter by one, or twice as long if its size is 1.
    """
    shorter = dict(feeds)
    for name in names:
        values = feeds[name]
        if values.shape[1] > 1:
            shorter[name] = values[:, :-1]
        else:
            shorter[name] = np.concatenate([values, values], axis=1)
    return shorter


def _parameter(node: onnx.NodeProto) -> str:
    """Return the name of a node's target shape or indices; empty if it has none."""
    index = _SHAPED.get(node.op_type)
    return "" if index is None else input_at(node, index)


def _replace_tensor(
    graph: onnx.GraphProto,
    name: str,
    producer: onnx.NodeProto,
    shaped: Sequence[onnx.NodeProto],
    tensors: Sequence[Mapping[str, NDArray[Any]]],
    any_length: bool,
) -> None:
    """Replace a tensor by a constant or by repeated rows, or else fix the nodes that it shapes.

    Args:
        producer: the node that computes the tensor.
        shaped: nodes with this tensor as target shape or indices.
        tensors: values by name, for each batch size, then for another length if `any_length`.
    """
    values = [by_name[name] for by_name in tensors]
    if all(np.array_equal(values[0], value) for value in values[1:]):
        _remove_output(producer, name)
        graph.initializer.append(numpy_helper.from_array(values[0], name))
        return
    by_length = any_length and not np.array_equal(values[0], values[-1])
    by_batch = values[:-1] if any_length else values
    block = _find_block(by_batch)
    if block is not None and not by_length:
        _remove_output(producer, name)
        _repeat_rows(graph, name, block)
        return
    for node in shaped:
        _fix_shaped(graph, node, tensors, any_length=any_length)


def _leave_out(nodes: Sequence[onnx.NodeProto], name: str) -> None:
    """Remove an empty tensor from the inputs of each Concat that has others, in place.

    The output stays the same. ONNX Runtime's 8-bit Concat crashes on an empty input (1.31).
    """
    for node in nodes:
        kept = [used for used in node.input if used != name]
        if node.op_type == "Concat" and kept:
            node.input[:] = kept


def _remove_output(producer: onnx.NodeProto, name: str) -> None:
    """Remove a tensor from the outputs of its producer; the others keep their positions."""
    for index, output in enumerate(producer.output):
        if output == name:
            producer.output[index] = ""


def _find_block(values: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """Return the rows that these tensors repeat for every sample; None without such rows.

    Args:
        values: the tensor's values for each of `SIZES`, or for one size.
    """
    has_scalar = any(value.ndim == 0 for value in values)
    if len(values) < len(SIZES) or has_scalar:
        return None
    # The rows of one sample must give every tensor when repeated
    count = len(values[0]) // SIZES[0]
    block = values[0][:count]
    if not block.size:
        return None
    for value, size in zip(values, SIZES, strict=True):
        if not np.array_equal(value, np.concatenate([block] * size)):
            return None
    return block


def _repeat_rows(graph: onnx.GraphProto, name: str, block: NDArray[Any]) -> None:
    """Compute a tensor from constant rows, repeated for each sample of the first input."""
    # Expand a new first axis to the batch size, then join it with the rows
    constants = {
        "zero": np.zeros(1, np.int64),
        "ones": np.ones(block.ndim, np.int64),
        "block": block[np.newaxis],
        "target": np.array([-1, *block.shape[1:]]),
    }
    for part, value in constants.items():
        graph.initializer.append(numpy_helper.from_array(value, f"{name}__{part}"))
    steps = [
        ("Shape", [graph.input[0].name], f"{name}__shape", {}),
        ("Gather", [f"{name}__shape", f"{name}__zero"], f"{name}__count", {"axis": 0}),
        ("Concat", [f"{name}__count", f"{name}__ones"], f"{name}__repeats", {"axis": 0}),
        ("Expand", [f"{name}__block", f"{name}__repeats"], f"{name}__repeated", {}),
        ("Reshape", [f"{name}__repeated", f"{name}__target"], name, {}),
    ]
    for index, (kind, inputs, output, attributes) in enumerate(steps):
        graph.node.insert(index, helper.make_node(kind, inputs, [output], output, **attributes))


def _fix_shaped(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    tensors: Sequence[Mapping[str, NDArray[Any]]],
    any_length: bool,
) -> None:
    """Give a node a constant shape or scales, if they serve all sizes; otherwise the node stays.

    A Gather or GatherND that reads every element in order becomes a Reshape. A Resize gets scales
    in place of sizes.
    """
    before = []  # the shape of the input, for each size
    shapes = []  # the target shape, for each size
    for values in tensors:
        data = values[node.input[0]]
        before.append(data.shape)
        shapes.append(_find_shape(node, data, values[_parameter(node)]))
    ranks = {len(shape) for shape in shapes}
    if len(ranks) > 1 or 0 in ranks:
        return

    # Compare the shapes before and after the node
    keeps_rows = True
    same_rank = True
    for old, new in zip(before, shapes, strict=True):
        keeps_rows = keeps_rows and old[:1] == (new[0],)
        same_rank = same_rank and len(old) == len(new)
    by_batch, by_length = _find_varying(shapes, any_length)
    dims = np.array(shapes[0], np.int64)

    # An Expand or Resize may only vary with the batch size, along the first axis
    if node.op_type in ("Expand", "Resize"):
        if by_batch != [0] or by_length or not keeps_rows or not same_rank:
            return
        if node.op_type == "Expand":
            dims[0] = 1  # Expand takes the batch size from the input
            _set_target(graph, node, dims)
        else:
            _set_scales(graph, node, before[0], dims.tolist())
        return

    # The rest fixes a Reshape, which may have at most one free axis
    if keeps_rows and by_batch == [0] and (by_length or (dims == -1).any()):
        by_batch = []
        dims[0] = 0  # copies the size of the Reshape's input
    elif (dims == -1).any():
        # The size that the -1 stands for may vary with the batch or the length, too
        shapes = [_fill_in(new, old) for old, new in zip(before, shapes, strict=True)]
        by_batch, by_length = _find_varying(shapes, any_length)
        dims = np.array(shapes[0], np.int64)
    varying = by_batch + by_length
    if len(varying) > 1 or (varying and (dims == -1).any()):
        return
    dims[varying] = -1
    node.op_type = "Reshape"
    del node.attribute[:]
    _set_target(graph, node, dims)


def _fill_in(shape: NDArray[np.int64], before: Sequence[int]) -> NDArray[np.int64]:
    """Return a target shape with the size that its -1 means for an input of shape `before`."""
    copied = shape.copy()  # each 0 copies a size of the input
    for axis in np.flatnonzero(shape == 0).tolist():
        copied[axis] = before[axis]
    size = -math.prod(before) // np.prod(copied)  # the product includes the -1
    return np.where(shape == -1, size, shape)


def _set_scales(
    graph: onnx.GraphProto, node: onnx.NodeProto, before: Sequence[int], after: Sequence[int]
) -> None:
    """Replace a Resize's sizes, which contain the batch size, by scales, in place."""
    scales = np.array(after, np.float32) / np.array(before, np.float32)
    # Raise a scale whose product with the size is rounded down to less than the new size
    low = np.floor(np.array(before, np.float32) * scales) < after
    scales[low] = np.nextafter(scales[low], np.float32(np.inf))
    tensor = numpy_helper.from_array(scales, f"{node.name}__scales")
    graph.initializer.append(tensor)
    node.input[2] = tensor.name
    del node.input[3:]


def _find_varying(shapes: Sequence[NDArray[Any]], any_length: bool) -> tuple[list[int], list[int]]:
    """Return the axes that vary with the batch size, and the axes that vary with the length."""
    differs = [np.flatnonzero(shapes[0] != shape).tolist() for shape in shapes[1:]]
    by_length = differs.pop() if any_length else []
    by_batch = differs[0] if differs else []
    return by_batch, by_length


def _find_shape(
    node: onnx.NodeProto, data: NDArray[Any], parameter: NDArray[Any]
) -> NDArray[np.int64]:
    """Return a node's target shape; of a Gather or GatherND, the shape of its output.

    The shape is empty if such a node does not read every element in order. Transformers read their
    masks in this order, by indices of each sample and position.
    """
    if node.op_type not in ("Gather", "GatherND"):
        return parameter

    # Compare the indices with those of every element
    indices = parameter
    if node.op_type == "Gather":  # equals a GatherND of one axis
        indices = parameter[..., np.newaxis]
    depth = indices.shape[-1]
    every = np.indices(data.shape[:depth]).reshape(depth, -1).T
    other = attribute(node, "batch_dims", 0) or attribute(node, "axis", 0)
    if other or not np.array_equal(indices.reshape(-1, depth), every):
        return np.empty(0, np.int64)
    return np.array([*indices.shape[:-1], *data.shape[depth:]], np.int64)


def _name_batch(batch: int | None) -> int | str:
    """Return the batch size for a declared shape; N for a free size."""
    return "N" if batch is None else batch


def _set_shape(value: onnx.ValueInfoProto, sizes: Sequence[int | str]) -> None:
    """Declare the sizes of an input or output; a text names a free size."""
    shape = value.type.tensor_type.shape
    del shape.dim[:]
    for size in sizes:
        if isinstance(size, str):
            shape.dim.add(dim_param=size)
        else:
            shape.dim.add(dim_value=size)
