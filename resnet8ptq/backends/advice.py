"""Advice on a backend's settings, from a CPU's flags and a network's operators, without a run.

A backend's module of advice has two functions, which take the CPU's flags and the network (None if
it is unknown). `advise` yields `Advice` objects. `sweep` returns the settings of a sweep over the
configurations to try, or None if no sweep is advised.
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
    """Settings with a verdict.

    Attributes:
        settings: the settings, as on the command line.
        verdict: `TRY`, `SLOW`, `WRONG` or `CANNOT`.
        why: the reason for the verdict.
        source: the origin of the reason, such as a page of docs/, or `nothing is known: measure`.
    """

    settings: str
    verdict: str
    why: str
    source: str


def advise_start(backend: Backend, network: Summary | None) -> Iterator[Advice]:
    """Yield advice for a backend without a module of advice: its plain 8-bit configuration.

    Yields nothing for a backend that does not quantize.
    """
    if backend.quantizes:
        settings = " ".join([f"backend={backend.name}", *backend.search.start])
        why = f"the plain 8-bit configuration{in_float(backend.name, network)}"
        yield Advice(settings, TRY, why, "nothing is known: measure")


def granularity(network: Summary | None) -> str:
    """Return the word that sets or sweeps `per_channel`; depthwise convolutions need true."""
    return "per_channel=true" if network and network.depthwise else "per_channel=false,true"


def may_saturate(dtype: str, flags: Collection[str]) -> bool:
    """Return whether 16-bit sums of a QDQ file with this dtype may saturate; see `saturates`."""
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
    """Return as text how a CPU that is not x86 sums 8-bit products, if that is known."""
    if not is_arm(flags):
        return "nothing is known of this CPU's kernels: measure"
    if "asimddp" in flags:
        return "ARM's dot product sums four products in one exact 32-bit sum"
    return "ARM without dot product widens to 16 bits first: exact, and less is gained"


def in_float(backend: str, network: Summary | None) -> str:
    """Return the end of a sentence that lists the operators in float, with the count of each.

    These are the operators for which `Summary.treatment` is `float`. The text is empty without
    them, and for an unknown network.
    """
    if network is None:
        return ""
    left = []
    for name, count in network.operators.items():
        if network.treatment(name, backend) == "float":
            left.append(f"{name} {count}")
    if not left:
        return ""
    return f"; in float between conversions: {', '.join(left)}"
