"""Runs ONNX graphs, and parts of them, in sessions of ONNX Runtime on the CPU."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from resnet8ptq.core import memory
from resnet8ptq.core.records import feed
from resnet8ptq.graph.footprint import tensor_bytes
from resnet8ptq.graph.links import Links, input_names, inputs_of, output_names

OPTIMIZED = "optimized.onnx"
_PASSES_ON = ("QuantizeLinear", "DequantizeLinear", "Identity")

# Maps samples, which are records for several inputs, to the outputs.
Runner = Callable[[NDArray[Any]], list[NDArray[Any]]]


def open_session(
    model: str | bytes,
    threads: int,
    traced: Path | None = None,
    optimized: bool = True,
    arena: bool = True,
    spins: bool = True,
    without: Sequence[str] = (),
) -> onnxruntime.InferenceSession:
    """Load a model from a file's path or from its content.

    Args:
        threads: number of threads; 0 for all cores.
        traced: a folder for timing the nodes; None without timing. The session's `end_profiling`
            writes a trace there, and the optimized graph is written as `OPTIMIZED`.
        optimized: whether the graph is optimized; otherwise layers of QDQ graphs run in float.
        arena: whether memory is kept between runs; False for large tensors.
        spins: whether threads wait for work in a busy loop, ONNX Runtime's default. This shortens
            the latency of small networks, but occupies the cores between two runs.
        without: names of ONNX Runtime's optimizers to disable.
    """
    options = onnxruntime.SessionOptions()
    if not optimized:
        none = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.graph_optimization_level = none
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1  # nodes run one after the other
    options.enable_cpu_mem_arena = arena
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    options.log_severity_level = 4  # errors are raised anyway
    if traced is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(traced / "trace")
        options.optimized_model_filepath = str(traced / OPTIMIZED)
    return onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], disabled_optimizers=[*without]
    )


def open_runner(
    model: str | bytes | onnx.ModelProto,
    threads: int = 0,
    arena: bool = True,
    spins: bool = False,
    optimized: bool = True,
    without: Sequence[str] = (),
) -> Runner:
    """Load a model as a function of samples; for the arguments see `open_session`.

    The function takes one input as an array, or several as records, and returns the outputs in
    their order. By default, its threads do not spin.

    >>> import numpy as np
    >>> proto = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     add (float[n, 2] x) => (float[n, 2] y) { y = Add(x, x) }''')
    >>> run = open_runner(proto, threads=1)
    >>> [output.tolist() for output in run(np.ones((1, 2), np.float32))]
    [[[2.0, 2.0]]]
    """
    content = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    session = open_session(
        content, threads, optimized=optimized, arena=arena, spins=spins, without=without
    )
    names = session_inputs(session)
    return lambda batch: session.run(None, feed(batch, names))


def session_inputs(session: onnxruntime.InferenceSession) -> list[str]:
    """Return the names of a session's inputs, in their order."""
    return [value.name for value in session.get_inputs()]


def fit_batch(runners: Sequence[Runner], sample: NDArray[Any]) -> int:
    """Return how many samples, with their outputs, fit into a step's memory budget; at least 1.

    Args:
        runners: functions of the same samples, whose outputs are kept together.
        sample: one sample, [1, ...].
    """
    size = sample.nbytes
    for run in runners:
        for output in run(sample):
            size += output.nbytes
    return memory.fitting(size, memory.step())


def group_by_memory(proto: onnx.ModelProto, names: Sequence[str]) -> list[list[str]]:
    """Split tensors into groups that fit into a step's memory budget, or hold one large tensor.

    A free axis counts as 1, and a tensor of unknown shape as 0 bytes. A step that reads many inner
    tensors computes one group at a time.
    """
    sizes = tensor_bytes(proto)
    groups = memory.in_groups([sizes.get(name, 0) for name in names], memory.step())
    return [list(names[part]) for part in groups]


def between(proto: onnx.ModelProto, source: str, names: Sequence[str]) -> onnx.ModelProto:
    """Return the part of a graph that computes tensors from `source` and the graph's inputs.

    Args:
        source: the tensor to start from; empty to start from the graph's inputs only. An inner
            tensor becomes an input if the part reads it.
        names: the outputs of the part.
    """
    graph = proto.graph
    needed = {*names}
    nodes = []
    for node in reversed(graph.node):
        outputs = set(filter(None, node.output))  # an omitted output has no name
        if source not in outputs and not needed.isdisjoint(outputs):
            nodes.append(node)
            needed.update(inputs_of(node))

    # Make a model of the nodes, with their inputs and constants
    part = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    part.graph.name = graph.name
    part.graph.node.extend(reversed(nodes))
    for tensor in graph.initializer:
        if tensor.name in needed:
            part.graph.initializer.append(tensor)
    for value in graph.input:
        if value.name in needed or value.name == source:
            part.graph.input.append(value)
    if source in needed and source not in input_names(graph):
        part.graph.input.append(helper.make_tensor_value_info(source, TensorProto.FLOAT, None))
    _set_outputs(part.graph, names)
    return part


def _set_outputs(graph: onnx.GraphProto, names: Sequence[str]) -> None:
    """Make these tensors the graph's outputs, in place; ONNX Runtime infers types and shapes."""
    del graph.output[:]
    for name in names:
        graph.output.append(onnx.ValueInfoProto(name=name))


def keep_apart(proto: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy in which ONNX Runtime fuses no reader of these tensors into their producers.

    Fusion changes the last bits of values. ONNX Runtime keeps a tensor that is an output, or that a
    node outside of the fusion reads. Such a node is therefore added for each tensor that is no
    output. The node's result, the tensor's size, is a further output of the copy. The producer may
    still be fused with the node before it.
    """
    nodes = list(proto.graph.node)
    apart = copy.deepcopy(proto)
    inner = {*names}.difference(output_names(proto.graph))
    del apart.graph.node[:]
    for node in nodes:
        apart.graph.node.append(node)
        for name in inner.intersection(node.output):
            size = f"{name}__size"
            apart.graph.node.append(helper.make_node("Size", [name], [size], size))
            apart.graph.output.append(onnx.ValueInfoProto(name=size))
    return apart


def expose(proto: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy whose outputs are these tensors, for steps that read inner values."""
    exposed = copy.deepcopy(proto)
    _set_outputs(exposed.graph, names)
    return exposed


def cut_at(proto: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy in which no tensor of `names` depends on another.

    The inputs of the copy are the graph's inputs and all of `names`, which are float32 tensors that
    nodes compute. The outputs have the values of `names`, each computed from these inputs.
    """
    cut = copy.deepcopy(proto)
    graph = cut.graph
    alone = {name: f"{name}/alone" for name in names}
    for node in graph.node:
        node.output[:] = [alone.get(name, name) for name in node.output]
    del graph.value_info[:]
    for name in names:
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    _set_outputs(graph, list(alone.values()))
    return cut


def end_at_logits(proto: onnx.ModelProto) -> bool:
    """Make the final softmax's input, as floats, the only output; return whether the graph changed.

    A softmax would hide effects of quantization. A graph without a final softmax, or with several
    outputs, stays unchanged. The softmax is removed unless other nodes read it; these nodes stay,
    although no output needs them.
    """
    graph = proto.graph
    softmax = _find_final_softmax(graph)
    if softmax is None:
        return False

    # The softmax's input becomes the output; a float softmax has its type and shape
    name = softmax.input[0]
    if softmax.op_type == "QLinearSoftmax":  # its input is rounded
        graph.node.append(helper.make_node("DequantizeLinear", softmax.input[:3], ["logits"]))
        name = "logits"
    output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    is_last = softmax.output[0] == graph.output[0].name
    if is_last and softmax.op_type == "Softmax":
        output.type.CopyFrom(graph.output[0].type)
    others = [value for value in graph.value_info if value.name != name]
    del graph.value_info[:], graph.output[:]
    graph.value_info.extend(others)
    graph.output.append(output)
    if is_last and not Links(graph).readers(softmax.output[0]):
        graph.node.remove(softmax)
    return True


def _find_final_softmax(graph: onnx.GraphProto) -> onnx.NodeProto | None:
    """Return the softmax that computes the only output, perhaps rounded later; None without one."""
    if len(graph.output) != 1:
        return None
    producers = Links(graph).producers
    node = producers.get(graph.output[0].name)
    while node is not None and node.op_type in _PASSES_ON:
        node = producers.get(node.input[0])
    if node is None or node.op_type not in ("Softmax", "QLinearSoftmax"):
        return None
    return node
