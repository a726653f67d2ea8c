"""Converts ONNX graphs to torch modules, mostly by onnx2torch, and runs them.

The module also names the ONNX tensors that the nodes of a traced torch module compute.
"""

import copy
import importlib
import math
import sys
import types
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial, reduce
from inspect import signature
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import defs

from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.core.records import names_of, unpack
from resnet8ptq.graph import torch_operators, torch_recurrent
from resnet8ptq.graph.embeddings import round_rows
from resnet8ptq.graph.layers import float_tensors, is_relu
from resnet8ptq.graph.links import Links, input_at, input_names
from resnet8ptq.graph.session import expose, open_runner
from resnet8ptq.graph.shapes import infer_shapes
from resnet8ptq.graph.torch_operators import Fixed

_PASSING = (  # operators that only reshape or cast a number
    "OnnxCast",
    "OnnxSqueezeStaticAxes",
    "OnnxSqueezeDynamicAxes",
    "_squeeze",
    "OnnxUnsqueezeStaticAxes",
)
_CONSTANTS = "initializers"  # onnx2torch's module of constants
_OWN = "own"  # the domain of nodes for which `torch_operators` has a module
_TO_THE_END = 2**31 - 1  # the end of a Slice from which on it means the end of the axis
_OPSET = 17  # the newest opset in which onnx2torch supports every common operator


def as_tensors(samples: NDArray[Any]) -> tuple[torch.Tensor, ...]:
    """Return samples as arguments of a module: one tensor, or one for each field of records."""
    if not names_of(samples.dtype):
        return (torch.from_numpy(samples),)
    return tuple(map(torch.from_numpy, unpack(samples).values()))


def infer(module: Any, batch: NDArray[Any]) -> list[NDArray[np.float32]]:
    """Return each output of `module` for a batch, in order, as an array.

    Quantized outputs are dequantized.

    Args:
        module: a torch module, quantized or not, that takes the network's inputs in order.
    """
    with torch.inference_mode():
        outputs = module(*as_tensors(batch))
        if not isinstance(outputs, list | tuple):
            outputs = [outputs]
        return [_to_array(output) for output in outputs]


def _to_array(tensor: torch.Tensor) -> NDArray[np.float32]:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    array: NDArray[np.float32] = tensor.numpy()
    return array


def load_torch_module(onnx_path: Path) -> Any:
    """Return the network as a `torch.fx.GraphModule` in evaluation mode.

    Raises:
        UnsupportedError: onnx2torch cannot convert the graph, mostly for lack of an operator.
    """
    # Do not pass the path: onnx2torch would write files beside it, into the cache.
    return to_torch_module(onnx.load(onnx_path))


def to_torch_module(proto: onnx.ModelProto) -> Any:
    """Return a graph as a torch module, see `load_torch_module`; `proto` does not change.

    The modules of `torch_operators` replace those of onnx2torch.
    """
    onnx2torch = _import_onnx2torch()
    lowered = copy.deepcopy(proto)
    _ease(lowered.graph)
    torch_recurrent.drop_zero_states(lowered.graph)
    own = torch_operators.find_modules(lowered)
    _lower(lowered, own)
    with errors_as(UnsupportedError, "onnx2torch cannot convert the network"):
        module = onnx2torch.convert(lowered)

    # Replace modules of onnx2torch by those of this package
    for node in module.graph.find_nodes(op="call_module"):
        node.target = node.target.removeprefix(f"{_OWN}/")  # onnx2torch adds the domain
    floats = {*float_tensors(proto)}
    of_floats = set()  # the names of the nodes that compute floats
    for node in lowered.graph.node:
        if not floats.isdisjoint(node.output):
            of_floats.add(node.name)
        if node.op_type in _REDUCED:
            own[node.name] = Fixed(_REDUCED[node.op_type])
    for name, layer in own.items():
        module.set_submodule(name, layer)
    _fix_outputs(module.graph, lowered.graph)
    _fix_constants(module, of_floats)
    return module.eval()


