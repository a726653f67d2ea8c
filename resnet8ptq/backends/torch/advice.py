"""Advice on PyTorch; see `backends.advice`."""

from collections.abc import Collection, Iterator

from resnet8ptq.backends.advice import (
    CANNOT,
    OUT_OF_16_BITS,
    SLOW,
    TRIED,
    TRY,
    WRONG,
    Advice,
    beyond_x86,
    granularity,
    in_float,
)
from resnet8ptq.backends.contract import Resolved
from resnet8ptq.backends.kernels import saturates
from resnet8ptq.core.machine import is_x86
from resnet8ptq.models.summary import Summary


def sweep(flags: Collection[str], network: Summary | None) -> str | None:
    """Return the settings of a sweep over the only pair of dtypes that torch's kernels take."""
    return f"dtype=u8s8 {granularity(network)}"


def advise(flags: Collection[str], network: Summary | None) -> Iterator[Advice]:
    """Yield configurations of FX graph mode and PT2E, each with a verdict for these flags."""
    wide = Resolved("int8", "uint8", "integer", activation_bits=8, engine="onednn")
    if saturates(wide, (), flags):
        why = "its default engine takes activations of 7 bits, which keep 16-bit sums exact"
        wrong = f"{OUT_OF_16_BITS}; also with backend.engine=onednn"
        yield Advice("backend=torch reduce_range=false", WRONG, wrong, TRIED)
    elif is_x86(flags):
        why = "oneDNN sums u8 by s8 products in 32 bits by VNNI"
    else:
        why = beyond_x86(flags)
    settings = "backend=torch dtype=int8 per_channel=true"
    yield Advice(settings, TRY, f"{why}{in_float('torch', network)}", "torch's engines")

    # The configurations that are refused or slow
    why = "integer kernels take s8 weights only"
    yield Advice("backend=torch dtype=uint8", CANNOT, why, "FBGEMM, oneDNN: docs/settings.md")
    why = "simulates integer kernels in float: never faster than FP32"
    yield Advice("backend=torch_pt2e", SLOW, why, "docs/settings.md")
