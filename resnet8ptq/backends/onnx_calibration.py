"""Activation ranges of an ONNX graph, by running it in ONNX Runtime."""

from collections.abc import Mapping

import onnx

from resnet8ptq.backends.onnx_session import open_session
from resnet8ptq.calibration import Range, TensorStats, find_range, run_passes
from resnet8ptq.config import RunConfig
from resnet8ptq.data import Split


def find_ranges(
    proto: onnx.ModelProto,
    skipped: list[str],
    calibration: Split,
    config: RunConfig,
    given: Mapping[str, Range],
) -> dict[str, Range]:
    """Return the range of every activation around quantized nodes, by tensor name.

    Args:
        proto: the FP32 graph; its outputs are changed.
        skipped: names of nodes that stay in float.
        calibration: the images.
        given: ranges made elsewhere; they win. Without a tensor left to range, nothing is run.
    """
    names = _expose_activations(proto, skipped)
    input_name = proto.graph.input[0].name
    stats = {name: TensorStats() for name in [input_name, *names] if name not in given}
    if not stats:
        return {name: given[name] for name in [input_name, *names]}
    session = open_session(proto.SerializeToString(), config)
    for stage, batch in run_passes(calibration, config.calib):
        outputs = zip(names, session.run(names, {input_name: batch}), strict=True)
        tensors = {input_name: batch, **dict(outputs)}
        for name, stat in stats.items():
            stat.observe(tensors[name], stage, config.calib)
    found = {name: find_range(stat, config.calib) for name, stat in stats.items()}
    return {name: given.get(name) or found[name] for name in [input_name, *names]}


def _expose_activations(proto: onnx.ModelProto, skipped: list[str]) -> list[str]:
    """Make the float activations around quantized nodes outputs of the graph; return their names.

    `skipped` nodes stay in float: tensors between two of them need no range.
    """
    graph = onnx.shape_inference.infer_shapes(proto).graph
    known = {value.name: value for value in [*graph.value_info, *graph.output]}
    used = {
        name
        for node in graph.node
        if node.name not in skipped
        for name in (*node.input, *node.output)
    }
    produced = [name for node in graph.node for name in node.output if name in used]
    floats = [
        name
        for name in produced
        if name in known and known[name].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    ]
    del proto.graph.output[:]
    proto.graph.output.extend(known[name] for name in floats)
    return floats
