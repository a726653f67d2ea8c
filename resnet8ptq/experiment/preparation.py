"""What is done to the network before a backend quantizes it."""

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.calibration import table
from resnet8ptq.calibration.statistics import Range, Ranges
from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import background, files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.corrections import sequence
from resnet8ptq.corrections.layers import Setting
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.evaluation.baseline import load_baseline
from resnet8ptq.evaluation.evaluate import targets_of
from resnet8ptq.evaluation.trial import Bench
from resnet8ptq.experiment.compatibility import settle_task
from resnet8ptq.experiment.layers import bits_search, exclusion
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.finetuning import qat
from resnet8ptq.models.inspection import quantized_operators
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan
from resnet8ptq.precision.selection import Selection, find_float_nodes, find_quantized_layers
from resnet8ptq.tasks.contract import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    """The network to quantize, and what is already decided about how.

    Attributes:
        config: the run's, with `nodes_to_exclude=auto` replaced by the nodes chosen, and
            `precision.plan=auto` by the plan.
        network: fine-tuned or corrected; else the FP32 network itself. A corrected one lies in the
            scratch folder, and is gone with it.
        ranges: activation ranges made elsewhere, by ONNX tensor name.
        provenance: what ranges found by calibration would be made from.
        seconds: it took; None where nothing was to be done.
        params, metrics: of the choices made, and of the network, by MLflow name.
    """

    config: RunConfig
    network: Fp32Model
    provenance: table.Provenance
    ranges: Ranges | None = None
    seconds: float | None = None
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def chooses(config: RunConfig) -> bool:
    """Tell whether the run makes a choice on held-out images: of layers, bits, or an epoch."""
    choice = config.method == "qat" or "auto" in (config.nodes_to_exclude, config.precision.plan)
    return choice and config.dtype.name != "fp32"


def prepare(
    config: RunConfig,
    bench: Bench,
    fp32: Fp32Model,
    dataset: Dataset,
    calibration: CalibrationSet,
    held_out: Split | None,
    folder: Path,
    scratch: Path,
    run: Recorder,
) -> Preparation:
    """Plan bits, fine-tune, correct, read a calibration table, choose layers: what is switched on.

    Args:
        held_out: training images to choose by; None where nothing is chosen, see `chooses`.
        folder: the run's own; figures and tables of the preparation land there.
        scratch: existing; the corrected network lands there and must outlive its quantization.

    Raises:
        PtqError: as each of the steps has it.
    """
    start = time.perf_counter()
    if config.dtype.name == "fp32":
        provenance = table.provenance(config.calib, fp32.onnx_path, calibration.split)
        return Preparation(config, fp32, provenance)
    quantizer = make_quantizer(config, bench.runtime)
    resolved = quantizer.resolve()
    activations = ActivationScheme(
        resolved.activation_bits or 8, bool(config.symmetric.activations), quantizer.level_pools
    )
    params: dict[str, str] = {}
    metrics: dict[str, float] = {}
    trained, tuned = fp32, None

    def plan_of(settled: RunConfig) -> Plan:
        return Plan.of(settled.precision, WeightScheme.of(settled, resolved.weight_bits == 7))

    def setting_of(settled: RunConfig, images: Split) -> Setting:
        return Setting(
            plan_of(settled),
            Selection.of(settled),
            images,
            settled.calib,
            bench.runtime,
            activations,
            settled.float_output,
        )

    def correct(settled: RunConfig) -> tuple[Fp32Model, table.Provenance, Ranges | None]:
        setting = setting_of(settled, calibration.split)
        corrected, learned = sequence.correct(
            trained, settled.corrections, setting, settled.seed, scratch
        )
        made_from = table.provenance(settled.calib, corrected.onnx_path, calibration.split)
        return corrected, made_from, tuned if learned is None else learned

    if config.precision.plan == "auto":
        assert held_out is not None  # see `chooses`
        task = settle_task(config.task, dataset, held_out, fp32)
        setting = setting_of(config, held_out)
        bits, tried = _plan(config, bench, fp32, task, setting, calibration.split, correct, folder)
        config = replace(config, precision=replace(config.precision, plan=dict(bits)))
        metrics["planned_bytes"] = tried.size_bytes
    if config.precision.plan is not None:
        layers = find_quantized_layers(onnx.load(fp32.onnx_path).graph, Selection.of(config))
        params |= plan_of(config).to_params(layers, config.precision)
    if config.method == "qat":
        assert held_out is not None  # see `chooses`
        settings = qat.Settings(
            config.qat,
            config.calib,
            plan_of(config),
            activations,
            Selection.of(config),
            config.float_output,
            config.seed,
        )
        trained, tuned = _fine_tune(
            settings, fp32, dataset, calibration, held_out, bench.runtime, folder, run
        )
    network, provenance, ranges = correct(config)
    if config.calib.table is not None:
        ranges = table.load(config.calib.table, provenance)
    if config.nodes_to_exclude == "auto":
        assert held_out is not None  # see `chooses`
        task = settle_task(config.task, dataset, held_out, fp32)
        chosen = exclusion.choose(
            config, bench, task, fp32, network, calibration.split, held_out, folder, ranges
        )
        config = replace(config, nodes_to_exclude=chosen.nodes)
        params, metrics = params | chosen.to_params(), metrics | chosen.to_metrics()
        if chosen.nodes:  # whose weights are not to be rounded after all
            network, provenance, ranges = correct(config)
    idle = network is fp32 and not params
    if config.float_tail and config.method != "dynamic":
        params["float_operators"] = _float_operators(config, network)
    seconds = None if idle else time.perf_counter() - start
    return Preparation(config, network, provenance, ranges, seconds, params, metrics)