def find_difference(
    proto: onnx.ModelProto, batch: NDArray[Any], tolerance: float
) -> onnx.NodeProto | None:
    """Return the first node whose first output differs from ONNX Runtime's; None without one.

    A node is compared only if the torch module has a submodule for it.

    Args:
        proto: a graph whose nodes all have names.
        tolerance: the accepted difference, relative to the tensor's largest absolute value.
    """
    module = to_torch_module(proto)
    computed = {}  # the first output of each submodule, by the node's name

    def keep(name: str, layer: Any, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        computed[name] = first.numpy()

    for name, layer in module.named_modules():
        layer.register_forward_hook(partial(keep, name))
    infer(module, batch)

    # Compare each node that is still a module
    nodes = []
    outputs = []
    for node in proto.graph.node:
        if node.name in computed:
            nodes.append(node)
            outputs.append(node.output[0])
    run = open_runner(expose(proto, outputs))
    for node, expected in zip(nodes, run(batch), strict=True):
        got = computed[node.name]
        limit = tolerance * np.abs(expected).max(initial=0)
        if got.shape != expected.shape or not np.allclose(got, expected, 0, limit):
            return node
    return None


def _fix_outputs(traced: Any, graph: onnx.GraphProto) -> None:
    """Make a traced module return the outputs of its ONNX graph, in a tuple if there are several.

    onnx2torch instead returns every output of the nodes that compute outputs of the graph, in a
    list if there are several such nodes. `torch.jit.trace` expects a tuple.
    """
    producers = Links(graph).producers
    calls = {node.target: node for node in traced.find_nodes(op="call_module")}
    (returned,) = traced.find_nodes(op="output")
    outputs = []
    with traced.inserting_before(returned):
        for value in graph.output:
            producer = producers[value.name]
            output = calls[producer.name]
            if len(producer.output) > 1:
                index = list(producer.output).index(value.name)
                output = traced.call_function(getitem, (output, index))
            outputs.append(output)
    result = outputs[0] if len(outputs) == 1 else tuple(outputs)
    returned.args = (result,)


_COUNTED = "num_outputs"  # of Split, since opset 18; the node's outputs give the same number


def _lower(lowered: onnx.ModelProto, own: Mapping[str, torch.nn.Module]) -> None:
    """Mark the nodes of `own`, and lower a newer opset to `_OPSET` if the operators allow it.

    The graph changes in place. Later opsets mostly add types to operators. They also let
    reductions take their axes as an input, and have an operator Gelu.

    Args:
        own: the modules of `torch_operators`, by the names of the nodes that they replace.
    """
    if own:
        _mark(lowered, own)
    version = max(entry.version for entry in lowered.opset_import if not entry.domain)
    if version <= _OPSET:
        return
    nodes = list(lowered.graph.node)
    original = copy.deepcopy(nodes)

    # Write each node as the older opset defines it
    _set_opset(lowered, _OPSET)
    constants = Links(lowered.graph).constants
    del lowered.graph.node[:]
    for node in nodes:
        axes = _find_second(node, constants)
        is_reduction = node.op_type.startswith("Reduce") and node.op_type != "ReduceSum"
        if is_reduction and axes is not None and math.prod(axes.dims):  # no attribute is empty
            _lower_reduction(node, axes)
        for item in list(node.attribute):
            if _is_dispensable(node, item, version):
                node.attribute.remove(item)
        if node.op_type == "Gelu":
            lowered.graph.node.extend(_to_erf(node, lowered.graph))
        else:
            lowered.graph.node.append(node)

    # Restore the graph if the older opset lacks something
    try:
        onnx.checker.check_model(lowered)
    except onnx.checker.ValidationError:
        _set_opset(lowered, version)
        del lowered.graph.node[:]
        lowered.graph.node.extend(original)


def _lower_reduction(reduction: onnx.NodeProto, axes: onnx.TensorProto) -> None:
    """Turn the axes of a reduction from an input into an attribute, in place."""
    kept = [item for item in reduction.attribute if item.name == "keepdims"]
    values = onnx.numpy_helper.to_array(axes).tolist()
    del reduction.attribute[:], reduction.input[1:]
    reduction.attribute.extend([*kept, onnx.helper.make_attribute("axes", values)])


def _ease(graph: onnx.GraphProto) -> None:
    """Name nodes without a name, and rewrite forms that onnx2torch or torch refuses, in place.

    onnx2torch misreads an empty name at the end of a node's inputs as a tensor. It refuses axes
    that are a single number, which exporters write. It also refuses a Clip without a minimum.
    torch's quantized clamp refuses a Clip with a single bound.
    """
    constants = Links(graph).constants
    for index, node in enumerate(graph.node):
        node.name = node.name or f"unnamed_{index}"
        while node.input and not node.input[-1]:
            del node.input[-1]

        # Write a single axis as a list, and a single bound as Max or Min
        axes = _find_second(node, constants)
        if node.op_type in ("Squeeze", "Unsqueeze") and axes is not None and not axes.dims:
            node.input[1] = f"{node.name}__axes"
            values = onnx.numpy_helper.to_array(axes).reshape(1)
            graph.initializer.append(onnx.numpy_helper.from_array(values, node.input[1]))
        if node.op_type == "Clip" and not is_relu(node, constants):
            _ease_clip(node)


def _ease_clip(clip: onnx.NodeProto) -> None:
    """Turn a Clip with a single bound into a Max or a Min, in place."""
    lowest = input_at(clip, 1)
    highest = input_at(clip, 2)
    if lowest and not highest:
        clip.op_type = "Max"
        clip.input[1:] = [lowest]
    elif highest and not lowest:
        clip.op_type = "Min"
        clip.input[1:] = [highest]


def _find_second(
    node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]
) -> onnx.TensorProto | None:
    """Return the second input of a node, such as axes; None if it is missing or computed."""
    return constants.get(input_at(node, 1))


