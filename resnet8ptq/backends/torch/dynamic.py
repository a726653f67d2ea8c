"""Dynamic quantization, onto torch's integer kernels: activation ranges are taken as it runs."""

import torch
from torch.ao.quantization import QConfig
from torch.ao.quantization.observer import default_dynamic_quant_observer
from torch.ao.quantization.quantize import quantize_dynamic

from resnet8ptq.backends.contract import Resolved
from resnet8ptq.backends.torch.fx import check_weights, weight_observer
from resnet8ptq.backends.torch.torchscript import known_warnings
from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.core.errors import UnsupportedError


def resolve(config: QuantizationConfig) -> Resolved:
    """Return what dynamic quantization comes to; raise `UnsupportedError` where torch cannot."""
    check_weights(config)
    if config.symmetric.activations:
        raise UnsupportedError(
            "symmetric.activations=true: torch's dynamic kernels take the range as it comes"
        )
    if config.reduce_range is False:
        raise UnsupportedError("reduce_range=false: torch's dynamic linear always takes 7 bits")
    return Resolved(
        weight_dtype="int8",
        activation_dtype="uint8 (dynamic)",
        execution="integer",
        file_format="TorchScript",
        activation_bits=7,
    )


def quantize(
    module: torch.fx.GraphModule, skipped: list[str], config: QuantizationConfig
) -> tuple[torch.nn.Module, list[str]]:
    """Quantize the linear layers: weights now, activations as the model runs.

    Returns:
        The module, and the names of the layers that were changed.

    Raises:
        UnsupportedError: there is none; torch has no dynamic convolution.
    """
    layers = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and name not in skipped
    ]
    if not layers:
        raise UnsupportedError(
            "method=dynamic: torch quantizes linear layers only, and of them the network has none "
            "to quantize"
        )
    qconfig = QConfig(activation=default_dynamic_quant_observer, weight=weight_observer(config))
    with known_warnings():
        return quantize_dynamic(module, dict.fromkeys(layers, qconfig)), layers
