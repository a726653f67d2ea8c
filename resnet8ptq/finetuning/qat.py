"""`method=qat`: fine-tunes the network so that quantization costs less accuracy.

A student with fake quantization learns from the FP32 network, on training samples. The result is a
network with activation ranges, for every backend that takes ranges.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import CalibConfig, QatConfig
from resnet8ptq.core import cache, code, files, machine
from resnet8ptq.core.deadline import TimeUpError
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.data.sampling import leave_out
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.grid import ActivationScheme
from resnet8ptq.precision.plan import Plan, Selection, find_float_nodes

if TYPE_CHECKING:  # the module imports torch, which only method=qat needs
    from resnet8ptq.finetuning.training import Point

NETWORK_FILE = "network.onnx"
RANGES_FILE = "ranges.json"
CURVES_FILE = "curves.json"


@dataclass(frozen=True)
class QatSettings:
    """The settings of fine-tuning.

    Attributes:
        training: the settings `qat`, such as epochs and learning rate.
        calib: the settings of the calibration that gives the initial ranges.
        weights, activations: the schemes of the run's backend.
        selection: the settings and decisions that choose the nodes in float.
        float_output: whether the outputs of the last layer and of all later nodes stay in float.
        seed: seed for the order, shifts and flips of the samples.
    """

    training: QatConfig
    calib: CalibConfig
    weights: Plan
    activations: ActivationScheme
    selection: Selection
    float_output: bool
    seed: int


def fine_tune(
    settings: QatSettings,
    fp32: Fp32Model,
    dataset: Dataset,
    calibration: CalibrationSet,
    held_out: Split,
    runtime: Runtime,
    log_point: Callable[["Point"], None],
) -> tuple[Fp32Model, dict[str, Range]]:
    """Return the fine-tuned network, and learned activation ranges by ONNX tensor name.

    The result is the student after its best epoch; it may be the untrained one. The deadline ends
    the training early. The cache key leaves out the backend's name, so backends with the same
    quantization share the result. After an interruption or a deadline, the next call continues
    after the last complete epoch.

    Args:
        dataset: the data set; training uses its training samples, without those that `leave_out`
            finds in `held_out` or among the test samples.
        calibration: calibration samples for the initial ranges.
        held_out: held-out training samples for the choice of the epoch.
        log_point: called with each point of the curves, including points from the cache.

    Raises:
        UnsupportedError: the calibration method gives no ranges; or see
            `simulation.network.build_student`.
        ConfigError: `device` is `cuda`, and torch sees no GPU; or see `find_float_nodes` and
            `cache.entry`.
        QuantizationError: the training loss is NaN or infinite, or no node is left to quantize; or
            see `Activations.find_around`.
    """
    from resnet8ptq.simulation.device import find_device

    # The cache key holds everything that the result depends on
    _check_calibration(settings)
    skipped = find_float_nodes(onnx.load(fp32.onnx_path).graph, settings.selection)
    device = find_device(runtime.device)
    key = {
        **_key_of(settings, fp32, skipped),
        **_digests(dataset, calibration, held_out),
        "device": device.type,
    }
    points: list[Point] = []
    student: Any = None  # trained by `make`
    done = 0  # epochs

    def make(entry: Path) -> None:
        from resnet8ptq.finetuning.training import Trainer
        from resnet8ptq.simulation import network

        # The student starts with calibrated ranges
        nonlocal student, done
        activations = Activations(fp32.onnx_path, calibration.split, settings.calib, runtime)
        student = network.build_student(
            fp32.onnx_path,
            skipped,
            ranges=activations.find_around(skipped),
            weights=settings.weights,
            activations=settings.activations,
            float_output=settings.float_output,
        )

        # Train it, and store the result only if all epochs are done
        trainer = Trainer(
            settings=settings.training,
            seed=settings.seed,
            threads=runtime.threads,
            student=student.module.to(device),
            teacher=network.load_logits(fp32.onnx_path).to(device),
            train=leave_out(dataset.train, (held_out, dataset.test)),
            held_out=held_out,
            checkpoint=checkpoint,
            log_point=log_point,
            deadline=runtime.deadline,
            device=device,
        )
        done, curves = trainer.run()
        points.extend(curves)
        if done < settings.training.epochs:
            raise TimeUpError
        write(entry)

    def write(entry: Path) -> None:
        from resnet8ptq.simulation import network

        onnx.save(network.write_back(fp32.onnx_path, student), entry / NETWORK_FILE)
        (entry / RANGES_FILE).write_text(json.dumps(student.ranges(), indent=2))
        (entry / CURVES_FILE).write_text(json.dumps(points))

    # Keep the checkpoint until the entry is complete, so that a killed training can continue
    checkpoint = cache.path_of(runtime.cache_root, "qat", key).with_suffix(".checkpoint")
    try:
        entry = cache.entry(runtime.cache_root, "qat", key, make)
        checkpoint.unlink(missing_ok=True)
    except TimeUpError:
        runtime.deadline.cut(f"fine-tuning: {done} of {settings.training.epochs} epochs")
        entry = cache.entry(runtime.cache_root, "qat", {**key, "epochs_done": done}, write)

    # Report the curves of a training that an earlier run has finished
    if not points:
        for point in json.loads((entry / CURVES_FILE).read_text()):
            log_point(point)
    ranges = json.loads((entry / RANGES_FILE).read_text()).items()
    tuned = fp32.with_weights_of(entry / NETWORK_FILE)
    return tuned, {name: (low, high) for name, (low, high) in ranges}


def _check_calibration(settings: QatSettings) -> None:
    if settings.calib.name == "histogram":
        raise UnsupportedError(
            "method=qat with calib=histogram: torch's own observer gives no initial ranges"
        )


def _digests(dataset: Dataset, calibration: CalibrationSet, held_out: Split) -> dict[str, str]:
    return {
        "train": dataset.train.digest,
        "test": dataset.test.digest,  # copies of test samples do not train
        "calibration": calibration.digest,
        "held_out": held_out.digest,
    }


def _key_of(settings: QatSettings, fp32: Fp32Model, skipped: Sequence[str]) -> cache.Key:
    return {
        "model": files.sha256(fp32.onnx_path),
        "settings": json.dumps([asdict(settings), skipped], sort_keys=True),
        "code": code.behind(__name__),
        **machine.versions(),
    }
