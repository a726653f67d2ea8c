"""Converts ONNX graphs to torch modules, mostly by onnx2torch, and runs them.

`name_tensors` names the ONNX tensors that the nodes of a traced torch module compute.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.core.records import names_of, unpack
from resnet8ptq.graph import torch_operators, torch_recurrent
from resnet8ptq.graph.layers import float_tensors, is_relu
from resnet8ptq.graph.links import Links, input_names
from resnet8ptq.graph.session import expose, open_runner
from resnet8ptq.graph.torch_constants import fix_constants
from resnet8ptq.graph.torch_imports import import_onnx2torch
from resnet8ptq.graph.torch_lowering import OWN, ease, lower
from resnet8ptq.graph.torch_operators import Fixed


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
    onnx2torch = import_onnx2torch()
    lowered = copy.deepcopy(proto)
    ease(lowered.graph)
    torch_recurrent.drop_zero_states(lowered.graph)
    own = torch_operators.find_modules(lowered)
    lower(lowered, own)
    with errors_as(UnsupportedError, "onnx2torch cannot convert the network"):
        module = onnx2torch.convert(lowered)

    # Replace modules of onnx2torch by those of this package
    for node in module.graph.find_nodes(op="call_module"):
        node.target = node.target.removeprefix(f"{OWN}/")  # onnx2torch adds the domain
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
    fix_constants(module, of_floats)
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
    list if there are several such nodes. `torch.jit.trace` warns about a list.
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


def name_tensors(
    traced: Any, paths: Mapping[str, str], graph: onnx.GraphProto, fused: Collection[str] = ()
) -> dict[str, str]:
    """Map each traced node that computes a tensor of the ONNX graph to the tensor's name.

    Of several outputs of an ONNX node, only the first counts.

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
