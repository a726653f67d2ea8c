"""FX graph mode quantization, for torch's integer kernels."""

import logging
from typing import Any

import numpy as np
import onnx
import torch
from torch.ao.nn.intrinsic import _FusedModule
from torch.ao.quantization import QConfig, get_default_qconfig_mapping
from torch.ao.quantization.backend_config import ObservationType, get_native_backend_config
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao.quantization.observer import (
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    UniformQuantizationObserverBase,
)
from torch.ao.quantization.quantize_fx import prepare_fx

from resnet8ptq.backends.contract import Takes
from resnet8ptq.backends.torch.checking import convert_checked
from resnet8ptq.backends.torch.torchscript import PT2E, known_warnings
from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.methods import find_range, make_observer, run_pass
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import CalibConfig, QuantizationConfig
from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.layers import fused_activations
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.torch_module import as_tensors, name_tensors
from resnet8ptq.graph.torch_operators import InFloat
from resnet8ptq.precision.grid import WeightScheme

log = logging.getLogger(__name__)

# Weights that torch's integer kernels take.
WEIGHTS: Takes = {
    "dtype.name": (
        ["int8", "u8s8"],
        "FBGEMM's and oneDNN's quantized convolutions require qint8 weights; "
        f"{PT2E} simulates uint8 in float",
    ),
    "symmetric.weights": (
        [None, True],
        f"FBGEMM's and oneDNN's kernels require symmetric weights; {PT2E} takes others per tensor",
    ),
}
TAKES: Takes = {
    **WEIGHTS,
    "float_output": (
        [False],
        f"FX's quantized linear always returns 8 bits; {PT2E} leaves it in float",
    ),
}


class SlopeObserver(MinMaxObserver):  # type: ignore[misc]
    """Observes the slopes of a PReLU, and 1, the slope of positive values.

    torch's quantized PReLU multiplies values above 0 by a 1 that it rounds like a slope. If the
    range of slopes ended at 0.25, the 1 would be clipped to 0.25 (torch 2.13).
    """

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        """Update the range; return `slopes`."""
        super().forward(torch.cat([slopes.detach().flatten(), torch.ones(1)]))
        return slopes


def _qscheme(scheme: WeightScheme) -> Any:
    """Return torch's constant for an activation scheme."""
    return torch.per_tensor_symmetric if scheme.symmetric else torch.per_tensor_affine


class RangeObserver(UniformQuantizationObserverBase):  # type: ignore[misc]
    """An FX observer whose range is preset or chosen by the calibration method."""

    def __init__(self, config: CalibConfig, scheme: WeightScheme, **kwargs: Any) -> None:
        super().__init__(dtype=torch.quint8, qscheme=_qscheme(scheme), **kwargs)
        self.config = config
        self.scheme = scheme
        self.observer = make_observer(config)
        self.preset: Range | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Update the statistics, unless the range is preset; return `values`."""
        if self.preset is None:
            self.observer.observe(values.detach().numpy())
        return values

    def chosen_range(self) -> Range:
        """Return the preset range, or the range chosen by the calibration method."""
        return self.preset or find_range(self.observer.stats(self.config.num_bins), self.config)

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero_point, each of shape [1]."""
        grid = self.scheme.grid(np.array(self.chosen_range(), dtype=np.float32), axis=0)
        return torch.from_numpy(grid.scale), torch.from_numpy(grid.zero_point)


_OBSERVERS = (RangeObserver, HistogramObserver)

# In torch 2.13, oneDNN's kernel of transposed convolutions is wrong if the numbers of input and
# output channels differ, and FBGEMM's for 2 x 2 kernels with 8 or 16 channels; the errors exceed
# the values. Per channel, FX refuses these layers.
_TRANSPOSED = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)

# Operators whose output keeps the scale of the input
_KEEPING = {
    config.pattern
    for config in get_native_backend_config().configs
    if config.observation_type == ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
}
# Layers whose weights have their own observer
_OWN_WEIGHTS = {
    torch.nn.LayerNorm: PlaceholderObserver,
    torch.nn.PReLU: SlopeObserver.with_args(dtype=torch.quint8, qscheme=torch.per_tensor_affine),
}
# The layers of `_FIXED` by their ONNX operators.
_FIXED_SCALES = ("Sigmoid", "Tanh", "HardSigmoid", "Softmax")
_MOVING = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice")
_FIXED = (torch.nn.Softmax, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.Hardsigmoid)


