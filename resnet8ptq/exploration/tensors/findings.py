"""Finds the faults of a quantized file in the comparison of its tensors.

The findings apply to files of any program. For a file that this program quantized,
`step_table.answer` returns the settings that may fix a fault.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import machine
from resnet8ptq.exploration.search import step_table
from resnet8ptq.exploration.search.changes import Change
from resnet8ptq.exploration.tensors.comparing import ComparedTensor, TensorComparison, Weight
from resnet8ptq.exploration.tensors.explaining import UNUSED, find_least_db
from resnet8ptq.exploration.tensors.spread import Spread
from resnet8ptq.tasks.scoring.distortion import KERNELS_DB

LOW_DB = 20.0  # the noise has a hundredth of the signal's power; 8 bits usually have 30 dB or more
UNLIKE = 64  # ratio of reaches that are powers of two, for ranges that differ about 100 times
OUTLIER = 8  # ratio of the largest value to the octave that holds 99% of the values
FEW_CHANNELS = 0.05  # largest share of the channels that counts as outliers
JOINED_UNLIKE = 16  # ratio of the reaches of two inputs of a Concat or Add
NAMED = 5  # channels that a finding lists
LOST_LEVELS = 4  # levels that a channel must span to be visible in the file
LOST_PART = 0.02  # the same span as a share of the largest value, if levels are not known
WRONG_DB = 10.0  # SQNR of weights whose noise has a tenth of their power
MOST = 0.7  # share of layers with wrong weights, above which the file is of another training
OFF_SHARE = 1e-4  # largest share of a tensor's values that exact kernels may compute differently
FIXED = {"Softmax": 1 / 256, "Sigmoid": 1 / 256, "Tanh": 1 / 128}  # the steps that TFLite fixes
NEAR = 0.02  # relative difference of steps that count as equal


@dataclass(frozen=True)
class Finding:
    """A possible fault and the changes against it.

    Attributes:
        tensors: names of the affected tensors or weights, or words such as `FP32`.
        meaning: the measurement on the first of `tensors`, in words.
        nodes: names of the nodes to leave in float against the fault in the first of `tensors`.
        changes: changes of settings, each of which may fix the fault.
        certain: whether the finding is a fault even if no change helps.
    """

    name: str
    tensors: tuple[str, ...]
    meaning: str
    nodes: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    certain: bool = False

    def say(self) -> str:
        """Return the finding in one sentence."""
        where = "the network"
        if self.tensors:
            where = self.tensors[0]
        if len(self.tensors) > 1:
            where += f" and {len(self.tensors) - 1} more"
        return f"{self.name} in {where}: {self.meaning}"

    def to_entry(self) -> dict[str, object]:
        """Return the finding for programs, with its first tensor only."""
        worst = self.tensors[0] if self.tensors else ""
        changes = [change.settings for change in self.changes]
        return {"name": self.name, "tensor": worst, "meaning": self.meaning, "changes": changes}


def find_inexact_kernels(compared: TensorComparison) -> list[Finding]:
    """Report tensors whose values the kernels compute differently from the file's definition.

    The list is empty unless the kernels add much noise to one of them, see `_is_inexact`.
    On x86 CPUs without VNNI, ONNX Runtime adds two products of uint8 and int8 into 16 bits (Intel,
    Intrinsics Guide, _mm256_maddubs_epi16). The largest sum, 2 * 255 * 127, does not fit.
    """
    off = [tensor for tensor in compared.tensors if tensor.off_share > OFF_SHARE]
    if not any(map(_is_inexact, off)):
        return []

    # Without VNNI, sums of int8 weights saturate
    kind = step_table.INEXACT_KERNEL
    cause = ""
    dtypes = {weight.rounded.dtype for weight in compared.weights}
    if "int8" in dtypes and not machine.sums_exactly():
        kind = step_table.SATURATED
        cause = "; this CPU lacks VNNI, and adds products of int8 weights in 16 bits"

    def say(first: ComparedTensor) -> str:
        return (
            f"{first.off_share:.2%} of its values differ from float arithmetic on the same "
            f"integers, by up to {first.most_off:.0f} levels, where rounding makes 1{cause}"
        )

    return _report(kind, off, say)


def _is_inexact(tensor: ComparedTensor) -> bool:
    """Return whether the kernels add more noise than rounding, and than the file itself has."""
    return tensor.kernels.sqnr_db < min(KERNELS_DB, tensor.sqnr_db)


def find_clipped(compared: TensorComparison) -> list[Finding]:
    """Report noisy tensors where most noise of rounding comes from values beyond the range."""
    clipped = []
    for tensor in _by_rounding(compared):
        is_low = tensor.spread.sqnr_db < LOW_DB
        if is_low and tensor.clipped > tensor.spread.noise.sum() / 2:
            clipped.append(tensor)

    def say(worst: ComparedTensor) -> str:
        return (
            f"its values lie within {_ends(worst)}, {worst.beyond_share:.2%} of them beyond the "
            f"range in the file, {worst.levels}, which leaves {worst.spread.sqnr_db:.1f} dB"
        )

    return _report(step_table.CLIPPED, clipped, say)


def find_explained(compared: TensorComparison) -> list[Finding]:
    """Report the faulty layers, with one finding for each kind of explanation."""
    kinds: dict[str, list[ComparedTensor]] = {}
    words: dict[str, str] = {}
    for tensor in sorted(compared.tensors, key=lambda tensor: tensor.own_db):
        explanation = tensor.explanation
        if explanation and explanation.kind and tensor.is_faulty:
            kinds.setdefault(explanation.kind, []).append(tensor)
            words[tensor.name] = f"{tensor.own_db:.1f} dB alone; {explanation.words}"

    # A file of another training has many wrong layers and one cause
    other = describe_other_weights(compared)
    more = f"; {other}" if other else ""

    def say(worst: ComparedTensor) -> str:
        return words[worst.name] + more

    reports: list[Finding] = []
    for kind, tensors in kinds.items():
        reports += _report(kind, tensors, say)
    return reports


def describe_other_weights(compared: TensorComparison) -> str:
    """Return a probable cause if the weights of many layers are wrong; else empty text.

    Many are at least three, and more than a share of `MOST` of the layers with known weights.
    """
    wrong = []
    for weight in compared.weights:
        if weight.spread.sqnr_db < min(WRONG_DB, find_least_db(weight.rounded.dtype)):
            wrong.append(weight)
    if len(wrong) <= max(2, MOST * len(compared.weights)):
        return ""
    return f"{len(wrong)} layers have other weights: the file may be of another training"


def find_unlike_channels(compared: TensorComparison) -> list[Finding]:
    """Report weights with one scale for channels so different that small ones are lost."""
    hit = []
    for weight in compared.weights:
        is_unlike = weight.rounded.scales == 1 and _compare_reaches(weight) >= UNLIKE
        if is_unlike and _count_lost(weight):
            hit.append(weight)
    if not hit:
        return []

    # Describe the weights that lose the largest share of channels
    hit.sort(key=lambda weight: -(_count_lost(weight) / len(weight.channels)))
    worst = hit[0]
    meaning = (
        "one scale serves channels whose weights differ by up to about "
        f"{_compare_reaches(worst):.0f} times: {_count_lost(worst)} of {len(worst.channels)} "
        f"channels keep less than {LOW_DB:.0f} dB"
    )
    return [Finding(step_table.UNLIKE_CHANNELS, _weight_names(hit), meaning)]


def _compare_reaches(weight: Weight) -> float:
    """Return the largest reach of a channel over the smallest above 0; 0 without such channels."""
    reaches = [channel.reach for channel in weight.channels if channel.reach]
    if not reaches:
        return 0.0
    return max(reaches) / min(reaches)


def _count_lost(weight: Weight) -> int:
    """Return the number of channels with an SQNR below `LOW_DB`."""
    return sum(channel.sqnr_db < LOW_DB for channel in weight.channels)


def _weight_names(weights: Sequence[Weight]) -> tuple[str, ...]:
    return tuple(weight.rounded.name for weight in weights)


def find_outlier_weight(compared: TensorComparison) -> list[Finding]:
    """Report weights with outliers so large that 99% of the values are noisy.

    The channel of the largest value must have outliers too, or fewer than two nonzero values.
    """
    hit = []
    for weight in sorted(compared.weights, key=lambda weight: weight.spread.bulk_db):
        # Large values that fill a channel are no outliers, see `find_unlike_channels`
        is_peaked = weight.spread.peaks >= OUTLIER and weight.spread.bulk_db < LOW_DB
        largest = max(weight.channels, key=lambda channel: channel.peak)
        if is_peaked and (largest.peaks >= OUTLIER or not largest.reach):
            hit.append(weight)
    if not hit:
        return []

    # Describe the weights whose other values keep least
    worst = hit[0]
    meaning = (
        f"its largest is {worst.spread.peak:.4g}, where 99% lie below {worst.spread.reach:.4g}: "
        f"these keep {worst.spread.bulk_db:.1f} dB"
    )
    names = _weight_names(hit)
    node = worst.rounded.node
    return [Finding(step_table.OUTLIER_WEIGHT, tensors=names, meaning=meaning, nodes=(node,))]


def find_outlier_activations(compared: TensorComparison) -> list[Finding]:
    """Report ranges that outliers make so large that 99% of the values are noisy.

    Outliers in a few channels are one kind of finding, all others are another.
    """
    by_channel = []
    others = []
    for tensor in sorted(compared.tensors, key=lambda tensor: tensor.spread.bulk_db):
        spread = tensor.spread
        is_used = tensor.limit < UNUSED * spread.peak
        is_peaked = tensor.limit >= OUTLIER * spread.reach > 0
        if not (spread.bulk_db < LOW_DB and is_used and is_peaked):
            continue
        # Equalization may help against outliers in a few channels
        if _outlier_channels(tensor):
            by_channel.append(tensor)
        else:
            others.append(tensor)

    def say(worst: ComparedTensor) -> str:
        few = _outlier_channels(worst)[:NAMED]
        cause = ""
        if few:
            cause = f" because of channel {', '.join(map(str, few))}"
        return (
            f"its range is {worst.levels}{cause}, where 99% of the values lie within "
            f"{worst.spread.reach:.4g} of zero: these keep {worst.spread.bulk_db:.1f} dB"
        )

    return [
        *_report(step_table.OUTLIER_CHANNEL, by_channel, say),
        *_report(step_table.OUTLIER_ACTIVATION, others, say),
    ]


def _outlier_channels(tensor: ComparedTensor) -> list[int]:
    """Return channels that reach far beyond most others, the largest first.

    The list has at most a share of `FEW_CHANNELS` of the channels.
    """
    peaks = np.abs(tensor.channels[:2]).max(axis=0)  # of the values that FP32 computes
    most = int(FEW_CHANNELS * len(peaks))
    if not most:
        return []
    order = np.argsort(-peaks)
    is_far = peaks[order[:most]] >= OUTLIER / 2 * peaks[order[most]]
    far: list[int] = order[:most][is_far].tolist()
    return far


def find_unlike_inputs(compared: TensorComparison) -> list[Finding]:
    """Report the Concats and Adds whose single scale makes a much smaller input noisy."""
    small = []
    for tensor in compared.tensors:
        largest = max((part.reach for part in tensor.parts.values()), default=0.0)
        for name, part in tensor.parts.items():
            if part.sqnr_db < LOW_DB and largest >= JOINED_UNLIKE * part.reach:
                small.append(_SmallInput(tensor, name, part, largest))
    if not small:
        return []

    # Describe the input that keeps least
    small.sort(key=lambda one: one.part.sqnr_db)
    worst = small[0]
    meaning = (
        f"one scale serves {worst.name}, whose values lie within {worst.part.reach:.4g} of zero, "
        f"and another input that reaches {worst.largest:.4g}: the smaller keeps "
        f"{worst.part.sqnr_db:.1f} dB"
    )
    names = dict.fromkeys(one.tensor.name for one in small)  # a tensor may have several
    return [Finding(step_table.UNLIKE_INPUTS, tuple(names), meaning, worst.tensor.nodes)]


@dataclass(frozen=True)
class _SmallInput:
    """An input of a Concat or Add with much smaller values than another input.

    Attributes:
        part: the values of the input, with the noise of rounding them with the step of `tensor`.
        largest: the largest reach of the inputs, see `Spread.reach`.
    """

    tensor: ComparedTensor
    name: str
    part: Spread
    largest: float


def find_unused_range(compared: TensorComparison) -> list[Finding]:
    """Report tensors that use a small part of their range, and are noisy or the costliest.

    Ranges that the format fixes are one kind of finding, all others are another.
    """
    fixed = []
    others = []
    for tensor in _by_rounding(compared):
        is_unused = tensor.limit >= UNUSED * tensor.spread.peak > 0
        is_noisy = tensor.spread.sqnr_db < LOW_DB or tensor is compared.costliest
        if not (is_unused and is_noisy):
            continue
        # No calibration changes a step that the format fixes
        if _has_fixed_step(tensor):
            fixed.append(tensor)
        else:
            others.append(tensor)

    def say(worst: ComparedTensor) -> str:
        cause = ", by the format" if _has_fixed_step(worst) else ""
        return (
            f"the range of this {worst.operator} is {worst.levels}{cause}, its values lie within "
            f"{_ends(worst)}, which leaves {worst.spread.sqnr_db:.1f} dB"
        )

    return [
        *_report(step_table.FIXED_SCALE, fixed, say),
        *_report(step_table.UNUSED_RANGE, others, say),
    ]


def _has_fixed_step(tensor: ComparedTensor) -> bool:
    levels = tensor.levels
    fixed_step = FIXED.get(tensor.operator)
    if levels is None or fixed_step is None:
        return False
    return abs(levels.step / fixed_step - 1) < NEAR


def find_dead_channel(compared: TensorComparison) -> list[Finding]:
    """Report channels that are constant in the file, but not when FP32 computes the layer."""
    dead = [tensor for tensor in compared.tensors if _find_dead(tensor).any()]

    def say(first: ComparedTensor) -> str:
        constant = _find_dead(first)
        low, high = first.channels[:2, constant][:, 0]
        return (
            f"{constant.sum()} of {len(constant)} channels are constant in the file; channel "
            f"{constant.argmax()} reaches {low:.4g} to {high:.4g} in float"
        )

    return _report(step_table.DEAD_CHANNEL, dead, say)


def _find_dead(tensor: ComparedTensor) -> NDArray[np.bool_]:
    """Return a mask of channels that are constant only in the file, but not clipped.

    The mask is all False for an input, and if it would cover all channels.
    """
    low, high, file_low, file_high = tensor.channels
    levels = tensor.levels

    # A channel must span several levels in FP32 to be missed in the file
    least_span = LOST_PART * tensor.spread.peak
    if levels:
        least_span = LOST_LEVELS * levels.step
    varies = high > low + least_span  # high - low would be NaN between infinite ends
    dead = (file_high == file_low) & varies
    if levels:  # a channel at an end of the range is clipped, see `find_clipped`
        dead &= file_high < levels.high - levels.step / 2
        dead &= (file_low > levels.low + levels.step / 2) | (levels.low >= 0)
    return dead & (not dead.all()) & bool(tensor.operator)


FINDERS: Sequence[Callable[[TensorComparison], list[Finding]]] = (
    find_inexact_kernels,
    find_clipped,
    find_explained,
    find_unlike_channels,
    find_outlier_weight,
    find_outlier_activations,
    find_unlike_inputs,
    find_unused_range,
    find_dead_channel,
)


def find_faults(compared: TensorComparison) -> list[Finding]:
    """Return at most one finding of each kind.

    An unexplained error is left out if another finding names its worst tensor or the tensor's
    weights.
    """
    findings: dict[str, Finding] = {}
    for finder in FINDERS:
        for finding in finder(compared):
            findings.setdefault(finding.name, finding)

    # Collect the tensors and layers that other findings name
    unexplained = findings.pop(step_table.UNEXPLAINED, None)
    named = name_tensors(findings.values())
    for tensor in compared.tensors:
        if tensor.weight and tensor.weight.rounded.name in named:
            named.add(tensor.name)
    if unexplained is None or unexplained.tensors[0] in named:
        return [*findings.values()]
    return [*findings.values(), unexplained]


def to_entries(findings: Iterable[Finding]) -> list[dict[str, object]]:
    """Return findings for programs, in JSON's types."""
    return [finding.to_entry() for finding in findings]


def name_tensors(findings: Iterable[Finding]) -> set[str]:
    """Return the names that the findings list as `tensors`."""
    names: set[str] = set()
    for finding in findings:
        names.update(finding.tensors)
    return names


def _report(
    name: str, tensors: Sequence[ComparedTensor], say: Callable[[ComparedTensor], str]
) -> list[Finding]:
    """Return one finding on all these tensors, described by the first; empty without tensors."""
    if not tensors:
        return []
    names = tuple(tensor.name for tensor in tensors)
    return [Finding(name, names, meaning=say(tensors[0]), nodes=tensors[0].nodes)]


def worst_layer(compared: TensorComparison) -> tuple[str, ...]:
    """Return the name of the layer that alone has the lowest SQNR; no name if none is matched."""
    layers = [tensor for tensor in compared.tensors if tensor.layer]
    if not layers:
        return ()
    worst = min(layers, key=lambda tensor: tensor.own_db)
    return (worst.layer,)


def _by_rounding(compared: TensorComparison) -> list[ComparedTensor]:
    return sorted(compared.tensors, key=lambda tensor: tensor.spread.sqnr_db)


def _ends(tensor: ComparedTensor) -> str:
    return f"{tensor.spread.low:.4g} to {tensor.spread.high:.4g}"
