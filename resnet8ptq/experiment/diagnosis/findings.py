"""The faults of a quantized network: one function finds each in the measurements.

Each function returns a finding with changes against it, or None. A finding counts as a cause only
if one of these changes helps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resnet8ptq.calibration.outliers import Outliers
from resnet8ptq.config.schema import CalibConfig, RunConfig
from resnet8ptq.core import machine
from resnet8ptq.data.dataset import Split
from resnet8ptq.experiment.diagnosis.measuring import Activation, Spread, TensorMeasurements, to_db
from resnet8ptq.experiment.search.changes import (
    Change,
    calibrate,
    calibrate_with,
    change,
    leave_in_float,
)
from resnet8ptq.experiment.search.step_table import PER_CHANNEL, REDUCE_RANGE, UINT8
from resnet8ptq.tasks.distortion import KERNELS_DB

LOW_DB = 20.0  # the noise has a hundredth of the signal's power; 8 bits usually have 30 dB or more
UNLIKE = 64  # ranges that differ by 100 times, measured in octaves on both sides
OUTLIER = 8  # the largest value against the octave below which 99% of the values lie
JOINED_UNLIKE = 16
OFF_SHARE = 1e-4  # of the values of a tensor
OTHER_RANGE = 4


OUTLIER_SAMPLE = "outlier among the calibration samples"


@dataclass(frozen=True)
class Finding:
    """A fault and the changes against it.

    Attributes:
        tensors: the affected tensors, the worst first.
        meaning: the measurement and its meaning.
        changes: changes of settings, each of which may fix the fault.
        certain: whether it is a fault even if no change helps.
    """

    name: str
    tensors: tuple[str, ...]
    meaning: str
    changes: tuple[Change, ...] = ()
    certain: bool = False

    def say(self) -> str:
        """Return the finding in one sentence."""
        where = self.tensors[0] if self.tensors else "the network"
        more = f" and {len(self.tensors) - 1} more" if len(self.tensors) > 1 else ""
        return f"{self.name} in {where}{more}: {self.meaning}"


def wrong_preprocessing(measured: TensorMeasurements, config: RunConfig) -> Finding | None:
    """Report calibration samples whose range differs from that of the held-out samples."""
    drawn, fed = measured.calibrated, measured.fed
    least, most = sorted((drawn.reach, fed.reach))
    if not least or most / least < OTHER_RANGE:
        return None
    return Finding(
        "wrong preprocessing",
        ("the calibration samples",),
        f"their values lie within {drawn.low:.4g} to {drawn.high:.4g}, those of the held-out "
        f"samples within {fed.low:.4g} to {fed.high:.4g}; take calibration samples (calib.images) "
        "that are stored like the others, or a preprocess= that fits both",
        certain=True,
    )


def clipped(measured: TensorMeasurements, config: RunConfig) -> Finding | None:
    """Report calibrated ranges that are far narrower than the values seen."""
    by_db = sorted(measured.activations, key=lambda activation: activation.rounding_db)
    low = [activation for activation in by_db if activation.rounding_db < LOW_DB]
    hit = [a for a in low if a.clipped > a.spread.noise.sum() / 2]
    if not hit:
        return None
    worst = hit[0]
    more = calibrate_with(4 * (config.calib.samples_per_class or 100))
    return Finding(
        "clipped activation",
        _names(hit),
        f"its values lie within {worst.spread.low:.4g} to {worst.spread.high:.4g}, "
        f"{worst.beyond_share:.2%} of them beyond the calibrated range {_range(worst)}, "
        f"which leaves {worst.rounding_db:.1f} dB",
        (more,) if config.calib.name == "minmax" else (calibrate("minmax"),),
    )


def saturated_sum(measured: TensorMeasurements, config: RunConfig) -> Finding | None:
    """Report integer kernels that return other values than float arithmetic on the same levels.

    On x86 CPUs without VNNI, ONNX Runtime adds two products of uint8 and int8 into 16 bits, where
    255 * 127 * 2 does not fit (Intel, Intrinsics Guide, _mm256_maddubs_epi16).
    """
    by_share = sorted(measured.activations, key=lambda activation: -activation.off_share)
    hit = [activation for activation in by_share if activation.off_share > OFF_SHARE]
    ends = measured.kernels
    whole = ends.noise > measured.arithmetic.noise and ends.sqnr_db < KERNELS_DB
    if not hit and not whole:
        return None
    if hit:
        meaning = (
            f"{hit[0].off_share:.2%} of its values differ from float arithmetic on the "
            f"same integers, by up to {hit[0].most_off:.0f} levels, where rounding makes 1"
        )
    else:
        meaning = (
            f"integer kernels leave {ends.sqnr_db:.1f} dB against float arithmetic on the same "
            "integers, and so add more noise than quantization itself"
        )
    signed = any(weight.dtype == "int8" for weight in measured.weights)
    if signed and not config.reduce_range and not machine.sums_exactly():
        name = "saturated sum"
        meaning += "; this CPU lacks VNNI, and adds products of int8 weights in 16 bits"
    else:
        name = "inexact kernel"
    return Finding(name, _names(hit) or ("the output",), meaning, (REDUCE_RANGE, UINT8))


def channels_of_one_scale(measured: TensorMeasurements, config: RunConfig) -> Finding | None:
    """Report weights with one scale for channels whose ranges differ 100 times."""
    hit = []
    for weight in measured.weights:
        reaches = [channel.reach for channel in weight.channels if channel.reach]
        lost = sum(map(_is_lost, weight.channels))
        if weight.scales == 1 and reaches and max(reaches) / min(reaches) >= UNLIKE and lost:
            hit.append((lost / len(weight.channels), max(reaches) / min(reaches), weight))
    if not hit:
        return None
    hit.sort(key=lambda row: -row[0])
    _, ratio, worst = hit[0]
    lost = sum(map(_is_lost, worst.channels))
    return Finding(
        "channels of very different scale",
        tuple(weight.name for *_, weight in hit),
        f"one scale serves channels whose weights differ by up to about {ratio:.0f} times: {lost} "
        f"of {len(worst.channels)} channels keep less than {LOW_DB:.0f} dB",
        (PER_CHANNEL,),
    )


def outlier_weight(measured: TensorMeasurements, config: RunConfig) -> Finding | None:
    """Report weights with values much larger than nearly all others of their channel."""
    hit = []
    for weight in sorted(measured.weights, key=lambda weight: weight.spread.bulk_db):
        is_peaked = weight.spread.peaks >= OUTLIER and weight.spread.bulk_db < LOW_DB
        largest = max(weight.channels, key=lambda channel: channel.peak)
        if is_peaked and (largest.peaks >= OUTLIER or not largest.reach):
            hit.append(weight)
    if not hit:
        return None
    worst = hit[0]
    more = () if config.per_channel else (PER_CHANNEL,)
    return Finding(
        "outlier weight",
        tuple(weight.name for weight in hit),
        f"its largest is {worst.spread.peak:.4g}, where 99% lie below {worst.spread.reach:.4g}: "
        f"these keep {worst.spread.bulk_db:.1f} dB",
        (*more, leave_in_float(config, (worst.node,))),
    )


def outlier_activation(measured: TensorMeasurements, config: RunConfig) -> Finding | None:
    """Report activations whose range is much larger than nearly all their values."""
    by_db = sorted(measured.activations, key=lambda activation: activation.spread.bulk_db)
    low = [activation for activation in by_db if activation.spread.bulk_db < LOW_DB]
    hit = [a for a in low if _limit(a) >= OUTLIER * a.spread.reach > 0]
    if not hit:
        return None
    worst = hit[0]
    changes = [] if config.calib.name == "percentile" else [calibrate("percentile")]
    if worst.tensor.nodes:
        changes.append(leave_in_float(config, worst.tensor.nodes))
    return Finding(
        "outlier in an activation",
        _names(hit),
        f"its range is {_range(worst)}, where 99% of the values lie within "
        f"{worst.spread.reach:.4g} of zero: these keep {worst.spread.bulk_db:.1f} dB",
        tuple(changes),
    )


def unlike_inputs(measured: TensorMeasurements, config: RunConfig) -> Finding | None:
    """Report each Concat or Add with one scale for inputs of very different ranges."""
    by_name = {activation.tensor.name: activation for activation in measured.activations}
    hit = []
    for activation in measured.activations:
        reaches = {name: by_name[name].spread.reach for name in activation.parts}
        for name, noise in activation.parts.items():
            if noise.sqnr_db < LOW_DB and max(reaches.values()) >= JOINED_UNLIKE * reaches[name]:
                hit.append((noise.sqnr_db, name, max(reaches.values()), reaches[name], activation))
    if not hit:
        return None
    hit.sort(key=lambda row: row[0])
    sqnr_db, name, largest, least, worst = hit[0]
    return Finding(
        "joined inputs of very different scale",
        tuple(dict.fromkeys(activation.tensor.name for *_, activation in hit)),
        f"one scale serves {name}, whose values lie within {least:.4g} of zero, and another input "
        f"that reaches {largest:.4g}: the smaller keeps {sqnr_db:.1f} dB",
        (leave_in_float(config, worst.tensor.nodes),),
    )


Finder = Callable[[TensorMeasurements, RunConfig], Finding | None]
FINDERS: tuple[Finder, ...] = (
    wrong_preprocessing,
    saturated_sum,
    clipped,
    channels_of_one_scale,
    outlier_weight,
    outlier_activation,
    unlike_inputs,
)


def find(measured: TensorMeasurements, config: RunConfig) -> list[Finding]:
    """Return all findings, without duplicates."""
    findings = (finder(measured, config) for finder in FINDERS)
    return [finding for finding in findings if finding is not None]


def outlier_samples(outliers: Outliers, samples: Split, calib: CalibConfig) -> Finding:
    """Return the finding of calibration samples that stand out."""
    clip = outliers.clip(calib)
    meaning = f"{outliers.describe(samples)}; {outliers.mend(calib)}"
    changes = (change(clip),) if clip else ()
    return Finding(OUTLIER_SAMPLE, (outliers.tensor,), meaning, changes, certain=True)


def doubtful_fp32(doubt: str) -> Finding:
    """Return the finding that FP32 itself is broken, see `preprocessing_check`."""
    return Finding("wrong preprocessing", ("FP32",), doubt, certain=True)


def worst_layer(measured: TensorMeasurements) -> tuple[str, ...]:
    """Return the node of the layer that loses most when only it is quantized, if any."""
    layers = [activation for activation in measured.activations if activation.tensor.layer]
    worst = min(layers, key=lambda activation: activation.layer.sqnr_db, default=None)
    return () if worst is None else (worst.tensor.layer,)


def _is_lost(channel: Spread) -> bool:
    noise, signal = float(channel.noise.sum()), float(channel.signal.sum())
    return signal > 0 and to_db(signal, noise) < LOW_DB


def _limit(activation: Activation) -> float:
    return max(-activation.tensor.low, activation.tensor.high)


def _range(activation: Activation) -> str:
    return f"{activation.tensor.low:.4g} to {activation.tensor.high:.4g}"


def _names(activations: Sequence[Activation]) -> tuple[str, ...]:
    return tuple(activation.tensor.name for activation in activations)
