"""Steps that prepare the network and its settings before a backend quantizes it."""

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import onnx

from resnet8ptq.backends.contract import Quantizer, Resolved
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.calibration import table
from resnet8ptq.calibration.statistics import Ranges
from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.config.schema import CorrectionsConfig, RunConfig
from resnet8ptq.core import background, files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.corrections import sequence
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.sampling import shuffle
from resnet8ptq.evaluation.evaluator import Evaluator, Quantized
from resnet8ptq.experiment.layers import bits_search, exclusion
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import Samples
from resnet8ptq.experiment.stopping import try_choice
from resnet8ptq.finetuning import qat
from resnet8ptq.graph.attention import attention_products
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan, Selection, find_quantized_layers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    """The network to quantize, and the settings for it; each step returns a new one.

    Attributes:
        config: the run's settings, with the steps' choices in place of `auto`.
        trained: the FP32 network, fine-tuned with `method=qat`; corrections take it as input.
        network: `trained` after the corrections.
        learned: activation ranges of fine-tuning, by ONNX tensor name.
        ranges: activation ranges that take precedence over calibration.
        params, metrics: params and metrics of the choices, by MLflow name.
        seconds: seconds of all steps; None if no step had work.
    """

    config: RunConfig
    trained: Fp32Model
    network: Fp32Model
    learned: Ranges | None = None
    ranges: Ranges | None = None
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True)
class Workspace:
    """The inputs of each step.

    Attributes:
        samples: the samples; the steps choose on `samples.tuning`.
        folder: the run's folder, for tables and figures of the steps.
        scratch: folder of corrected networks, which must exist until quantization ends.
    """

    config: RunConfig
    evaluator: Evaluator
    samples: Samples
    folder: Path
    scratch: Path
    run: Recorder

    @property
    def fp32(self) -> Fp32Model:
        """The FP32 network."""
        return self.evaluator.network

    @cached_property
    def quantizer(self) -> Quantizer:
        """The quantizer, with the settings of the run."""
        return make_quantizer(self.config, self.evaluator.runtime)

    @cached_property
    def resolved(self) -> Resolved:
        """The settings as the framework resolves them."""
        return self.quantizer.resolve()

    @property
    def activations(self) -> ActivationScheme:
        """The grid of the activations."""
        symmetric = bool(self.config.symmetric.activations)
        bits = self.resolved.activation_bits or 8
        return ActivationScheme(bits, symmetric, self.quantizer.level_pools)

    def plan(self, config: RunConfig) -> Plan:
        """Return the grids of the weights."""
        return Plan.of(config.precision, WeightScheme.of(config, self.resolved.weight_bits == 7))

    def setting(self, config: RunConfig, images: Split) -> CorrectionSettings:
        """Return the settings of the corrections."""
        return CorrectionSettings(
            self.plan(config),
            Selection.of(config),
            images,
            config.calib,
            self.evaluator.runtime,
            self.activations,
            config.float_output,
        )


Step = Callable[[Workspace, Preparation], Preparation]


def tunes(config: RunConfig) -> bool:
    """Return whether a step chooses layers, bits or an epoch on tuning samples."""
    choice = config.method == "qat" or "auto" in (config.nodes_to_exclude, config.precision.plan)
    return choice and config.dtype.name != "fp32"


def prepare(work: Workspace) -> Preparation:
    """Run each step that the settings enable."""
    start = time.perf_counter()
    prepared = Preparation(work.config, work.fp32, work.fp32)
    if work.config.dtype.name == "fp32":
        return prepared
    steps: list[Step] = [plan_bits, fine_tune, correct, read_table, leave_in_float]
    for step in steps:
        prepared = step(work, prepared)
    if prepared.network is work.fp32 and not prepared.params:
        return prepared
    return replace(prepared, seconds=time.perf_counter() - start)


def plan_bits(work: Workspace, prepared: Preparation) -> Preparation:
    """Choose the bits of each layer's weights with `precision.plan=auto`; log any plan."""
    config, metrics = prepared.config, prepared.metrics
    if config.precision.plan == "auto":
        bits, tried = _search_bits(work, prepared)
        config = replace(config, precision=replace(config.precision, plan=dict(bits)))
        metrics = {**metrics, "plan/bytes": tried.size_bytes}
    if config.precision.plan is None:
        return prepared
    graph = onnx.load(work.fp32.onnx_path).graph
    layers, products = find_quantized_layers(graph, Selection.of(config)), attention_products(graph)
    params = prepared.params | work.plan(config).to_params(layers, config.precision, products)
    return replace(prepared, config=config, params=params, metrics=metrics)


