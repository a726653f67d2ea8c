"""Dynamic quantization in torch: activation ranges are computed at inference."""

import torch
from torch.ao.quantization import QConfig
from torch.ao.quantization.observer import default_dynamic_quant_observer
from torch.ao.quantization.quantize import quantize_dynamic

from resnet8ptq.backends.contract import Takes
from resnet8ptq.backends.torch import fx
from resnet8ptq.backends.torch.torchscript import known_warnings
from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.precision.grid import WeightScheme

TAKES: Takes = {
    **fx.WEIGHTS,
    "symmetric.activations": ([None, False], "torch's dynamic kernels are affine"),
    "reduce_range": ([None, True], "torch's dynamic linear always takes 7 bits"),
    "backend.reduced": (
        ["auto", "activations"],
        "torch's dynamic linear takes activations of 7 bits",
    ),
}


def quantize(
    module: torch.fx.GraphModule,
    skipped: list[str],
    config: QuantizationConfig,
    weights: WeightScheme,
) -> tuple[torch.nn.Module, list[str]]:
    """Return a module whose linear layers are quantized, and the layers' names.

    Args:
        skipped: names of the layers that stay in float.

    Raises:
        UnsupportedError: there is no linear layer to quantize.
    """
    layers = []
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and name not in skipped:
            layers.append(name)
    if not layers:
        raise UnsupportedError(
            "method=dynamic: torch quantizes linear layers only, and none is left to quantize"
        )
    weight = fx.weight_observer(config, weights)
    qconfig = QConfig(activation=default_dynamic_quant_observer, weight=weight)
    with known_warnings():
        return quantize_dynamic(module, dict.fromkeys(layers, qconfig)), layers
