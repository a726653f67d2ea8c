"""What is done to the network before a backend quantizes it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.calibration import table
from resnet8ptq.calibration.statistics import Range, Ranges
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import figures
from resnet8ptq.core.machine import Runtime
from resnet8ptq.corrections import sequence
from resnet8ptq.corrections.layers import Setting
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.evaluation.trial import Bench
from resnet8ptq.experiment import plots
from resnet8ptq.experiment.compatibility import settle_task
from resnet8ptq.experiment.layers import exclusion
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.finetuning import qat
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan
from resnet8ptq.precision.selection import Selection


@dataclass(frozen=True)
class Preparation:
    """The network to quantize, and what is already decided about how.

    Attributes:
        config: the run's, with `nodes_to_exclude=auto` replaced by the nodes chosen.
        network: fine-tuned or corrected; else the FP32 network itself.
        ranges: activation ranges made elsewhere, by ONNX tensor name.
        provenance: what ranges found by calibration would be made from.
        seconds: it took; None where nothing was to be done.
        params, metrics: of the choices made, by MLflow name.
    """

    config: RunConfig
    network: Fp32Model
    provenance: table.Provenance
    ranges: Ranges | None = None
    seconds: float | None = None
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def chooses(config: RunConfig) -> bool:
    """Tell whether the run makes a choice on held-out images: of layers, or of an epoch."""
    choice = config.method == "qat" or config.nodes_to_exclude == "auto"
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
    """Fine-tune, correct, read a calibration table, choose layers: what is switched on.

    Args:
        held_out: training images to choose by; None where nothing is chosen, see `chooses`.
        folder: the run's own; figures and tables of the preparation land there.
        scratch: existing; the corrected network lands there and must outlive its quantization.

    Raises:
        PtqError: as each of the steps has it.
    """
    network = fp32
    ranges: Ranges | None = None
    start = time.perf_counter()
    if config.dtype.name == "fp32":
        provenance = table.provenance(config.calib, network.onnx_path, calibration.split)
        return Preparation(config, network, provenance)
    resolved = make_quantizer(config, bench.runtime).resolve()
    weights = Plan.of(config.precision, WeightScheme.of(config, resolved.weight_bits == 7))
    activations = ActivationScheme(
        resolved.activation_bits or 8, bool(config.symmetric.activations)
    )
    if config.method == "qat":
        assert held_out is not None  # see `chooses`
        settings = qat.Settings(
            config.qat,
            config.calib,
            weights,
            activations,
            Selection.of(config),
            config.float_output,
            config.seed,
        )
        network, ranges = _fine_tune(
            settings, fp32, dataset, calibration, held_out, bench.runtime, folder, run
        )
    trained = network

    def correct(settled: RunConfig) -> tuple[Fp32Model, table.Provenance, Ranges | None]:
        selection = Selection.of(settled)
        setting = Setting(
            weights,
            selection,
            calibration.split,
            config.calib,
            bench.runtime,
            activations,
            config.float_output,
        )
        corrected, learned = sequence.correct(
            trained, config.corrections, setting, config.seed, scratch
        )
        made_from = table.provenance(config.calib, corrected.onnx_path, calibration.split)
        return corrected, made_from, ranges if learned is None else learned

    network, provenance, ranges = correct(config)
    if config.calib.table is not None:
        ranges = table.load(config.calib.table, provenance)
    params: dict[str, str] = {}
    metrics: dict[str, float] = {}
    if config.nodes_to_exclude == "auto":
        assert held_out is not None  # see `chooses`
        task = settle_task(config.task, dataset, held_out, fp32)
        chosen = exclusion.choose(
            config, bench, task, fp32, network, calibration.split, held_out, folder, ranges
        )
        config = replace(config, nodes_to_exclude=chosen.nodes)
        params, metrics = chosen.to_params(), chosen.to_metrics()
        if chosen.nodes:  # whose weights are not to be rounded after all
            network, provenance, ranges = correct(config)
    idle = network is fp32 and not params
    seconds = None if idle else time.perf_counter() - start
    return Preparation(config, network, provenance, ranges, seconds, params, metrics)


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
    figures.save(plots.fine_tuning(points), folder / "qat_loss.png")
    return network, ranges
