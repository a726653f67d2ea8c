"""The backends by name. A quantizer's module is imported only when a run needs it."""

from dataclasses import replace
from pkgutil import resolve_name
from typing import Final

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.config.schema import BackendConfig, QuantizationConfig
from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.core.machine import Runtime

# The cache key of a module that imports this one depends on every backend's code (`core.code`).
FOLDERS: Final = "resnet8ptq.backends.*:BACKEND"
BACKENDS = find_backends()


def make_quantizer(config: QuantizationConfig, runtime: Runtime) -> Quantizer:
    """Return the quantizer that `backend` names; raise `ConfigError` for an unknown name.

    If a target runs the files, this machine uses the CPU's execution provider.
    """
    if config.runs_elsewhere:
        config = replace(config, backend=config.backend.on_cpu())
    make = resolve_name(config.backend.descriptor.quantizer)
    quantizer: Quantizer = make(config, runtime)
    return quantizer


def complete(
    asked: BackendConfig, network_format: str, outputs: list[str] | None, is_float: bool
) -> BackendConfig:
    """Return a backend's settings with the defaults that depend on the network.

    The settings of `backend=file` stay unchanged. Other backends lose the path, which a sweep may
    set for all backends.

    Args:
        network_format: the format of the network's file.
        outputs: the setting `model.outputs`.
        is_float: see `QuantizationConfig.computes_in_float`.
    """
    if not asked.quantizes:
        return asked
    backend = replace(asked, path=None)
    own = backend.descriptor.complete
    if not own:
        return backend
    completed: BackendConfig = resolve_name(own)(backend, network_format, outputs, is_float)
    return completed
