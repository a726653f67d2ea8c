"""The choice of bits for each layer's weights: `precision.plan=auto`.

As in Cai et al., "ZeroQ: A Novel Zero Shot Quantization Framework", CVPR 2020, the error of the
output is measured with one layer rounded, and the errors are assumed to add up. With
`corrections.adaround`, weights below 8 bits are measured with learned rounding. The candidates are
the Pareto-optimal plans in error and bytes. A binary search quantizes some of them, and chooses the
largest within `max_bytes`, or the smallest within `max_drop`. Errors and drops are measured on
training samples that did not calibrate.
"""

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.core import files, memory
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.corrections import layers
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.data.lazy import Batches
from resnet8ptq.graph.session import Runner, end_at_logits, open_runner
from resnet8ptq.graph.weights import Array, read_weights, write_weights
from resnet8ptq.precision.plan import Plan
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE

FILE = "plan.csv"
_STEPS = 1000

Bits = Mapping[str, int]  # bits by a layer's short name
Learned = Mapping[tuple[str, int], Array]  # weights by layer and bits


@dataclass(frozen=True)
class Option:
    """One layer's weights in a number of bits.

    Attributes:
        error: squared error of the outputs with only this layer rounded, relative to the outputs'
            power.
        saved_bytes: bytes that the weights save in comparison with 8 bits; negative for float.
    """

    layer: str
    bits: int
    error: float
    saved_bytes: int


@dataclass(frozen=True)
class TriedPlan:
    """A plan that was quantized, with its measurements.

    Attributes:
        drop: loss against FP32 on held-out samples, see `stopping.TrialResult`; None if a limit on
            bytes decides.
        p: one-sided p-value of "the drop is at the limit or above"; 1 if not measured.
        samples: number of scored samples; None if not measured.
    """

    bits: Bits
    size_bytes: int
    drop: float | None = None
    p: float = 1.0
    samples: int | None = None


Try = Callable[[Bits], TriedPlan]


def measure_options(
    path: Path, setting: CorrectionSettings, widths: Sequence[int], learned: Learned
) -> list[Option]:
    """Return the error and the saved bytes of each layer of `find_plain_layers` in each width.

    Args:
        path: file of the FP32 network.
        setting: settings of corrections, with the samples to measure on.
        widths: weight bits that the backend supports; `FLOAT_BITS` leaves a layer in float.
        learned: weights that nearest rounding maps to learned levels, by layer and bits. Without
            an entry, the FP32 weights are rounded to nearest.
    """
    proto = onnx.load(path)
    end_at_logits(proto)
    chosen = layers.find_plain_layers(proto.graph, setting.selection)
    batches = setting.samples.batches(setting.calib.batch_size)
    exact = _Runs(open_runner(proto, setting.runtime.threads), batches)
    power = 0.0
    for _, outputs in exact:
        power += sum(map(_square, outputs))

    # Round one layer at a time
    options = []
    for name in track(list(chosen), "Sensitivity of layers", "layers"):
        exact_weights = read_weights(proto.graph, chosen[name])
        for bits in widths:
            saved = exact_weights.size * (8 - bits) // 8
            if bits == FLOAT_BITS:
                options.append(Option(name, bits, error=0.0, saved_bytes=saved))
                continue
            scheme = Plan(setting.weights.default, {name: bits}).scheme(name)
            rounded = copy.deepcopy(proto)
            node = layers.find_plain_layers(rounded.graph, setting.selection)[name]
            weights = learned.get((name, bits), exact_weights)
            write_weights(rounded.graph, node, scheme.grid(weights, 0).round(weights))
            run = open_runner(rounded, setting.runtime.threads)
            error = _find_error(run, exact) / max(power, 1e-30)
            options.append(Option(name, bits, error=error, saved_bytes=saved))
    return options


def _find_error(run: Runner, exact: "_Runs") -> float:
    """Return the squared error of a network's outputs, summed over all batches."""
    errors = []
    for batch, outputs in exact:
        for actual, wanted in zip(run(batch), outputs, strict=True):
            errors.append(_square(actual - wanted))
    return sum(errors)


class _Runs:
    """Batches and a network's outputs, kept if they fit into a step's memory budget."""

    def __init__(self, run: Runner, batches: Batches) -> None:
        self._run = run
        self._batches = batches
        self._kept: list[tuple[Array, list[Array]]] | None = []

    def __iter__(self) -> Iterator[tuple[Array, list[Array]]]:
        if self._kept:
            yield from self._kept
            return
        kept = self._kept
        held = 0
        for batch in self._batches:
            outputs = self._run(batch)
            held += batch.nbytes + sum(values.nbytes for values in outputs)
            if kept is not None:
                kept.append((batch, outputs))
            if held > memory.step():
                kept = self._kept = None
            yield batch, outputs