def _mark(proto: onnx.ModelProto, own: Mapping[str, torch.nn.Module]) -> None:
    """Move the nodes of `own` to the domain `_OWN`, in place.

    onnx cannot infer shapes in this domain, so the outputs' shapes are first declared.
    """
    graph = proto.graph
    marked = []
    unknown: set[str] = set()  # outputs of marked nodes that have no declared shape yet
    for node in graph.node:
        if node.name in own:
            marked.append(node)
            unknown.update(node.output)
    for value in (*graph.value_info, *graph.output):
        unknown.discard(value.name)
    for value in infer_shapes(proto).value_info:
        if value.name in unknown:
            graph.value_info.append(value)

    # Give each marked node the inputs that its module takes, and no attributes
    proto.opset_import.append(onnx.helper.make_opsetid(_OWN, 1))
    for node in marked:
        node.domain = _OWN
        node.op_type = _OWN
        del node.attribute[:]
        takes = getattr(own[node.name], "takes", Fixed.takes)
        taken = []
        for index, name in enumerate(node.input):
            if name and index in takes:
                taken.append(name)
        node.input[:] = taken


def _set_opset(proto: onnx.ModelProto, version: int) -> None:
    for entry in proto.opset_import:
        if not entry.domain:
            entry.version = version


def _is_dispensable(node: onnx.NodeProto, item: onnx.AttributeProto, version: int) -> bool:
    """Return whether the older opset lacks an attribute, and the node computes the same without it.

    This holds for attributes with their default value, and for Split's number of outputs.
    """
    name = node.op_type
    if node.domain or not defs.has(name, _OPSET):
        return False
    if item.name in defs.get_schema(name, _OPSET).attributes:
        return False
    if item.name == _COUNTED:
        return True
    default = defs.get_schema(name, version).attributes[item.name].default_value
    value = onnx.helper.get_attribute_value
    return bool(default.name) and value(default) == value(item)


