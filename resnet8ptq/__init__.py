"""Post-training quantization: quantizes networks, measures the loss, and recommends a model.

    import resnet8ptq as ptq

    run = ptq.quantize(model, data, backend="onnx", dtype="u8s8", per_channel=True)
    sweep = ptq.sweep(model, data, backend=["onnx", "torch"], dtype=["int8", "uint8"])
    best = ptq.ship(model, data, goal="smallest", minutes=5)
    checked = ptq.judge(model, ["theirs.tflite"], data)
    best.deploy("folder")

The names in `__all__` are the public interface, see docs/python.md. Other names may change without
notice.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resnet8ptq.api.calls import judge, quantize, ship, sweep
    from resnet8ptq.core.errors import ConfigError, DataError, ModelError, PtqError
    from resnet8ptq.results import RunRecord, SweepSummary, load_run, load_sweep

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "DataError",
    "ModelError",
    "PtqError",
    "RunRecord",
    "SweepSummary",
    "judge",
    "load_run",
    "load_sweep",
    "quantize",
    "ship",
    "sweep",
]

_HOMES = {
    "resnet8ptq.api.calls": ("judge", "quantize", "ship", "sweep"),
    "resnet8ptq.core.errors": ("ConfigError", "DataError", "ModelError", "PtqError"),
    "resnet8ptq.results": ("RunRecord", "SweepSummary", "load_run", "load_sweep"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used, since most commands need none of them."""
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