def quantize(
    module: torch.fx.GraphModule,
    graph: onnx.GraphProto,
    skipped: list[str],
    activations: Activations,
    config: QuantizationConfig,
    weights: WeightScheme,
    scheme: WeightScheme,
) -> tuple[torch.fx.GraphModule, dict[str, Range]]:
    """Insert observers, calibrate, and convert to integer kernels.

    Args:
        module: the result of `load_torch_module`; it must not be used afterwards.
        graph: the ONNX graph that `module` was made from.
        skipped: names of the nodes that stay in float.
        scheme: the activation scheme.

    Returns:
        The quantized module, and the activation ranges by ONNX tensor name. Tensors with a common
        observer have one entry, by the name of the first. There are no entries with
        calib=histogram.

    Raises:
        UnsupportedError: FX cannot trace or convert the network.
        QuantizationError: see `Activations.find_ranges`.
    """
    example = as_tensors(activations.calibration.zeros)
    observer = _activation_observer(config.calib, scheme)
    qconfig = QConfig(observer, weight_observer(config, weights))
    mapping = get_default_qconfig_mapping(torch.backends.quantized.engine).set_global(qconfig)
    for kind, weight in _OWN_WEIGHTS.items():
        mapping.set_object_type(kind, QConfig(observer, weight))

    # Leave in float the layers with wrong kernels, and the nodes that the settings name
    if any(isinstance(layer, _TRANSPOSED) for layer in module.modules()):
        log.warning(
            "transposed convolutions stay in float: torch's 8-bit kernels compute them wrongly"
        )
        for kind in _TRANSPOSED:
            mapping.set_object_type(kind, None)
    if skipped:
        for name in (*skipped, "initializers"):  # constants are quantized with their reader
            mapping.set_module_name(name, None)

    # Insert the observers, and set or calibrate their ranges
    with known_warnings():
        with errors_as(UnsupportedError, "FX cannot trace the network", f"try {PT2E}"):
            # FX quantizes each cat, pad and resize that it traces, under all settings.
            left = [*_find_mixed(graph), *_find_opaque(module)]
            opaque = PrepareCustomConfig().set_non_traceable_module_names(left)
            prepared = prepare_fx(module, mapping, example, opaque)
        _share_observers(prepared)
        _free_inputs(prepared, qconfig.activation)
        observers = _observers(prepared, graph)
        _preset_ranges(observers, activations)
        _calibrate(prepared, activations.calibration, config.calib)

        # A shared observer gets the name of its first tensor, and a name the range of its first
        # observer
        first = {}
        for name, observer in reversed(observers):
            first[id(observer)] = (name, observer)
        ranges = {}
        for name, observer in first.values():
            ranges[name] = observer.chosen_range()
        with errors_as(UnsupportedError, "FX cannot convert the network", f"try {PT2E}"):
            return convert_checked(prepared, activations.calibration), ranges


def _preset_ranges(observers: list[tuple[str, RangeObserver]], activations: Activations) -> None:
    """Preset the observers whose tensors have ranges, each to a range that covers these.

    The range of a tensor is preset or calibrated. If some tensors of an observer have preset
    ranges, the others' ranges do not count.

    Args:
        observers: the observers with the names of their tensors.
    """
    preset = set()
    for name, observer in observers:
        if name in activations.preset:
            preset.add(id(observer))

    # Leave out tensors that take the preset range of another
    wanted = []
    for name, observer in observers:
        if name in activations.preset or id(observer) not in preset:
            wanted.append(name)

    # Cover the ranges of all tensors that share an observer
    calibrated = activations.find_ranges(wanted)
    for name, observer in observers:
        if name in calibrated:
            low, high = calibrated[name]
            shared = observer.preset or calibrated[name]
            observer.preset = min(low, shared[0]), max(high, shared[1])