def find_plans(options: Sequence[Option]) -> list[Bits]:
    """Return the Pareto-optimal plans in error and bytes, the largest plan first.

    The plan with all layers in float is left out.

    Plans are built layer by layer. Of partial plans that save about the same bytes, only the one
    with the smallest error is kept, so an optimal plan may be missed.
    """
    by_layer: dict[str, list[Option]] = {}
    for option in options:
        by_layer.setdefault(option.layer, []).append(option)

    # Find the width of a class of plans, in bytes
    span = 0
    for choices in by_layer.values():
        savings = [option.saved_bytes for option in choices]
        span += max(savings) - min(savings)
    width = max(1, span // _STEPS)

    # Extend each partial plan, with its saved bytes, error and bits, by one layer
    partial: list[tuple[int, float, dict[str, int]]] = [(0, 0.0, {})]
    for name, choices in by_layer.items():
        best: dict[int, tuple[int, float, dict[str, int]]] = {}
        for saved, error, bits in partial:
            for option in choices:
                chosen = {**bits, name: option.bits}
                is_whole = len(chosen) == len(by_layer)
                if is_whole and {*chosen.values()} == {FLOAT_BITS}:
                    continue
                total = saved + option.saved_bytes
                summed = error + option.error
                known = best.get(total // width)
                if known is None or (summed, -total) < (known[1], -known[0]):
                    best[total // width] = (total, summed, chosen)
        partial = _undominated(best.values())
    return [bits for _, _, bits in partial]


def _undominated(
    plans: Iterable[tuple[int, float, dict[str, int]]],
) -> list[tuple[int, float, dict[str, int]]]:
    """Return the Pareto-optimal partial plans in bytes and error, fewest saved bytes first."""
    kept: list[tuple[int, float, dict[str, int]]] = []
    least = math.inf
    for plan in sorted(plans, key=lambda plan: (-plan[0], plan[1])):
        if plan[1] < least:
            kept.append(plan)
            least = plan[1]
    return kept[::-1]


def level_of(plans: Sequence[Bits]) -> float:
    """Return the significance level of each test in a binary search over plans (Bonferroni)."""
    return SIGNIFICANCE / (1 + math.ceil(math.log2(max(len(plans), 2))))


def choose(
    plans: Sequence[Bits],
    attempt: Try,
    max_bytes: int | None,
    max_drop: float | None,
    level: float | None = None,
) -> TriedPlan:
    """Return the first of `plans` within `max_bytes`, or the last within `max_drop`.

    The binary search assumes that size falls, and that the drop rises, from plan to plan.

    Args:
        plans: the result of `find_plans`.
        attempt: quantizes by a plan, and measures it.
        level: level of the test that the drop is within `max_drop`; if None, the measured drop
            decides.

    Raises:
        ConfigError: no plan is within the limit; the message has the bytes of the smallest plan, or
            the drop of the largest.
    """
    # In this order, all plans after one that fits also fit.
    ordered = plans if max_bytes is not None else plans[::-1]
    measured: dict[int, TriedPlan] = {}

    def fits(number: int) -> bool:
        plan = measured[number] = attempt(ordered[number])
        if max_bytes is not None:
            return plan.size_bytes <= max_bytes
        if level is not None:
            return plan.p <= level
        return plan.drop is not None and plan.drop <= (max_drop or 0)

    # Try the easiest plan first: without it, no other plan fits
    last = len(ordered) - 1
    if fits(last):
        return measured[bisect_left(range(last), True, key=fits)]
    if max_bytes is not None:
        raise ConfigError(
            f"precision.max_bytes: got {max_bytes}, expected at least {measured[last].size_bytes} "
            "here: every layer has the fewest bits that this backend's files hold"
        )
    raise ConfigError(
        f"precision.max_drop: got {max_drop}, expected at least {measured[last].drop:.5f} here: "
        "the drop on held-out samples with the most bits that the layers can have"
    )


def to_csv(tried: Sequence[TriedPlan]) -> str:
    """Return CSV with a row for each quantized plan: size, drop, samples, and the bits by layer."""
    rows: list[list[object]] = [["size_bytes", "drop", "samples"]]
    if tried:
        rows[0] += tried[0].bits  # the header has the layers' names
    for plan in tried:
        drop = "" if plan.drop is None else plan.drop
        samples = "" if plan.samples is None else plan.samples
        rows.append([plan.size_bytes, drop, samples, *plan.bits.values()])
    return files.to_csv(rows)


def _square(values: object) -> float:
    return float(np.square(np.asarray(values), dtype=np.float64).sum())