def fine_tune(work: Workspace, prepared: Preparation) -> Preparation:
    """Fine-tune with `method=qat`; log the curves, and draw `qat_loss.png`."""
    config = prepared.config
    if config.method != "qat":
        return prepared
    settings = qat.QatSettings(
        config.qat,
        config.calib,
        work.plan(config),
        work.activations,
        Selection.of(config),
        config.float_output,
        config.seed,
    )
    points: list[dict[str, float]] = []

    def report(point: dict[str, float]) -> None:
        points.append(point)
        curves = {name: value for name, value in point.items() if name != "step"}
        work.run.log_step(int(point["step"]), curves)

    samples, runtime = work.samples, work.evaluator.runtime
    network, ranges = qat.fine_tune(
        settings, work.fp32, samples.data, samples.calibrating, samples.held_out, runtime, report
    )
    background.put(_draw_curves, points, work.folder / "qat_loss.png")
    return replace(prepared, trained=network, network=network, learned=ranges, ranges=ranges)


def correct(work: Workspace, prepared: Preparation) -> Preparation:
    """Apply the enabled corrections to the trained network."""
    config = prepared.config
    setting = work.setting(config, work.samples.calibrating.split)
    network, ranges = sequence.correct(
        prepared.trained, config.corrections, setting, config.seed, work.scratch
    )
    return replace(prepared, network=network, ranges=prepared.learned if ranges is None else ranges)


def read_table(work: Workspace, prepared: Preparation) -> Preparation:
    """Read the ranges that `calib.table` names."""
    path = prepared.config.calib.table
    if path is None:
        return prepared
    return replace(prepared, ranges=table.load(path, provenance(work, prepared)))


def leave_in_float(work: Workspace, prepared: Preparation) -> Preparation:
    """With `nodes_to_exclude=auto`, choose the layers that stay in float."""
    config = prepared.config
    if config.nodes_to_exclude != "auto":
        return prepared

    def correct_again(variant: RunConfig, folder: Path) -> Fp32Model:
        return correct(replace(work, scratch=folder), replace(prepared, config=variant)).network

    chosen = exclusion.choose(
        *(config, work.evaluator, work.samples, prepared.network, work.folder, prepared.ranges),
        correct_again if _corrects_again(config.corrections) else None,
    )
    prepared = replace(
        prepared,
        config=replace(config, nodes_to_exclude=chosen.nodes),
        params=prepared.params | chosen.to_params(),
        metrics=prepared.metrics | chosen.to_metrics(),
    )
    # The weights of the chosen layers are not to be rounded after all.
    return read_table(work, correct(work, prepared)) if chosen.nodes else prepared


def _corrects_again(chosen: CorrectionsConfig) -> bool:
    """Return whether each trial of layers in float is corrected again, within seconds.

    Smoothing and equalization do not change the function of a layer in float. Together with them,
    rounding would be learned again for minutes: only without them does the cache have AdaRound's
    layers.
    """
    changes = chosen.smooth_quant or chosen.equalization
    learns = chosen.reconstruction or (chosen.adaround and changes)
    return (chosen.adaround or chosen.bias_correction) and not learns


def quantize(work: Workspace, prepared: Preparation, folder: Path) -> Quantized:
    """Quantize the prepared network into `folder`."""
    return work.evaluator.quantize(
        prepared.config, prepared.network, work.samples.calibrating.split, folder, prepared.ranges
    )


def provenance(work: Workspace, prepared: Preparation) -> table.Provenance:
    """Return the origin of calibrated ranges."""
    path, images = prepared.network.onnx_path, work.samples.calibrating.split
    return table.provenance(prepared.config.calib, path, images)


