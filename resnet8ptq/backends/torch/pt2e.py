"""PT2E: quantization of a `torch.export` program, by torchao; simulated in float.

Weights are stored in 8 bits; activations are rounded to their grid between float operators.
"""

from pathlib import Path
from typing import Any

import onnx
import torch
from torch.export import ExportedProgram

from resnet8ptq.backends.contract import Artifact, Resolved
from resnet8ptq.backends.torch import program
from resnet8ptq.backends.torch.annotate import OnnxNodeQuantizer
from resnet8ptq.backends.torch.program import MODEL_FILE, load, save
from resnet8ptq.backends.torch.torchscript import known_warnings
from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.methods import find_range
from resnet8ptq.calibration.passes import run_passes
from resnet8ptq.calibration.statistics import Range, TensorStats
from resnet8ptq.config.schema import DTYPES, CalibConfig, QuantizationConfig
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.torch_module import fix_reshapes, name_tensors
from resnet8ptq.precision.grid import WeightScheme

__all__ = ["MODEL_FILE", "export", "load", "quantize", "resolve", "save"]


def resolve(config: QuantizationConfig) -> Resolved:
    """Return what the settings come to; raise `UnsupportedError` where PT2E cannot do them."""
    if config.method == "dynamic":
        raise UnsupportedError(
            "method=dynamic: backend.flow=pt2e is static; backend.flow=fx is not"
        )
    if config.calib.name == "histogram":
        raise UnsupportedError("calib=histogram is the observer of backend.flow=fx")
    return Resolved(
        weight_dtype=WeightScheme.of(config).dtype,
        activation_dtype=_activations(config).dtype,
        execution="simulated",
        file_format="PT2",
        activation_bits=7 if config.reduce_range else 8,
    )


def quantize(
    module: torch.fx.GraphModule,
    graph: onnx.GraphProto,
    skipped: list[str],
    activations: Activations,
    config: QuantizationConfig,
    folder: Path,
) -> Artifact:
    """Export, calibrate, let torchao place the quantize and dequantize operators, and save.

    Args:
        module: the float network, [N, H, W, C] to [N, classes]; consumed.
        graph: the ONNX graph it comes from.
        skipped: ONNX nodes that stay in float.
        activations: know the ranges by ONNX tensor name.
        config: the run's.
        folder: existing.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    calibration = activations.calibration
    example = torch.zeros(1, *calibration.input_shape)
    exported = export(module, example).module()
    quantizer = OnnxNodeQuantizer(
        float_nodes=[n for n, path in _paths(exported).items() if _owner(path) in skipped],
        float_output=config.float_output,
        activations=_activations(config),
        weights=WeightScheme.of(config),
    )
    names = name_tensors(exported.graph, _paths(exported), graph)
    observed = {name: names.get(name, name) for name in quantizer.observed(exported)}
    given = activations.find_ranges(observed.values())
    missing = [name for name, tensor in observed.items() if tensor not in given]
    calibrated = _calibrate(exported, missing, calibration, config.calib)
    quantizer.ranges = {n: given[t] if t in given else calibrated[n] for n, t in observed.items()}
    with known_warnings():
        converted = convert_pt2e(prepare_pt2e(exported, quantizer))
    _drop_unused(converted)
    path = folder / MODEL_FILE
    save(export(converted, example), path)
    layers = program.count_quantized_layers(path)
    return Artifact(path, layers, {observed[n]: chosen for n, chosen in quantizer.ranges.items()})


def export(module: torch.fx.GraphModule, example: torch.Tensor) -> ExportedProgram:
    """Export a network, for any number of images; `example` is one of them [1, H, W, C]."""
    fix_reshapes(module)
    for weights in [*module.parameters(), *module.buffers()]:
        weights.data = weights.data.contiguous()  # a transposed view would be saved as one
    batch = example.repeat(2, *[1] * (example.ndim - 1))  # a batch of 1 would be taken for fixed
    with known_warnings():
        return torch.export.export(
            module, (batch,), dynamic_shapes=({0: torch.export.Dim("batch")},)
        )


def _drop_unused(converted: Any) -> None:
    """Drop the float weights: the graph reads the integer ones only."""
    used = {node.target for node in converted.graph.find_nodes(op="get_attr")}
    for name in [*dict(converted.named_parameters()), *dict(converted.named_buffers())]:
        if name not in used:
            path, _, tail = name.rpartition(".")
            delattr(converted.get_submodule(path), tail)


def _activations(config: QuantizationConfig) -> WeightScheme:
    """The grid of the activations, made like that of the weights."""
    return WeightScheme(
        DTYPES[config.dtype.name][0],
        symmetric=bool(config.symmetric.activations),
        reduce_range=bool(config.reduce_range),
    )


def _paths(exported: Any) -> dict[str, str]:
    """Return the module that each node of an exported graph comes from."""
    return {
        node.name: list(node.meta["nn_module_stack"].values())[-1][0]
        for node in exported.graph.nodes
        if node.op == "call_function" and node.meta.get("nn_module_stack")
    }


def _owner(path: str) -> str:
    """Return the ONNX node of a module: onnx2torch makes `name.0` and `name.1` for padding."""
    head, _, tail = path.rpartition(".")
    return head if tail.isdigit() else path


class _Recorder(torch.fx.Interpreter):  # type: ignore[misc]
    """Runs a graph, and hands on what the nodes in `stats` make."""

    def __init__(self, module: Any, stats: dict[str, TensorStats], config: CalibConfig) -> None:
        super().__init__(module)
        self.stats = stats
        self.config = config
        self.stage = "ranges"

    def run_node(self, node: torch.fx.Node) -> Any:
        """Run a node, and observe what it makes."""
        made = super().run_node(node)
        if node.name in self.stats:
            self.stats[node.name].observe(made.numpy(), self.stage, self.config)
        return made


def _calibrate(
    exported: Any, observed: list[str], calibration: Split, config: CalibConfig
) -> dict[str, Range]:
    """Find the ranges of tensors that the ONNX graph does not have."""
    recorder = _Recorder(exported, {name: TensorStats() for name in observed}, config)
    with torch.inference_mode():
        for recorder.stage, batch in run_passes(calibration, config) if observed else ():
            recorder.run(torch.from_numpy(batch))
    return {name: find_range(stat, config) for name, stat in recorder.stats.items()}
