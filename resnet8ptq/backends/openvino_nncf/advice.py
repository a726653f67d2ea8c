"""Advice on NNCF; see `backends.advice`."""

from collections.abc import Collection, Iterator

from resnet8ptq.backends.advice import FRAMEWORKS, TRY, Advice
from resnet8ptq.models.summary import Summary


def sweep(flags: Collection[str], network: Summary | None) -> str | None:
    """Return None, because NNCF is a reference, which no sweep needs."""
    return None


def advise(flags: Collection[str], network: Summary | None) -> Iterator[Advice]:
    """Yield NNCF's plain 8-bit configuration."""
    why = "NNCF's own quantizer, a reference for backend=openvino (extra nncf)"
    yield Advice("backend=openvino_nncf dtype=int8 per_channel=true", TRY, why, FRAMEWORKS)