def _to_erf(gelu: onnx.NodeProto, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes of `x * (0.5 + 0.5 * erf(x / sqrt(2)))`; add their constants to `graph`."""
    name = gelu.name
    [source] = gelu.input

    # Store the two constants, then write a node for each step
    root = f"{name}__root"
    half = f"{name}__half"
    for key, value in ((root, 2**-0.5), (half, 0.5)):
        graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), key))
    steps = [
        ("Mul", [source, root], f"{name}__scaled"),
        ("Erf", [f"{name}__scaled"], f"{name}__erf"),
        ("Mul", [f"{name}__erf", half], f"{name}__halved"),
        ("Add", [f"{name}__halved", half], f"{name}__share"),
    ]
    nodes = []
    for kind, inputs, output in steps:
        nodes.append(onnx.helper.make_node(kind, inputs, [output], output))
    product = onnx.helper.make_node("Mul", [source, f"{name}__share"], gelu.output, name)
    return [*nodes, product]


def name_tensors(
    traced: Any, paths: Mapping[str, str], graph: onnx.GraphProto, fused: Collection[str] = ()
) -> dict[str, str]:
    """Map each traced node that computes a tensor of the ONNX graph to the tensor's name.

    onnx2torch names a module after its ONNX node; the last node traced in it computes the output. A
    convolution with unequal padding before and after an axis becomes two modules, `name.0` and
    `name.1`. The padded tensor gets the name of the tensor before padding.

    Args:
        traced: a `torch.fx.Graph`.
        paths: the name of each traced node's module, by the node's name.
        graph: the ONNX graph.
        fused: names of traced nodes that also compute the Relu after them.
    """
    constants = Links(graph).constants
    kept = {paths.get(node.name) for node in traced.nodes}
    outputs = {}  # the first output of each ONNX node, by the node's name
    relus = {}  # each Relu's output, by its input
    norms = {}  # the same for normalizations that FX folds into the convolution before them
    for node in graph.node:
        outputs[node.name] = node.output[0]
        if is_relu(node, constants):
            relus[node.input[0]] = node.output[0]
        if node.op_type == "BatchNormalization" and node.name not in kept:
            norms[node.input[0]] = node.output[0]

    # The last node that is traced in a module computes the tensor
    last: dict[str, str] = {}  # the last node that is traced for each tensor
    placeholders = iter(input_names(graph))
    for node in traced.nodes:
        path = paths.get(node.name, "")
        tensor = outputs.get(path) or outputs.get(path.removesuffix(".1"))
        if node.op == "placeholder":
            tensor = next(placeholders, None)
        if tensor is None:
            continue
        tensor = norms.get(tensor, tensor)
        if node.name in fused:
            tensor = relus[tensor]
        last[tensor] = node.name
    names = {name: tensor for tensor, name in last.items()}

    # A padded tensor gets the name of the tensor before padding
    for node in traced.nodes:
        if paths.get(node.name, "").endswith(".0"):
            source = node.args[0]
            while source.name not in names:  # the source is an observer
                source = source.args[0]
            names[node.name] = names[source.name]
    return names


def _fix_constants(module: Any, floats: Collection[str]) -> None:
    """Replace modules that read constants at run time by modules with fixed parameters, in place.

    `torch.export` and FX cannot trace onnx2torch's Reshape, Slice and Squeeze, which read their
    shape, bounds and axes at run time. They cannot trace its Div either, which reads the type of
    the operands.

    Quantized kernels also need other forms. Constants become second operands, a Clip with two
    bounds becomes a Hardtanh, and a MatMul with constant weights becomes a Linear. The bias of a
    Linear gets one value for each output.

    Args:
        floats: names of the nodes with float outputs.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_module":
            continue
        layer = module.get_submodule(node.target)
        constants = _find_constants(module, layer, node)
        if isinstance(layer, torch.nn.Linear) and layer.bias is not None:
            bias = layer.bias.expand(layer.out_features)  # a Gemm may broadcast a single value
            layer.bias = torch.nn.Parameter(bias.contiguous())

        # Replace the module, or else only its operation
        fixed = _find_fixed(module, layer, node, constants)
        if fixed is not None:
            replacement, source = fixed
            module.set_submodule(node.target, replacement)
            node.args = (source,)
            node.kwargs = {}
        elif node.target in floats or any(map(torch.is_floating_point, constants.values())):
            _fix_arithmetic(layer, node, constants)
    _remove_unused(module)


def _find_fixed(
    module: Any, layer: Any, node: Any, constants: Mapping[int, torch.Tensor]
) -> tuple[torch.nn.Module, Any] | None:
    """Return a module with fixed parameters, and the only tensor that it takes.

    Returns None if there is no such module for `layer`.
    """
    kind = type(layer).__name__
    if kind == "OnnxGather" and 0 in constants and layer._axis == 0:
        return _Lookup(constants[0]), node.args[1]

    # Fix constants that are cut, repeated or counted by the size of another tensor
    measured = None
    if kind == "OnnxRange":
        measured = _find_counted(module, node, constants)
    elif kind == "OnnxSlice":
        measured = _find_cut(module, node, constants)
    elif kind == "OnnxExpand" and set(constants) == {0}:
        measured = _find_repeat(module, node, constants[0])
        measured = measured or _find_like(module, node, constants[0])
    if measured is not None:
        return measured

    others = len(node.args) + len(node.kwargs) - 1
    all_constant = 0 not in constants and len(constants) == others
    first = _fix_first(kind, layer, constants, all_constant)
    return None if first is None else (first, node.args[0])


def _fix_arithmetic(layer: Any, node: Any, constants: Mapping[int, torch.Tensor]) -> None:
    """Divide by `torch.div`; swap the operands of an Add or Mul whose first one is constant."""
    operation = getattr(layer, "math_op_function", None)
    if getattr(operation, "__name__", "") == "_onnx_div":
        layer.math_op_function = torch.div
    if operation in (torch.add, torch.mul) and set(constants) == {0}:
        node.args = node.args[::-1]  # quantized kernels return the first operand's shape


def _remove_unused(module: Any) -> None:
    """Remove unused nodes, modules and constants, such as weights that a Linear has copied."""
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    used = {node.target for node in module.graph.find_nodes(op="get_attr")}
    for name, _ in list(module.named_buffers()):
        if name.startswith(_CONSTANTS) and name not in used:
            delattr(module.get_submodule(_CONSTANTS), name.removeprefix(f"{_CONSTANTS}."))
    module.recompile()


def _find_constants(module: Any, layer: Any, node: Any) -> dict[int, Any]:
    """Return the constant inputs of a node that calls `layer`, by the input's index."""
    inputs = dict(enumerate(node.args))
    if node.kwargs:  # onnx2torch names the inputs that follow an empty one
        names = list(signature(layer.forward).parameters)
        for name, argument in node.kwargs.items():
            inputs[names.index(name)] = argument
    constants = {}
    for index, argument in inputs.items():
        if argument.op == "get_attr":
            constants[index] = attrgetter(argument.target)(module)
    return constants


def _fix_first(
    kind: str, layer: Any, constants: Mapping[int, torch.Tensor], all_constant: bool
) -> "torch.nn.Module | None":
    """Return a module that takes only the first input; None if there is none for `layer`.

    Args:
        kind: the name of onnx2torch's class of `layer`.
        constants: the constant inputs of `layer`, by index.
        all_constant: whether the first input is computed, and all others are constant.
    """
    if kind == "OnnxReshape" and 1 in constants:
        return Fixed(_reshape, shape=constants[1].tolist())
    if kind == "OnnxFlatten":
        axis = layer.axis  # onnx2torch would return one axis if `axis` is the last
        return Fixed(lambda v: v.unsqueeze(-1).flatten(end_dim=axis - 1).flatten(start_dim=1))
    if kind == "OnnxExpand" and 1 in constants:
        # A size of 1 keeps the input's size in ONNX, a size of -1 in torch
        shape = constants[1].masked_fill(constants[1] == 1, -1).tolist()
        return Fixed(lambda values: values.expand(shape))
    if kind == "OnnxSlice" and all_constant:
        return _fix_slice(constants)
    if kind == "OnnxTile" and all_constant:
        repeats = constants[1].tolist()
        return Fixed(lambda values: values.repeat(repeats))
    if kind == "OnnxSqueezeDynamicAxes" and all_constant:
        axes = tuple(constants[1].tolist()) if 1 in constants else None
        return Fixed(_squeeze, axes=axes)
    if kind in ("OnnxSplit", "OnnxSplit13") and all_constant:
        sizes = constants[1].tolist() if 1 in constants else getattr(layer, "split", None)
        return _fix_split(layer.axis, layer.num_splits, sizes)
    if kind == "OnnxPReLU" and 1 in constants and _is_by_channel(constants[1]):
        return _to_prelu(constants[1])
    if kind == "OnnxClip" and None not in (layer.min_val, layer.max_val):
        # XNNPACK fuses a Hardtanh, but no clamp
        return torch.nn.Hardtanh(layer.min_val, layer.max_val)
    if kind == "OnnxMatMul" and 1 in constants and constants[1].ndim == 2:
        return _to_linear(constants[1])
    if kind == "OnnxGather" and 1 in constants:
        return _fix_gather(layer._axis, constants[1])
    return None


def _to_linear(weights: torch.Tensor) -> torch.nn.Linear:
    """Return a module that multiplies by weights [inputs, outputs]."""
    linear = torch.nn.Linear(*weights.shape, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weights.T.contiguous())
    return linear


def _is_by_channel(slopes: torch.Tensor) -> bool:
    """Return whether only the first or only the second axis of slopes may be larger than 1."""
    return slopes.numel() in (*slopes.shape[:2], 1)


def _to_prelu(slopes: torch.Tensor) -> torch.nn.PReLU:
    """Return the activation with one slope for each channel, or one for all."""
    prelu = torch.nn.PReLU(slopes.numel())
    prelu.weight = torch.nn.Parameter(slopes.reshape(-1).clone())
    return prelu


def quantize_tables(module: Any, names: Collection[str]) -> None:
    """Store the tables of the Gather nodes `names` in 8 bits, in place; see `graph.embeddings`."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, _Lookup) and name in names:
            levels, scale = map(torch.from_numpy, round_rows(layer.weights.detach().numpy()))
            module.set_submodule(name, Fixed(_look_up_rows, levels=levels, scale=scale))


def _fix_split(axis: int, count: int, sizes: list[int] | None) -> Fixed:
    """Return a Split into `count` parts of these sizes.

    Without sizes, the parts are equal, or the last one is smaller. ExecuTorch would fix the batch
    size if the module called torch's split.
    """

    def split(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        length = values.shape[axis]
        known = sizes or [-(-length // count)] * (count - 1)
        starts = [sum(known[:number]) for number in range(count)]
        ends = [*starts[1:], length]
        parts = []
        for start, end in zip(starts, ends, strict=True):
            parts.append(values.narrow(axis, start, end - start))
        return tuple(parts)

    return Fixed(split)


def _fix_slice(constants: Mapping[int, Any]) -> Fixed:
    """Return a Slice with fixed bounds, along axes that may count from the start and the end.

    Args:
        constants: starts, ends, axes and steps by input index, from 1; axes and steps may be
            missing.
    """
    parts = {index: constant.tolist() for index, constant in constants.items()}
    starts = parts[1]
    ends = parts[2]
    axes = parts.get(3, list(range(len(starts))))
    steps = parts.get(4, [1] * len(starts))

    # torch has no negative steps, so such an axis is reversed first
    turned = []
    slices = {}
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        slices[axis] = _part(start, end, step)
        if step < 0:
            turned.append(axis)

    # Index the axes that count from the start, then those that count from the end
    whole = slice(None)
    highest = max(*axes, -1)
    lowest = min(*axes, 0)
    first = [slices.get(axis, whole) for axis in range(highest + 1)]
    last = [slices.get(axis, whole) for axis in range(lowest, 0)]
    indices: list[Any] = []
    if first:
        indices.append(tuple(first))
    if last:
        indices.append((..., *last))

    def cut(values: torch.Tensor) -> torch.Tensor:
        if turned:
            values = values.flip(turned)
        for index in indices:
            values = values[index]
        return values

    return Fixed(cut)


def _part(start: int, end: int, step: int) -> slice:
    """Return the slice of an axis; for a negative `step`, that of the reversed axis."""
    if step < 0:
        start = -start - 1
        end = -end - 1
        step = -step
    if end >= _TO_THE_END:  # a number would bound the batch in `torch.export`
        return slice(start, None, step)
    return slice(start, end, step)


def _fix_gather(axis: int, indices: torch.Tensor) -> Fixed | None:
    """Return a Gather of fixed indices.

    Returns None unless `indices` is a scalar, or has one axis and no negative values.
    """
    if indices.ndim == 0:
        return Fixed(_select, axis=axis, index=int(indices))
    if indices.ndim == 1 and (indices >= 0).all():
        return Fixed(_take, axis=axis, indices=indices)
    return None


def _find_counted(
    module: Any, node: Any, constants: Mapping[int, torch.Tensor]
) -> tuple[Fixed, Any] | None:
    """Return a Range of the positions (0, 1, ...) along a tensor's axis, and the tensor.

    Returns None for other Ranges.
    """
    if set(constants) != {0, 2} or (constants[0], constants[2]) != (0, 1):
        return None
    measured = _find_axis(module, node.args[1])
    if measured is None:
        return None
    source, axis = measured
    return Fixed(_positions, axis=axis), source


def _find_cut(
    module: Any, node: Any, constants: Mapping[int, torch.Tensor]
) -> tuple[Fixed, Any] | None:
    """Return a Slice that cuts constant values to the length of a tensor's axis, and the tensor.

    Returns None for other Slices, and for a Slice without axes.
    """
    if 0 not in constants or 2 in constants or 3 not in constants:
        return None

    # The slice must begin at 0, and keep every value
    unset = torch.ones(1)
    starts = constants.get(1, unset).tolist()
    steps = constants.get(4, unset).tolist()
    if starts != [0] or steps != [1]:
        return None
    measured = _find_axis(module, node.args[2])
    if measured is None:
        return None
    source, counted = measured
    axes = constants[3].tolist()
    return Fixed(_cut, table=constants[0], axis=axes[0], counted=counted), source


def _find_axis(module: Any, size: Any) -> tuple[Any, int] | None:
    """Return the tensor and its axis whose size `size` computes; None for other values.

    Args:
        size: a node of the traced graph.
    """
    axis = 0
    while kind := _kind(module, size):
        layer = module.get_submodule(size.target)
        if kind == "OnnxShape":
            # So far, `axis` counts within the part of the shape that the node returns
            if axis < 0 and layer._end is not None:
                return None
            if axis >= 0:
                axis += layer._start
            return size.args[0], axis
        if kind == "_select":
            axis = layer.index
        elif kind == "_take" and len(layer.indices) == 1:
            axis = int(layer.indices)
        elif kind not in _PASSING:
            return None
        size = size.args[0]
    return None


def _find_repeat(module: Any, expand: Any, values: torch.Tensor) -> tuple[Fixed, Any] | None:
    """Return an Expand of constant values to a batch size, and the tensor of that batch size.

    Returns None unless the shape joins constants and one batch size.
    """
    joined = expand.args[1]
    if _kind(module, joined) == "OnnxWhere":  # exporters replace -1 by 1
        joined = joined.args[2]
    while _kind(module, joined) == "_reshape":
        joined = joined.args[0]
    if _kind(module, joined) != "OnnxConcat":
        return None

    # Collect the constant sizes, with a 1 in place of the batch size
    sizes: list[int] = []
    batches = []
    for part in joined.args:
        if part.op == "get_attr":
            sizes += attrgetter(part.target)(module).clamp(min=1).tolist()
        else:
            batches.append(_find_batch(module, part))
            batch_axis = len(sizes)
            sizes.append(1)
    if len(batches) != 1 or batches[0] is None:
        return None
    shape = torch.broadcast_shapes(values.shape, sizes)
    row = values.expand(shape).contiguous()
    return Fixed(_repeat, row=row, axis=len(shape) - len(sizes) + batch_axis), batches[0]


def _find_batch(module: Any, size: Any) -> Any:
    """Return the tensor whose batch size `size` computes; None for other values.

    Args:
        size: a node of the traced graph.
    """
    while (kind := _kind(module, size)) in ("_take", "_select", "OnnxUnsqueezeStaticAxes"):
        layer = module.get_submodule(size.target)
        index = layer.indices.tolist() if kind == "_take" else getattr(layer, "index", 0)
        if index not in (0, [0]):
            return None
        size = size.args[0]
    if kind != "OnnxShape" or module.get_submodule(size.target)._start:
        return None
    return size.args[0]


def _kind(module: Any, node: Any) -> str:
    """Return the name of a called module's class, or of its function if it is a `Fixed`.

    The name is empty if `node` calls no module, and `?` if the function has no name.
    """
    if node.op != "call_module":
        return ""
    layer = module.get_submodule(node.target)
    named = layer.function if isinstance(layer, Fixed) else type(layer)
    return getattr(named, "__name__", "?")


def _find_like(module: Any, expand: Any, values: torch.Tensor) -> tuple[Fixed, Any] | None:
    """Return an Expand of constant values to the whole shape of a tensor, and the tensor.

    Returns None for other Expands.
    """
    shape = expand.args[1]
    if _kind(module, shape) != "OnnxShape":
        return None
    layer = module.get_submodule(shape.target)
    if layer._start or layer._end:
        return None
    return Fixed(lambda like, values: values.expand_as(like), values=values), shape.args[0]


class _Lookup(torch.nn.Module):  # type: ignore[misc]
    """Looks up rows of fixed `weights`, such as an embedding table."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(weights, requires_grad=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.weights[indices]


# Functions for `Fixed`.


def _look_up_rows(indices: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return rows of an 8-bit table as floats; each row has a scale, see `graph.embeddings`."""
    return levels[indices].to(torch.float32) * scale[indices]


def _select(values: torch.Tensor, axis: int, index: int) -> torch.Tensor:
    return values.select(axis, index)


def _take(values: torch.Tensor, axis: int, indices: torch.Tensor) -> torch.Tensor:
    return values.index_select(axis, indices)


def _squeeze(values: torch.Tensor, axes: tuple[int, ...] | None) -> torch.Tensor:
    return values.squeeze() if axes is None else values.squeeze(axes)


def _reduce(operation: Callable[..., torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
    """Combine tensors two at a time, which FX can trace."""
    return reduce(operation, values)


def _mean(*values: torch.Tensor) -> torch.Tensor:
    return reduce(torch.add, values) / len(values)


_REDUCED: dict[str, Callable[..., torch.Tensor]] = {
    "Max": partial(_reduce, torch.maximum),
    "Min": partial(_reduce, torch.minimum),
    "Sum": partial(_reduce, torch.add),
    "Mean": _mean,
}


def _positions(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the positions 0, 1, ... along an axis, int64 [size].

    The size stays dynamic in FX, export and tracing.
    """
    return torch.cumsum(torch.ones_like(_line(values, axis), dtype=torch.int64), 0) - 1


def _cut(values: torch.Tensor, table: torch.Tensor, axis: int, counted: int) -> torch.Tensor:
    """Return a table, such as embeddings of positions, cut to the size of an axis of `values`.

    Args:
        axis: the axis of `table` to cut.
        counted: the axis of `values`.
    """
    return table.index_select(axis, _positions(values, counted))


def _line(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the values along an axis, at index 0 of all other axes: [size]."""
    rows = values.transpose(0, axis)
    return rows.reshape(rows.shape[0], -1).select(1, 0)


def _repeat(values: torch.Tensor, row: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a row, such as a class token, repeated along `axis` for each sample of `values`.

    Args:
        row: a tensor of size 1 along `axis`.
    """
    return row.index_select(axis, torch.zeros_like(_line(values, 0), dtype=torch.int64))


def _reshape(values: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Reshape values; a size of 0 copies the input's size on that axis."""
    sizes = []
    for axis, size in enumerate(shape):
        sizes.append(size or values.shape[axis])
    return torch.reshape(values, sizes)


# torchvision registers shape functions for these operators even if the operators are missing.
_TORCHVISION_OPERATORS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@cache
def import_torchvision() -> None:
    """Import torchvision, if installed, so that a user's module can import it too.

    With a CPU build of torch, the compiled operators of pip's torchvision may not load. The import
    of torchvision then fails on `nms` or `qnms`, so both are declared here without a kernel. If a
    network calls one, torchvision's error says to reinstall torchvision.

    Raises:
        RuntimeError: the import fails for another reason.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if not any(name in str(error) for name in _TORCHVISION_OPERATORS):
            raise
        for name, schema in _TORCHVISION_OPERATORS.items():
            torch.library.define(name, schema)
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass  # a module that needs torchvision fails with its own message


@cache
def _import_onnx2torch() -> types.ModuleType:
    """Import onnx2torch without torchvision, unless torchvision is already imported.

    onnx2torch imports torchvision for two operators of object detectors, RoiAlign and
    NonMaxSuppression. The import takes a second and may fail (see `import_torchvision`). Without
    torchvision, both operators raise NotImplementedError.
    """
    # Stand-ins for the modules and functions that onnx2torch imports
    torchvision = types.ModuleType("torchvision")
    operators = types.ModuleType("torchvision.ops")
    torchvision.__dict__["ops"] = operators
    for operator in ("roi_align", "nms", "box_convert"):
        operators.__dict__[operator] = _refuse
    stubs = {}
    for stub in (torchvision, operators):
        if stub.__name__ not in sys.modules:
            stubs[stub.__name__] = stub
    sys.modules.update(stubs)
    try:
        onnx2torch = importlib.import_module("onnx2torch")
        _add_converters()
        return onnx2torch
    finally:
        for name in stubs:
            del sys.modules[name]


def _add_converters() -> None:
    """Register placeholders for the nodes of `torch_operators`, and two comparisons of opset 16."""
    from onnx2torch.node_converters.registry import add_converter, get_converter
    from onnx2torch.utils.common import OperationConverterResult, onnx_mapping_from_node

    for kind in ("GreaterOrEqual", "LessOrEqual"):
        add_converter(operation_type=kind, version=16)(get_converter(kind, 12))

    @add_converter(operation_type=_OWN, version=1, domain=_OWN)  # type: ignore[untyped-decorator]
    def _(node: Any, graph: Any) -> Any:
        return OperationConverterResult(torch.nn.Identity(), onnx_mapping_from_node(node))


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("RoiAlign and NonMaxSuppression are not supported")
