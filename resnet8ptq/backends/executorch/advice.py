"""Advice on ExecuTorch; see `backends.advice`."""

from collections.abc import Collection, Iterator

from resnet8ptq.backends.advice import FRAMEWORKS, TRY, Advice, in_float
from resnet8ptq.models.summary import Summary


def sweep(flags: Collection[str], network: Summary | None) -> str | None:
    """Return None, because lowering takes too long for a sweep."""
    return None


def advise(flags: Collection[str], network: Summary | None) -> Iterator[Advice]:
    """Yield ExecuTorch's plain 8-bit configuration; it does not depend on the CPU."""
    rest = in_float("executorch", network)
    why = f"XNNPACK's kernels take s8 activations; runs on phones too{rest}"
    settings = "backend=executorch dtype=int8 per_channel=true"
    yield Advice(settings, TRY, why, FRAMEWORKS)
