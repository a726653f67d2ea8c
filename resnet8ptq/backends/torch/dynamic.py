"""Dynamic quantization, onto torch's integer kernels: activation ranges are taken as it runs."""

import torch
from torch.ao.quantization import QConfig
from torch.ao.quantization.observer import default_dynamic_quant_observer
from torch.ao.quantization.quantize import quantize_dynamic

from resnet8ptq.backends.contract import Takes
from resnet8ptq.backends.torch import fx
from resnet8ptq.backends.torch.torchscript import known_warnings
from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.core.errors import UnsupportedError

TAKES: Takes = {
    **fx.WEIGHTS,
    "symmetric.activations": ([None, False], "torch's dynamic kernels take the range as it comes"),
    "reduce_range": ([None, True], "torch's dynamic linear always takes 7 bits"),
}


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
    qconfig = QConfig(activation=default_dynamic_quant_observer, weight=fx.weight_observer(config))
    with known_warnings():
        return quantize_dynamic(module, dict.fromkeys(layers, qconfig)), layers
