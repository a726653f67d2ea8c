"""FX graph mode quantization, onto torch's integer kernels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch.ao.nn.intrinsic import _FusedModule
from torch.ao.quantization import QConfig, QConfigMapping, get_default_qconfig_mapping
from torch.ao.quantization.observer import (
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    UniformQuantizationObserverBase,
)
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from resnet8ptq.backends.contract import Resolved
from resnet8ptq.backends.torch.torchscript import known_warnings
from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.methods import find_range
from resnet8ptq.calibration.passes import run_passes
from resnet8ptq.calibration.statistics import Range, TensorStats
from resnet8ptq.config.schema import CalibConfig, QuantizationConfig
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.torch_module import name_tensors
from resnet8ptq.precision.grid import WeightScheme


@dataclass(frozen=True)
class Settings:
    """What a run's settings come to under FX."""

    config: QuantizationConfig
    engine: str
    reduce_range: bool

    @property
    def activations(self) -> WeightScheme:
        """The grid of the activations: uint8, made like that of the weights."""
        symmetric = bool(self.config.symmetric.activations)
        return WeightScheme("uint8", symmetric=symmetric, reduce_range=self.reduce_range)


class RangeObserver(UniformQuantizationObserverBase):  # type: ignore[misc]
    """An FX observer whose range `calibration` chooses, unless it is given one."""

    def __init__(self, config: CalibConfig, scheme: WeightScheme, **kwargs: Any) -> None:
        qscheme = torch.per_tensor_symmetric if scheme.symmetric else torch.per_tensor_affine
        super().__init__(dtype=torch.quint8, qscheme=qscheme, **kwargs)
        self.config = config
        self.scheme = scheme
        self.stats = TensorStats()
        self.stage = "ranges"
        self.given: Range | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Take statistics of `values`, and pass them on."""
        if self.given is None:
            self.stats.observe(values.detach().numpy(), self.stage, self.config)
        return values

    def chosen_range(self) -> Range:
        """Return the given range, or the one that the calibration method chooses."""
        return self.given or find_range(self.stats, self.config)

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero_point, each of shape [1]."""
        grid = self.scheme.grid(np.array(self.chosen_range(), dtype=np.float32), axis=0)
        return torch.from_numpy(grid.scale), torch.from_numpy(grid.zero_point)


def resolve(config: QuantizationConfig, reduce_range: bool) -> Resolved:
    """Return what static quantization comes to; raise `UnsupportedError` where FX cannot."""
    check_weights(config)
    if config.float_output:
        raise UnsupportedError(
            "float_output=true: FX's quantized linear always returns 8 bits; "
            "backend.flow=pt2e (backend=torch_pt2e) leaves it in float"
        )
    return Resolved(
        weight_dtype="int8",
        activation_dtype="uint8",
        execution="integer",
        file_format="TorchScript",
        activation_bits=7 if reduce_range else 8,
    )


def check_weights(config: QuantizationConfig) -> None:
    """Raise `UnsupportedError` for weights that torch's integer kernels do not take."""
    if config.dtype.name == "uint8":
        raise UnsupportedError(
            "FBGEMM's and oneDNN's quantized convolutions require qint8 weights; "
            "backend.flow=pt2e (backend=torch_pt2e) does uint8, simulated in float"
        )
    if config.symmetric.weights is False:
        raise UnsupportedError(
            "symmetric.weights=false: FBGEMM's and oneDNN's kernels require symmetric weights; "
            "backend.flow=pt2e (backend=torch_pt2e) takes others per tensor"
        )


def quantize(
    module: torch.fx.GraphModule,
    graph: onnx.GraphProto,
    skipped: list[str],
    settings: Settings,
    activations: Activations,
) -> tuple[torch.fx.GraphModule, dict[str, Range]]:
    """Prepare with observers, calibrate, and convert.

    Args:
        module: the float network, [N, H, W, C] to [N, classes]; consumed.
        graph: the ONNX graph it comes from.
        skipped: ONNX nodes that stay in float.
        settings: of the run.
        activations: know the ranges by ONNX tensor name.

    Returns:
        The quantized module, and the range of each observed tensor by ONNX tensor name.
    """
    example = torch.zeros(1, *activations.calibration.input_shape)
    with known_warnings():
        prepared = prepare_fx(module, _qconfig_mapping(skipped, settings), (example,))
        observers = _observers(prepared, graph)
        given = activations.find_ranges(name for name, _ in observers)
        _give(prepared, observers, given, settings)
        observers = _observers(prepared, graph)
        _calibrate(prepared, activations.calibration, settings.config.calib)
        ranges = {
            name: observer.chosen_range()
            for name, observer in reversed(observers)  # of several, the first one's
            if isinstance(observer, RangeObserver)
        }
        return convert_fx(prepared), ranges


