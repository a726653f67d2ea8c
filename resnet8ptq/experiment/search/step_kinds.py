"""The steps of the search in their order, each with the reason to try it.

The first step of each backend is its plain 8-bit configuration. Each later step changes the best
configuration of the kinds of steps before it. Costs are first guesses of the time, relative to the
plain run: studies/ship.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from resnet8ptq.core.descriptor import Search, find_search
from resnet8ptq.experiment.search import changes
from resnet8ptq.experiment.search.changes import Change, change
from resnet8ptq.experiment.search.properties import ATTENTION, DEPTHWISE, POOLS, SILU, UNEQUAL

WEIGHTS, ACTIVATIONS = "weights", "activations"
_CALIBRATIONS = ("minmax", "percentile", "mse")


@dataclass(frozen=True)
class Seen:
    """The state of the search before a kind of step.

    Attributes:
        backend: the value of `backend=`.
        exact_sums: whether this CPU sums 8-bit products exactly.
        properties: properties of the network, see `properties`.
        settings: settings of the user and of the best configuration so far, by key.
        findings: the changes against the findings of a diagnosis, by the finding's name.
        costs_more: `WEIGHTS` or `ACTIVATIONS`; empty if unknown, or if both cost about the same.
        limit: the largest loss.
        classifies: whether the labels are classes.
    """

    backend: str
    exact_sums: bool
    limit: float
    properties: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[tuple[str, Change], ...] = ()
    costs_more: str = ""
    classifies: bool = True

    @property
    def search(self) -> Search:
        """The steps that the backend can take."""
        return find_search(self.backend)

    @property
    def is_wide(self) -> bool:
        """Whether activations have 16 bits."""
        return self.is_set("dtype", "w8a16")

    def has(self, *names: str) -> bool:
        """Whether the network has one of the properties."""
        return not set(names).isdisjoint(self.properties)

    def is_set(self, key: str, value: str) -> bool:
        """Whether the best configuration so far, or the user, has a setting."""
        return self.settings.get(key) == f"{key}={value}"


@dataclass(frozen=True)
class Proposal:
    """A change to try, and the reason."""

    change: Change
    why: str
    cost: float = 1.0


StepKind = Callable[[Seen], Iterator[Proposal]]


def start(seen: Seen) -> Change:
    """Return the plain 8-bit configuration of a backend on this CPU, per channel.

    It is `experiment=flagship_quick`, with 8-bit weights if their sums do not saturate; with
    `dtype=w8a16`, `experiment=npu`.
    """
    if seen.is_wide:
        return Change(("calib=minmax", "per_channel=true"))
    saturates = seen.search.sums_in_16_bits and not seen.exact_sums
    return Change((*seen.search.start, *(changes.REDUCE_RANGE.settings if saturates else ())))


def equalization(seen: Seen) -> Iterator[Proposal]:
    """Equalization, where few channels set the scale of an activation.

    Elsewhere it gains nothing beside a scale per channel, and may harm.
    """
    if seen.has(UNEQUAL):
        why = "channels of very different ranges share a scale: layers can be equalized"
        yield Proposal(changes.EQUALIZE, why)


def calibrations(seen: Seen) -> Iterator[Proposal]:
    """Propose other calibration methods."""
    for method in _CALIBRATIONS:
        chooses_8_bits = method == "mse" and seen.is_wide
        if not seen.is_set("calib", method) and not chooses_8_bits:
            why = "another calibration method on the collected statistics"
            yield Proposal(changes.calibrate(method), why, 0.8)


def operators(seen: Seen) -> Iterator[Proposal]:
    """Operators in float, for networks with certain properties."""
    if seen.search.chooses_operators and seen.has(POOLS) and not seen.is_wide:
        why = "an average pool takes the range of its input, which is too large for its output"
        yield Proposal(changes.POOLS_IN_FLOAT, why)


def answers(seen: Seen) -> Iterator[Proposal]:
    """The changes against the findings of the diagnosis."""
    for name, answer in seen.findings:
        yield Proposal(answer, f"the diagnosis found: {name}")


def quick_corrections(seen: Seen) -> Iterator[Proposal]:
    """Corrections that take seconds."""
    if seen.has(ATTENTION):
        why = "attention: outliers in few channels before matrix products"
        yield Proposal(changes.SMOOTH, why, 2)
    why = "rounding shifts the mean of the channels"
    if seen.has(DEPTHWISE):
        why += ", most in depthwise convolutions"
    yield Proposal(changes.BIAS, why, 2)


def float_layers(seen: Seen) -> Iterator[Proposal]:
    """The fewest layers in float that keep half of the limit."""
    auto = change(f"nodes_to_exclude=auto max_drop={seen.limit / 2:g}")
    why = "the layers that add most noise may suffice: as few as possible in float"
    if seen.costs_more == ACTIVATIONS:
        why = "rounding the activations costs more than the weights: some layers in float"
    yield Proposal(auto, why, 8)


def learned_rounding(seen: Seen) -> Iterator[Proposal]:
    """AdaRound with bias correction."""
    why = "the rounding of the weights can be learned"
    if seen.costs_more == WEIGHTS:
        why = "rounding the weights costs more than the activations: it can be learned"
    yield Proposal(changes.LEARN, why, 30)


def learned_blocks(seen: Seen) -> Iterator[Proposal]:
    """Rounding and activation ranges, block by block, in place of layer by layer."""
    if seen.settings.get("method", "method=static") == "method=static":
        words = (*changes.BLOCKS.settings, "corrections.adaround=false")
        yield Proposal(Change(words), "rounding and ranges can be learned block by block", 90)


def weights_alone(seen: Seen) -> Iterator[Proposal]:
    """Weights in blocks, activations in float, for matrix products."""
    if seen.search.weights_alone and seen.has(ATTENTION):
        for dtype in ("w4", "w8"):
            words = f"method=weight_only dtype={dtype} format=null"
            why = "transformers: weights in blocks, activations in float"
            yield Proposal(change(words), why)


def wide_activations(seen: Seen) -> Iterator[Proposal]:
    """16-bit activations, on TFLite's integer kernels; its converter takes no corrections then.

    In ONNX files this CPU computes them in float, so they are a step only if the user sets
    `dtype=w8a16` for an NPU.
    """
    if seen.search.wide_activations and not seen.is_wide:
        words = ("dtype=w8a16", "calib=minmax", *_without_corrections(seen))
        why = "8 bits do not suffice for the activations: 16, which are slow on a CPU"
        yield Proposal(Change(words), why, 100)


def fine_tuning(seen: Seen) -> Iterator[Proposal]:
    """Fine-tuning with fake quantization, distilled from FP32."""
    weights_alone = seen.is_set("method", "weight_only")
    if seen.classifies and not (seen.is_wide or weights_alone):
        words = ("method=qat", *_without_corrections(seen))
        why = "nothing without training suffices: three epochs on the training samples"
        yield Proposal(Change(words), why, 150)


def _without_corrections(seen: Seen) -> list[str]:
    """Return the settings that switch off the corrections of the best configuration so far."""
    switched_on = [key for key in seen.settings if seen.is_set(key, "true")]
    return [f"{key}=false" for key in switched_on if key.startswith("corrections.")]


def order(seen: Seen, goal: str) -> Sequence[StepKind]:
    """Return the kinds of steps after the first one, the cheap ones first.

    Learned rounding comes before layers in float, unless the activations cost more, because
    rounding of weights cannot win that back. In networks with SiLU the activations cost more, so
    layers in float come before the diagnosis.
    """
    middle: list[StepKind] = [answers, quick_corrections]
    if seen.has(SILU):
        costly = [float_layers, *middle, learned_rounding]
    elif seen.costs_more == ACTIVATIONS:
        costly = [*middle, float_layers, learned_rounding]
    else:
        costly = [*middle, learned_rounding, float_layers]
    last: list[StepKind] = [weights_alone] if goal != "fastest" else []
    last += [learned_blocks] if goal == "best" else []
    last += [wide_activations] if goal != "fastest" else []
    last += [fine_tuning]
    return [equalization, calibrations, operators, *costly, *last]
