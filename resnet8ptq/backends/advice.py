"""Advice on a backend's settings, from a CPU's flags and a network's operators, without a run.

A backend's module of advice has two functions, which take the CPU's flags and the network (None for
any network). `advise` yields `Advice` objects. `sweep` returns the settings of a sweep over the
configurations to try, or None. Each `Advice` names its source. Figures were measured on the machine
of docs/speed.md.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from resnet8ptq.backends.contract import Resolved
from resnet8ptq.backends.kernels import is_arm, saturates
from resnet8ptq.config.schema import DTYPES
from resnet8ptq.core.descriptor import Backend
from resnet8ptq.models.summary import Summary

TRY = "try"
SLOW = "slow here"
WRONG = "may be wrong here"
CANNOT = "cannot"

DOCS = "ONNX Runtime's docs (Quantize ONNX models)"
TRIED = "largest integers tried elsewhere: docs/speed.md"
MEASURED = "measured elsewhere: docs/speed.md"
FRAMEWORKS = "measured elsewhere: studies/frameworks.md"
OUT_OF_16_BITS = "vpmaddubsw sums two products in 16 bits, which saturate without VNNI"


@dataclass(frozen=True)
class Advice:
    """A configuration with its verdict, the reason and the source.

    Attributes:
        settings: the settings, as typed.
        verdict: `TRY`, `SLOW`, `WRONG` or `CANNOT`.
    """

    settings: str
    verdict: str
    why: str
    source: str


def advise_start(backend: Backend, network: Summary | None) -> Iterator[Advice]:
    """Yield the plain 8-bit configuration of a backend that has no module of advice."""
    if backend.quantizes:
        settings = " ".join([f"backend={backend.name}", *backend.search.start])
        why = f"the plain 8-bit configuration{in_float(backend.name, network)}"
        yield Advice(settings, TRY, why, "nothing is known: measure")


def granularity(network: Summary | None) -> str:
    """Return the settings of `per_channel` to sweep."""
    return "per_channel=true" if network and network.depthwise else "per_channel=false,true"


def may_saturate(dtype: str, flags: Collection[str]) -> bool:
    """Return whether a QDQ file with this dtype may saturate its integer sums on this CPU."""
    activations, weights = DTYPES[dtype]
    return saturates(
        Resolved(
            weights,
            activation_dtype=activations,
            execution="integer",
            weight_bits=8,
            file_format="QDQ",
        ),
        (),
        flags,
    )


def beyond_x86(flags: Collection[str]) -> str:
    """Return the facts about the kernels of a CPU that is not x86."""
    if not is_arm(flags):
        return "nothing is known of this CPU's kernels: measure"
    if "asimddp" in flags:
        return "ARM's dot product sums four products in one exact 32-bit sum"
    return "ARM without dot product widens to 16 bits first: exact, and less is gained"


def in_float(backend: str, network: Summary | None) -> str:
    """Return the end of a sentence that counts the operators that stay in float.

    The text is empty if there are none, or if the network is unknown.
    """
    if network is None:
        return ""
    left = []
    for name, count in network.operators.items():
        if network.treatment(name, backend) == "float":
            left.append(f"{name} {count}")
    return f"; in float between conversions: {', '.join(left)}" if left else ""
