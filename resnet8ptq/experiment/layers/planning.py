"""`precision.plan=auto`: chooses the bits of each layer's weights within a limit."""

import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx

from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.sampling import shuffle
from resnet8ptq.experiment.layers import bits_search, exclusion
from resnet8ptq.experiment.stopping import try_choice
from resnet8ptq.experiment.workspace import Prepared, Step, Workspace

log = logging.getLogger(__name__)


def choose_bits(work: Workspace, prepared: Prepared, correct: Step) -> bits_search.TriedPlan:
    """Return the chosen plan; write the tried plans to `plan.csv`, even if no plan fits.

    Args:
        correct: corrects the network of a plan before its drop is measured.

    Raises:
        ConfigError: no plan is within `precision.max_bytes` or `precision.max_drop`.
    """
    samples = replace(work.samples, tuning=shuffle(work.samples.held_out))
    work = replace(work, samples=samples)
    precision = work.config.precision
    tried: list[bits_search.TriedPlan] = []

    def attempt(level: float | None, bits: bits_search.Bits) -> bits_search.TriedPlan:
        for known in tried:
            if known.bits == bits:
                return known
        planned = prepared.decide(bits=bits)
        with tempfile.TemporaryDirectory() as scratch:
            plan = _try_plan(work, planned, correct, scratch=Path(scratch), level=level)
        tried.append(plan)
        return plan

    # Measure the error of each layer in each width
    widths = work.settings.quantizer.widths
    setting = work.correction_settings(prepared.decisions, samples.held_out)
    learned = _learn_narrow(work, prepared, [bits for bits in widths if bits < 8])
    options = bits_search.measure_options(work.fp32.onnx_path, setting, widths, learned=learned)
    narrow = [option for option in options if option.bits != FLOAT_BITS]

    # Choose a plan, and keep the trials even without a choice
    try:
        chosen = _choose_bits(
            narrow, options, attempt, max_bytes=precision.max_bytes, max_drop=precision.max_drop
        )
    finally:
        files.write_text(work.folder / bits_search.FILE, bits_search.to_csv(tried))
    other = ", ".join(f"{name}: {bits}" for name, bits in chosen.bits.items() if bits != 8)
    log.info("precision.plan=auto: %d bytes: {%s}", chosen.size_bytes, other)
    return chosen


def _choose_bits(
    narrow: Sequence[bits_search.Option],
    options: Sequence[bits_search.Option],
    attempt: Callable[[float | None, bits_search.Bits], bits_search.TriedPlan],
    max_bytes: int | None,
    max_drop: float | None,
) -> bits_search.TriedPlan:
    """Return a plan within `max_bytes`, or one proven or else measured to be within `max_drop`.

    Args:
        narrow: the options of 8 bits or fewer; plans of these alone are tried first.
        options: `narrow` and the options in float.
        attempt: quantizes by a plan and measures it, with a test at a level or without one.
    """
    plans = [bits_search.find_plans(narrow)]
    if max_bytes is None and narrow != options:
        plans.append(bits_search.find_plans(options))

    # First try plans that a test proves to be within max_drop
    if max_bytes is None:
        for some in plans:
            level = bits_search.level_of(some) / len(plans)
            by_test = partial(attempt, level)
            with suppress(ConfigError):
                return bits_search.choose(some, by_test, max_bytes, max_drop=max_drop, level=level)
        exclusion.warn_of_unproven("precision.plan=auto", "precision.max_drop", max_drop or 0.0)

    # Then try plans that are measured to be within the limit
    measured = partial(attempt, None)
    for some in plans[:-1]:
        with suppress(ConfigError):
            return bits_search.choose(some, measured, max_bytes, max_drop=max_drop)
        log.info("precision.plan=auto: 8 bits lose more; layers may stay in float")
    return bits_search.choose(plans[-1], measured, max_bytes, max_drop=max_drop)


def _try_plan(
    work: Workspace, prepared: Prepared, correct: Step, scratch: Path, level: float | None
) -> bits_search.TriedPlan:
    """Quantize by a plan; measure its drop on the tuning samples unless `max_bytes` is set."""
    config = work.config
    bits = prepared.decisions.bits or {}
    bounded = config.precision.max_bytes is not None
    if not bounded:
        prepared = correct(work, prepared)
    quantized = work.quantize(prepared, scratch)
    size = quantized.size_bytes
    if bounded:
        return bits_search.TriedPlan(bits, size)

    # Without a limit on bytes, the drop decides
    limit = config.precision.max_drop or 0.0
    tried = try_choice(
        work.evaluator, quantized.path, samples=work.samples.held_out, limit=limit, level=level
    )
    return bits_search.TriedPlan(
        bits, size_bytes=size, drop=tried.drop, p=tried.p, samples=tried.samples
    )


def _learn_narrow(work: Workspace, prepared: Prepared, widths: list[int]) -> bits_search.Learned:
    """Return weights by layer and bits, see `learn_apart`; none without `corrections.adaround`."""
    config = work.config
    if not config.corrections.adaround:
        return {}
    from resnet8ptq.corrections import adaround  # imports torch

    return adaround.learn_apart(
        onnx.load(work.fp32.onnx_path),
        setting=work.correction_settings(prepared.decisions, work.samples.calibrating.split),
        widths=widths,
        # Fewer iterations are enough to rank the layers
        iterations=max(1, config.corrections.adaround_iterations // 5),
        seed=config.seed,
    )
