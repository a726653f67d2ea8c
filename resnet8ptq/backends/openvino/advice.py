"""Advice on OpenVINO; see `backends.advice`."""

from collections.abc import Collection, Iterator

from resnet8ptq.backends.advice import (
    CANNOT,
    FRAMEWORKS,
    TRY,
    Advice,
    beyond_x86,
    granularity,
    in_float,
    may_saturate,
)
from resnet8ptq.backends.openvino import BACKEND
from resnet8ptq.core.machine import is_x86
from resnet8ptq.models.summary import Summary


def sweep(flags: Collection[str], network: Summary | None) -> str | None:
    """Return the settings of a sweep; None if OpenVINO, an extra, is not installed."""
    if not BACKEND.is_installed:
        return None
    narrow = " reduce_range=true" if may_saturate("int8", flags) else ""
    return f"dtype=int8{narrow} {granularity(network)}"


def advise(flags: Collection[str], network: Summary | None) -> Iterator[Advice]:
    """Yield OpenVINO's configurations, each with a verdict for a CPU with these flags."""
    settings = "backend=openvino dtype=int8 per_channel=true"
    if may_saturate("int8", flags):
        settings += " reduce_range=true"
    fast = f"{beyond_x86(flags)}: " if not is_x86(flags) else ""
    why = f"{fast}its integer kernels take s8 weights (extra openvino)"
    yield Advice(settings, TRY, f"{why}{in_float('openvino', network)}", FRAMEWORKS)
    yield Advice("backend=openvino dtype=uint8", CANNOT, "u8 weights run in float", FRAMEWORKS)
