"""The backends by name. A framework is imported only when a run needs it."""

from pkgutil import resolve_name
from typing import Final

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.core.machine import Runtime

# Cache keys of whatever imports this module depend on the code of every backend (`core.code`).
FOLDERS: Final = "resnet8ptq.backends.*:BACKEND"
BACKENDS = find_backends()


def make_quantizer(config: QuantizationConfig, runtime: Runtime) -> Quantizer:
    """Return the quantizer that `backend` names; raise `ConfigError` for an unknown name."""
    make = resolve_name(config.backend.descriptor.quantizer)
    quantizer: Quantizer = make(config, runtime)
    return quantizer
