"""Configurations to try or to avoid, and steps of `ship`, from CPU and network, without a run.

Most configurations come from the backends' modules, see `backends.advice`.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from importlib import import_module

from resnet8ptq.backends.advice import (
    CANNOT,
    SLOW,
    TRY,
    WRONG,
    Advice,
    advise_start,
)
from resnet8ptq.backends.kernels import is_arm
from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.config.words import assign
from resnet8ptq.core import invocation, machine
from resnet8ptq.core.descriptor import Backend
from resnet8ptq.core.machine import VNNI, is_x86
from resnet8ptq.exploration.search import step_table
from resnet8ptq.exploration.search.step_table import Seen
from resnet8ptq.models.summary import Summary


def advise(flags: Collection[str], network: Summary | None = None) -> list[Advice]:
    """Return the known configurations, sorted by verdict: first those to try.

    Args:
        flags: the CPU's flags, see `machine.cpu`.
        network: None for advice on any network.
    """
    order = (TRY, SLOW, WRONG, CANNOT)
    listed: list[Advice] = []
    for backend in BACKENDS.values():
        listed += _advise(backend, flags, network)
    listed += _per_tensor(network)
    return sorted(listed, key=lambda candidate: order.index(candidate.verdict))


def sweeps(
    flags: Collection[str], network: Summary | None = None, settings: Sequence[str] = ()
) -> list[str]:
    """Return commands for the sweeps that the backends' modules of advice give.

    Backends with the same settings share a command. A backend has no command if it lacks an
    operator of the network or has no such sweep.

    Args:
        settings: the user's words for each command, such as the data.
    """
    # Collect the backends of each set of settings
    chosen: dict[str, list[str]] = {}
    for backend in BACKENDS.values():
        if not backend.advice or _find_lacking(backend, network):
            continue
        tried = import_module(backend.advice).sweep(flags, network)
        if tried:
            chosen.setdefault(tried, []).append(backend.name)

    # Make a command for each set of settings
    own = [*settings]
    if network is not None:
        own.insert(0, assign("model.path", str(network.path)))
    commands = []
    for tried, names in chosen.items():
        backends = f"backend={','.join(names)}"
        commands.append(invocation.command("run", "-m", *own, backends, *tried.split()))
    return commands


def steps(properties: Sequence[str], backend: str = "onnx") -> list[tuple[str, str]]:
    """Return settings and reasons of the steps that `ship goal=fastest` may try on a network.

    The user's settings, which may rule out some steps, are not considered. Steps against the
    findings of a diagnosis are not listed, because only the search has the findings.

    Args:
        properties: the properties of the network, see `network_properties`.
    """
    # The state of a search after its start, on this CPU
    seen = Seen(
        backend,
        exact_sums=machine.sums_exactly(),
        limit=ReportConfig().max_drop,
        properties=tuple(properties),
    )
    first = {word.partition("=")[0]: word for word in step_table.start(seen).settings}
    seen = replace(seen, settings=first)

    # List the steps in their order
    listed = []
    for name in step_table.order(properties, "fastest"):
        for proposal in step_table.propose(name, seen):
            listed.append((proposal.change.words, proposal.why))
    return listed


def _advise(backend: Backend, flags: Collection[str], network: Summary | None) -> Iterator[Advice]:
    lacking = _find_lacking(backend, network)
    if lacking:
        why = f"it lacks {', '.join(lacking)}"
        return iter([Advice(f"backend={backend.name}", CANNOT, why, "docs/design.md")])
    if backend.advice:
        candidates: Iterator[Advice] = import_module(backend.advice).advise(flags, network)
        return candidates
    return advise_start(backend, network)


def _find_lacking(backend: Backend, network: Summary | None) -> list[str]:
    """Return the operators of a network that a backend is known to lack; see `Backend.lacks`."""
    if network is None:
        return []
    return network.lacking.get(backend.name, [])


def _per_tensor(network: Summary | None) -> Iterator[Advice]:
    if network is not None and network.depthwise:
        why = (
            f"{network.depthwise} convolutions in groups (depthwise): channels of very different "
            "ranges share a scale; per_channel=true gives each its own"
        )
        yield Advice("per_channel=false", WRONG, why, "Krishnamoorthi 2018, arXiv:1806.08342")


def describe_cpu(name: str, flags: Collection[str]) -> str:
    """Return the CPU and its relevant features in one line.

    >>> describe_cpu("Xeon", ["sse2", "avx2", "avx512bw", "avx512_vnni"])
    'Xeon: AVX2, AVX512, VNNI'
    """
    if is_arm(flags):
        product = "dot product" if "asimddp" in flags else "no dot product"
        return f"{name}: ARM, {product}"
    if not is_x86(flags):
        return f"{name}: no known CPU flags"
    widths = [kind for flag, kind in _WIDTHS.items() if flag in flags]
    features = widths or ["SSE2"]
    has_vnni = not VNNI.isdisjoint(flags)
    features.append("VNNI" if has_vnni else "no VNNI")
    if "amx_int8" in flags:
        features.append("AMX")
    return f"{name}: {', '.join(features)}"


_WIDTHS = {"avx2": "AVX2", "avx512bw": "AVX512"}