def _qconfig_mapping(skipped: list[str], settings: Settings) -> QConfigMapping:
    qconfig = QConfig(_activation_observer(settings), weight_observer(settings.config))
    mapping = get_default_qconfig_mapping(settings.engine).set_global(qconfig)
    # Constants are quantized with the node that takes them, or else not at all.
    for name in [*skipped, "initializers"] if skipped else []:
        mapping.set_module_name(name, None)
    return mapping


def _activation_observer(settings: Settings) -> Any:
    scheme = settings.activations
    if settings.config.calib.name != "histogram":
        return RangeObserver.with_args(config=settings.config.calib, scheme=scheme)
    # torch takes the middle of a custom range for zero_point, and 128 of the whole one.
    lowest, highest = scheme.levels
    reduced = {"quant_min": lowest, "quant_max": highest} if scheme.reduce_range else {}
    qscheme = torch.per_tensor_symmetric if scheme.symmetric else torch.per_tensor_affine
    return HistogramObserver.with_args(qscheme=qscheme, **reduced)


def weight_observer(config: QuantizationConfig) -> Any:
    """Return a factory of observers as torch has them, or on the grid of `precision.grid`.

    torch's own int8 grid has half a level more, 255 steps from -128. Weights that AdaRound or
    fine-tuning has placed lie on the other, which has to be met exactly.
    """
    scheme = WeightScheme.of(config)
    placed = config.corrections.adaround or config.method == "qat"
    lowest, highest = scheme.levels if placed else (-128, 127)
    observer, qscheme = (
        (PerChannelMinMaxObserver, torch.per_channel_symmetric)
        if scheme.per_channel
        else (MinMaxObserver, torch.per_tensor_symmetric)
    )
    return observer.with_args(
        dtype=torch.qint8, qscheme=qscheme, quant_min=lowest, quant_max=highest
    )


def _observers(prepared: Any, graph: onnx.GraphProto) -> list[tuple[str, Any]]:
    """Return each observer with the ONNX name of its tensor, in the order of the graph.

    What only passes values on shares its input's observer and is left out.
    """
    modules = dict(prepared.named_modules())
    scopes = prepared.meta["_observed_graph_module_attrs"].node_name_to_scope
    paths = {name: path for name, (path, _) in scopes.items()}
    fused = {
        str(n) for n in prepared.graph.nodes if isinstance(modules.get(n.target), _FusedModule)
    }
    names = name_tensors(prepared.graph, paths, graph, fused)
    return [
        (names[str(node.args[0])], modules[node.target])
        for node in prepared.graph.nodes
        if isinstance(modules.get(node.target), (RangeObserver, HistogramObserver))
        and str(node.args[0]) in names
    ]


def _give(
    prepared: Any,
    observers: list[tuple[str, Any]],
    given: Mapping[str, Range],
    settings: Settings,
) -> None:
    """Put the given ranges in place of the observers; several nodes may share one of them."""
    replaced = {}
    for name, observer in observers:
        if name in given:
            fixed = RangeObserver(settings.config.calib, settings.activations)
            fixed.given = given[name]
            replaced[id(observer)] = fixed
    for path, module in list(prepared.named_modules(remove_duplicate=False)):
        if id(module) in replaced:
            setattr(prepared, path, replaced[id(module)])


def _calibrate(prepared: Any, calibration: Split, config: CalibConfig) -> None:
    """Run the images for the observers whose tensor the ONNX graph does not have."""
    observers = [
        module
        for module in prepared.modules()
        if isinstance(module, HistogramObserver)
        or (isinstance(module, RangeObserver) and module.given is None)
    ]
    with torch.inference_mode():
        for stage, batch in run_passes(calibration, config) if observers else ():
            for observer in observers:
                observer.stage = stage
            prepared(torch.from_numpy(batch))
