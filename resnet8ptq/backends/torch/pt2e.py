"""PT2E: torchao's quantization of a `torch.export` program, simulated in float.

Weights are stored in 8 bits; activations are rounded to their grid between float operators.
"""

import re
from operator import attrgetter
from typing import Any

import onnx
import torch

from resnet8ptq.backends.contract import Takes
from resnet8ptq.backends.torch.annotate import OnnxNodeQuantizer
from resnet8ptq.backends.torch.program import export
from resnet8ptq.backends.torch.torchscript import Example, known_warnings
from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.methods import SHARED, find_range, make_observer, run_pass
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import CalibConfig, QuantizationConfig
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.torch_module import as_tensors, name_tensors
from resnet8ptq.precision.grid import WeightScheme

TAKES: Takes = {
    "method": (["static", "qat"], "backend.flow=pt2e is static; backend.flow=fx takes dynamic"),
    "calib.name": (SHARED, "the observer of backend.flow=fx"),
    "dtype.name": (["int8", "uint8", "u8s8"], "backend.flow=pt2e simulates 8 bits"),
}


def quantize(
    module: torch.fx.GraphModule,
    graph: onnx.GraphProto,
    skipped: list[str],
    activations: Activations,
    config: QuantizationConfig,
    weights: WeightScheme,
    scheme: WeightScheme,
) -> tuple[torch.fx.GraphModule, dict[str, Range]]:
    """Export, calibrate, and insert quantize and dequantize operators with torchao.

    For arguments and result see `fx.quantize`. A tensor that the ONNX graph lacks has the name of
    its exported node.

    Raises:
        UnsupportedError: see `program.export`.
        QuantizationError: see `Activations.find_ranges`.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    # Find the exported nodes that stay in float
    calibration = activations.calibration
    exported = export(module, Example.of(calibration)).module()
    norms = _spell_out_norms(exported)
    paths = _paths(exported)
    float_nodes = [*norms]
    for name, path in paths.items():
        # A node with padding has two modules, `name.0` and `name.1`.
        if re.sub(r"\.\d+$", "", path) in skipped:
            float_nodes.append(name)
    quantizer = OnnxNodeQuantizer(
        float_nodes=float_nodes,
        float_output=config.float_output,
        activations=scheme,
        weights=weights,
    )

    # Get ranges by ONNX names; calibrate the tensors that ONNX lacks
    names = name_tensors(exported.graph, paths, graph)
    observed = {name: names.get(name, name) for name in quantizer.observed(exported)}
    ranges = activations.find_ranges(observed.values())
    missing = [name for name, tensor in observed.items() if tensor not in ranges]
    others = _calibrate(exported, observed=missing, calibration=calibration, config=config.calib)
    by_node: dict[str, Range] = {}
    by_tensor: dict[str, Range] = {}
    for name, tensor in observed.items():
        by_node[name] = ranges[tensor] if tensor in ranges else others[name]
        by_tensor[tensor] = by_node[name]
    quantizer.ranges = by_node
    with known_warnings():
        converted = convert_pt2e(prepare_pt2e(exported, quantizer))
    _drop_unused(converted)
    return converted, by_tensor


def _spell_out_norms(exported: Any) -> list[str]:
    """Replace each batch normalization by a product and a sum, in place; return the new names.

    torchao would fold a batch normalization into the convolution before it, whose weights then
    leave their grid. torchao would also trace 96 patterns of trained convolutions, which takes
    minutes. XNNPACK lacks the operator.
    """
    graph = exported.graph
    aten = torch.ops.aten
    names = []
    for node in graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        values, *parameters, _, _, eps, _ = node.args
        paths = [parameter.target for parameter in parameters]
        weight, bias, mean, variance = attrgetter(*paths)(exported)
        factor = weight / torch.sqrt(variance + eps)

        # The constants [channels] broadcast over the axes after the channels
        steps = ((aten.mul.Tensor, factor), (aten.add.Tensor, bias - mean * factor))
        with graph.inserting_before(node):
            for operator, operand in steps:
                name = f"{node.name}_{operator.overloadpacket.__name__}"
                channels = operand.reshape(-1, *[1] * (node.meta["val"].ndim - 2))
                exported.register_buffer(name, channels.detach())
                values = graph.call_function(operator, (values, graph.get_attr(name)))
                values.meta = dict(node.meta)
                names.append(values.name)
        node.replace_all_uses_with(values)
        graph.erase_node(node)
    exported.recompile()
    return names


def _drop_unused(converted: Any) -> None:
    """Drop the tensors that the converted graph does not read, such as replaced float weights."""
    used = {node.target for node in converted.graph.find_nodes(op="get_attr")}
    for name in [*dict(converted.named_parameters()), *dict(converted.named_buffers())]:
        if name not in used:
            path, _, tail = name.rpartition(".")
            delattr(converted.get_submodule(path), tail)


def _paths(exported: Any) -> dict[str, str]:
    """Return the path of the module that each operator comes from, by the operator's name."""
    paths = {}
    for node in exported.graph.nodes:
        modules = node.meta.get("nn_module_stack")
        if node.op == "call_function" and modules:
            path, _ = list(modules.values())[-1]
            paths[node.name] = path
    return paths


def _calibrate(
    exported: Any, observed: list[str], calibration: Split, config: CalibConfig
) -> dict[str, Range]:
    """Return the calibrated ranges of the outputs of the `observed` nodes, by node."""
    if not observed:
        return {}
    observers = {}
    for node in exported.graph.nodes:
        if node.name in observed:
            observers[node] = make_observer(config)

    # The observed tensors are read after each run, so none may be freed during it
    interpreter = torch.fx.Interpreter(exported, garbage_collect_values=False)
    with torch.inference_mode():
        for batch, _ in run_pass(calibration, config):
            interpreter.run(*as_tensors(batch))
            for node, observer in observers.items():
                observer.observe(interpreter.env[node].numpy())
    ranges = {}
    for node, observer in observers.items():
        ranges[node.name] = find_range(observer.stats(config.num_bins), config)
    return ranges