def _find_mixed(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the Concat nodes with a fixed-scale input, such as a Sigmoid's output.

    torch concatenates quantized tensors in the scale of the first. If a Sigmoid's output is the
    first, the others are clipped to its range, 0 to 1. If it is not, its values may get few levels.
    These nodes therefore stay in float.
    """
    producers = Links(graph).producers

    def is_fixed(name: str) -> bool:
        node = producers.get(name)
        while node is not None and node.op_type in _MOVING:
            node = producers.get(node.input[0])
        return node is not None and node.op_type in _FIXED_SCALES

    names = []
    for node in graph.node:
        if node.op_type == "Concat" and any(map(is_fixed, node.input)):
            names.append(node.name)
    return names


def _find_opaque(module: Any) -> list[str]:
    """Return the names of the layers that FX must not trace.

    These are `InFloat` layers, and resizes by an interpolation without a quantized kernel.
    """
    without = ("linear", "trilinear", "bicubic")
    names = []
    for name, layer in module.named_modules():
        if isinstance(layer, InFloat) or getattr(layer, "mode", "") in without:
            names.append(name)
    return names


def _share_observers(prepared: Any) -> None:
    """Share one observer among the tensors at an operator with one scale, such as a Concat.

    FX shares observers operator by operator. If two operators with one scale read a tensor, as in
    the feature pyramid of a detector, the tensor loses the observer of the first operator. torch
    then clips the inputs of a Concat to the range of the first input.
    """
    modules = dict(prepared.named_modules(remove_duplicate=False))
    settings = prepared.meta["_observed_graph_module_attrs"].node_name_to_qconfig
    for node in prepared.graph.nodes:
        kind = node.target
        if node.op == "call_module":
            kind = type(modules[node.target])

        # Skip other operators, and nodes that stay in float
        if kind not in _KEEPING or settings.get(node.name) is None:
            continue

        # Collect the observers of the node's inputs and outputs
        first = node.args[0]
        inputs = first if isinstance(first, list | tuple) else [first]
        shared = []
        for value in (*inputs, *node.users):
            observer = modules.get(value.target)
            if isinstance(observer, _OBSERVERS):
                shared.append(observer)

        # An observer can have several names
        for name, module in list(modules.items()):
            if module in shared:
                modules[name] = shared[0]
                prepared.set_submodule(name, shared[0])


def _free_inputs(prepared: Any, observer: Any) -> None:
    """Observe the inputs of operators with a fixed output scale, such as Softmax.

    If the input comes from an operator that FX does not quantize, such as a Reshape, FX gives it
    the scale of the output.
    """
    modules = dict(prepared.named_modules())
    for node in prepared.graph.nodes:
        if not isinstance(modules.get(node.target), FixedQParamsObserver):
            continue
        if not isinstance(modules.get(node.args[0].target), _FIXED):
            prepared.set_submodule(node.target, observer())


def _activation_observer(calib: CalibConfig, scheme: WeightScheme) -> Any:
    if calib.name != "histogram":
        return RangeObserver.with_args(config=calib, scheme=scheme)
    if not scheme.reduce_range:
        return HistogramObserver.with_args(qscheme=_qscheme(scheme))
    # Pass a custom range only if needed: torch then puts zero_point in its middle, instead of 128.
    lowest, highest = scheme.levels
    return HistogramObserver.with_args(
        qscheme=_qscheme(scheme), quant_min=lowest, quant_max=highest
    )


def weight_observer(config: QuantizationConfig, scheme: WeightScheme) -> Any:
    """Return a factory of weight observers, on torch's grid or on the grid of `precision.grid`.

    torch's int8 grid starts at -128, so its 255 steps are finer than the 254 of `precision.grid`.
    Weights of 7 bits and learned weights use the grid of `precision.grid`. AdaRound, reconstruction
    and fine-tuning learn weights.
    """
    changes = config.corrections
    is_learned = changes.adaround or changes.reconstruction or config.method == "qat"
    on_grid = is_learned or scheme.reduce_range
    lowest, highest = scheme.levels if on_grid else (-128, 127)
    settings = {"dtype": torch.qint8, "quant_min": lowest, "quant_max": highest}
    if scheme.per_channel:
        return PerChannelMinMaxObserver.with_args(qscheme=torch.per_channel_symmetric, **settings)
    return MinMaxObserver.with_args(qscheme=torch.per_tensor_symmetric, **settings)


def _observers(prepared: Any, graph: onnx.GraphProto) -> list[tuple[str, RangeObserver]]:
    """Return each `RangeObserver` with the ONNX name of its tensor, in graph order.

    Tensors that the ONNX graph lacks are left out. Several tensors may share an observer, see
    `_share_observers`. If only a Clip reads a tensor, the name is that of the Clip's output.
    """
    modules = dict(prepared.named_modules(remove_duplicate=False))
    scopes = prepared.meta["_observed_graph_module_attrs"].node_name_to_scope
    paths = {name: path for name, (path, _) in scopes.items()}
    fused = set()
    for node in prepared.graph.nodes:
        if isinstance(modules.get(node.target), _FusedModule):
            fused.add(str(node))
    names = name_tensors(prepared.graph, paths, graph, fused=fused)

    # The range of a tensor that only a Clip takes is that of the clipped values
    clipped = {}
    for activation in fused_activations(graph):
        if activation.op_type == "Clip":
            clipped[activation.input[0]] = activation.output[0]

    # An observer node has the tensor as its argument
    observers = []
    for node in prepared.graph.nodes:
        observer = modules.get(node.target)
        if isinstance(observer, RangeObserver):
            tensor = names.get(str(node.args[0]))
            if tensor is not None:
                observers.append((clipped.get(tensor, tensor), observer))
    return observers


def _calibrate(prepared: Any, calibration: Split, config: CalibConfig) -> None:
    """Calibrate the observers without a preset range, such as those of tensors that ONNX lacks."""
    observers = [module for module in prepared.modules() if isinstance(module, _OBSERVERS)]
    if all(getattr(observer, "preset", None) is not None for observer in observers):
        return
    with torch.inference_mode():
        for batch, _ in run_pass(calibration, config):
            prepared(*as_tensors(batch))
