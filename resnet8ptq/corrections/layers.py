"""The settings of corrections, the layers that they change, and the error of these layers."""

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import onnx

from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.corrections.walk import Walk
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.links import Linked, Links, input_at
from resnet8ptq.graph.weights import biased_output, read_weights, write_weights
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan, Selection, find_quantized_layers

SAMPLES = 64  # largest number of samples that `errors` runs


@dataclass(frozen=True)
class CorrectionSettings:
    """The settings that all corrections of a run share.

    Attributes:
        weights: the scheme of each layer's weights.
        calib: the calibration settings; `batch_size` is the largest batch.
        activations: the scheme of activations.
        float_output: whether the outputs of the last layer and of later nodes stay in float.
        searches: whether a search chooses the nodes to exclude. Learned rounding then learns their
            layers too, once for all choices.
    """

    weights: Plan
    selection: Selection
    samples: Split
    calib: CalibConfig
    runtime: Runtime
    activations: ActivationScheme
    float_output: bool
    searches: bool = False

    def walk(self, proto: onnx.ModelProto) -> Walk:
        """Start a walk through a network on the samples."""
        return Walk(
            proto,
            self.samples,
            batch_size=self.calib.batch_size,
            threads=self.runtime.threads,
        )


def find_plain_layers(graph: onnx.GraphProto, selection: Selection) -> dict[str, onnx.NodeProto]:
    """Return the layers whose weights will be quantized, by short name, in the graph's order.

    A Gemm with alpha or beta other than 1 or with a transposed input is left out. So are a MatMul
    whose weights have more than two axes, and a layer whose bias is computed or differs by row.
    These are rare in trained networks.

    Raises:
        ConfigError: see `find_float_nodes`.
        QuantizationError: no layer remains.
    """
    quantized = find_quantized_layers(graph, selection)
    links = Links(graph)
    chosen = {}
    for name, node in quantized.items():
        if _is_plain(links, node):
            chosen[name] = node
    if not chosen:
        raise QuantizationError("corrections: no layer with weights is left to quantize")
    return chosen


def _is_plain(graph: Links, node: onnx.NodeProto) -> bool:
    bias = input_at(node, 2)
    if bias:
        constant = graph.constants.get(bias)
        if constant is None or math.prod(constant.dims[:-1]) != 1:
            return False
    if node.op_type == "Gemm":
        scales = attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1
        return not scales and not attribute(node, "transA", 0)
    return node.op_type == "Conv" or len(graph.constants[node.input[1]].dims) == 2


def round_weights(graph: Linked, node: onnx.NodeProto, scheme: WeightScheme) -> None:
    """Round a layer's weights in place to the nearest levels of their grid."""
    weights = read_weights(graph, node)
    write_weights(graph, node, scheme.grid(weights, 0).round(weights))


def errors(
    fp32: onnx.ModelProto, corrected: onnx.ModelProto, setting: CorrectionSettings
) -> dict[str, float]:
    """Return the relative squared error of each layer's output, after its bias, by short name.

    The error is a share of the power of FP32's output. `corrected` runs on at most `SAMPLES`
    samples, with the weights of these layers rounded to the nearest level and with float
    activations.
    """
    setting = replace(setting, samples=setting.samples.spaced(SAMPLES))
    rounded = copy.deepcopy(corrected)
    nodes = find_plain_layers(rounded.graph, setting.selection)
    links = Links(rounded.graph)
    for name, node in nodes.items():
        round_weights(links, node, setting.weights.scheme(name))

    # Compare both networks batch by batch, to keep memory low
    names = [biased_output(links, node) for node in nodes.values()]
    error = dict.fromkeys(names, 0.0)
    power = dict.fromkeys(names, 0.0)
    walk = setting.walk(fp32)
    for part in walk.parts(names):
        outputs_of = walk.through(rounded).run(part)
        targets_of = walk.run(part, "Measuring the layers' error")
        for targets, outputs in zip(targets_of, outputs_of, strict=True):
            for name, target, output in zip(part, targets, outputs, strict=True):
                error[name] += float(np.square(output - target, dtype=np.float64).sum())
                power[name] += float(np.square(target, dtype=np.float64).sum())

    # Avoid a division by zero for outputs of zeros
    tiny = float(np.finfo(float).tiny)
    relative = {}
    for layer, name in zip(nodes, names, strict=True):
        relative[layer] = error[name] / max(power[name], tiny)
    return relative