def _float_operators(config: RunConfig, network: Fp32Model) -> str:
    """Return the operators of the network that stay in float, with their number.

    By the settings, or because the framework has no 8-bit kernel for them.
    """
    graph = onnx.load(network.onnx_path).graph
    left = {*find_float_nodes(graph, Selection.of(config))}
    known = quantized_operators(config.backend.name)
    count = Counter(n.op_type for n in graph.node if n.name in left or n.op_type not in known)
    return ", ".join(f"{name} {number}" for name, number in sorted(count.items()))


def _plan(
    config: RunConfig,
    bench: Bench,
    fp32: Fp32Model,
    task: Task,
    setting: Setting,
    calibration: Split,
    correct: Callable[[RunConfig], tuple[Fp32Model, table.Provenance, Ranges | None]],
    folder: Path,
) -> tuple[bits_search.Bits, bits_search.Tried]:
    """Choose the bits of each layer; write `plan.csv` into `folder`, also where none is found.

    Args:
        setting: with the images to choose by.
        calibration: images to calibrate with.
        correct: corrects the network for a plan, which only a drop depends on.

    Raises:
        ConfigError: no plan is within `precision.max_bytes` or `precision.max_drop`.
    """
    targets = targets_of(setting.images)
    reference = task.score(load_baseline(bench, config, fp32, setting.images).outputs, targets)
    tried: list[bits_search.Tried] = []

    def attempt(bits: bits_search.Bits) -> bits_search.Tried:
        settled = replace(config, precision=replace(config.precision, plan=dict(bits)))
        with tempfile.TemporaryDirectory() as scratch:
            if config.precision.max_bytes is not None:
                quantizer = make_quantizer(settled, bench.runtime)
                size = quantizer.quantize(fp32, calibration, Path(scratch)).size_bytes
                tried.append(bits_search.Tried(bits, size))
            else:
                network, _, ranges = correct(settled)
                trial = bench.run(
                    settled, network, calibration, setting.images, Path(scratch), ranges
                )
                found = task.compare(task.score(trial.evaluation.outputs, targets), reference)
                drop = task.metric.drop(found.fair_delta, found.baseline.fair)
                tried.append(bits_search.Tried(bits, trial.size_bytes, drop))
        return tried[-1]

    widths = make_quantizer(config, bench.runtime).widths
    learned: bits_search.Learned = {}
    if config.corrections.adaround:
        from resnet8ptq.corrections import adaround  # imports torch

        # A fifth of the iterations tells which layers bear fewer bits.
        learned = adaround.learn_apart(
            onnx.load(fp32.onnx_path),
            replace(setting, images=calibration),
            [bits for bits in widths if bits < 8],
            max(1, config.corrections.adaround_iterations // 5),
            config.seed,
        )
    options = bits_search.measure_options(fp32.onnx_path, setting, widths, learned)
    narrow = [option for option in options if option.bits != FLOAT_BITS]
    limits = config.precision.max_bytes, config.precision.max_drop
    try:
        try:
            chosen = bits_search.choose(bits_search.find_plans(narrow), attempt, *limits)
        except ConfigError:
            if limits[1] is None or narrow == options or not tried:
                raise
            log.info("precision.plan=auto: 8 bits lose more; layers may stay in float")
            chosen = bits_search.choose(bits_search.find_plans(options), attempt, *limits)
    finally:
        files.write_text(folder / bits_search.FILE, bits_search.to_csv(tried))
    log.info(
        "precision.plan=auto: %d bytes: {%s}",
        chosen.size_bytes,
        ", ".join(f"{name}: {bits}" for name, bits in chosen.bits.items() if bits != 8),
    )
    return chosen.bits, chosen


def _fine_tune(
    settings: qat.Settings,
    fp32: Fp32Model,
    dataset: Dataset,
    calibration: CalibrationSet,
    held_out: Split,
    runtime: Runtime,
    folder: Path,
    run: Recorder,
) -> tuple[Fp32Model, Mapping[str, Range]]:
    """Fine-tune, log the curves, and draw `qat_loss.png`."""
    points: list[dict[str, float]] = []

    def report(point: dict[str, float]) -> None:
        points.append(point)
        run.log_step(int(point["step"]), {k: v for k, v in point.items() if k != "step"})

    network, ranges = qat.fine_tune(settings, fp32, dataset, calibration, held_out, runtime, report)
    background.put(_draw_curves, points, folder / "qat_loss.png")
    return network, ranges


def _draw_curves(points: list[dict[str, float]], path: Path) -> None:
    from resnet8ptq.core import figures  # only the process that draws imports matplotlib
    from resnet8ptq.experiment import plots

    figures.save(plots.fine_tuning(points), path)