def _search_bits(
    work: Workspace, prepared: Preparation
) -> tuple[bits_search.Bits, bits_search.TriedPlan]:
    """Choose the bits of each layer; write `plan.csv`, even if no plan fits.

    Raises:
        ConfigError: no plan is within `precision.max_bytes` or `precision.max_drop`.
    """
    config = prepared.config
    samples = replace(work.samples, tuning=shuffle(work.samples.held_out))
    work = replace(work, samples=samples)
    limits = config.precision.max_bytes, config.precision.max_drop
    tried: list[bits_search.TriedPlan] = []

    def attempt(level: float | None, bits: bits_search.Bits) -> bits_search.TriedPlan:
        if known := next((plan for plan in tried if plan.bits == bits), None):
            return known
        planned = replace(config, precision=replace(config.precision, plan=dict(bits)))
        with tempfile.TemporaryDirectory() as scratch:
            changed = replace(prepared, config=planned)
            tried.append(_try_plan(work, changed, Path(scratch), level))
        return tried[-1]

    widths, setting = work.quantizer.widths, work.setting(config, samples.held_out)
    learned = _learn_narrow(work, config, [bits for bits in widths if bits < 8])
    options = bits_search.measure_options(work.fp32.onnx_path, setting, widths, learned)
    narrow = [option for option in options if option.bits != FLOAT_BITS]
    try:
        chosen = _choose_bits(narrow, options, attempt, *limits)
    finally:
        files.write_text(work.folder / bits_search.FILE, bits_search.to_csv(tried))
    other = ", ".join(f"{name}: {bits}" for name, bits in chosen.bits.items() if bits != 8)
    log.info("precision.plan=auto: %d bytes: {%s}", chosen.size_bytes, other)
    return chosen.bits, chosen


def _choose_bits(
    narrow: Sequence[bits_search.Option],
    options: Sequence[bits_search.Option],
    attempt: Callable[[float | None, bits_search.Bits], bits_search.TriedPlan],
    max_bytes: int | None,
    max_drop: float | None,
) -> bits_search.TriedPlan:
    """Choose a plan; without `max_bytes`, one proven, or else measured, to be within `max_drop`.

    Args:
        narrow: the options without layers in float, which are tried first.
    """
    plans = [bits_search.find_plans(narrow)]
    if max_bytes is None and narrow != options:
        plans.append(bits_search.find_plans(options))
    if max_bytes is None:
        for some in plans:
            with suppress(ConfigError):
                level = bits_search.level_of(some) / len(plans)
                by_test = partial(attempt, level)
                return bits_search.choose(some, by_test, max_bytes, max_drop, level)
        exclusion.warn_of_unproven("precision.plan=auto", "precision.max_drop", max_drop or 0.0)
    measured = partial(attempt, None)
    for some in plans[:-1]:
        with suppress(ConfigError):
            return bits_search.choose(some, measured, max_bytes, max_drop)
        log.info("precision.plan=auto: 8 bits lose more; layers may stay in float")
    return bits_search.choose(plans[-1], measured, max_bytes, max_drop)


def _try_plan(
    work: Workspace, prepared: Preparation, scratch: Path, level: float | None
) -> bits_search.TriedPlan:
    """Quantize by a plan; measure its drop on the tuning samples if `max_drop` is set."""
    config = prepared.config
    assert isinstance(config.precision.plan, dict)
    bounded = config.precision.max_bytes is not None
    if not bounded:
        prepared = correct(work, prepared)
    quantized = quantize(work, prepared, scratch)
    plan, size = config.precision.plan, quantized.size_bytes
    if bounded:
        return bits_search.TriedPlan(plan, size)
    limit = config.precision.max_drop or 0.0
    tried = try_choice(work.evaluator, config, quantized.path, work.samples.held_out, limit, level)
    return bits_search.TriedPlan(plan, size, tried.drop, tried.p, tried.samples)


def _learn_narrow(work: Workspace, config: RunConfig, widths: list[int]) -> bits_search.Learned:
    """If rounding will be learned, learn it for each layer in each width."""
    if not config.corrections.adaround:
        return {}
    from resnet8ptq.corrections import adaround  # imports torch

    return adaround.learn_apart(
        onnx.load(work.fp32.onnx_path),
        work.setting(config, work.samples.calibrating.split),
        widths,
        max(1, config.corrections.adaround_iterations // 5),  # enough to rank the layers
        config.seed,
    )


def _draw_curves(points: list[dict[str, float]], path: Path) -> None:
    from resnet8ptq.core import figures  # only the process that draws imports matplotlib
    from resnet8ptq.experiment import plots

    figures.save(plots.fine_tuning(points), path)
