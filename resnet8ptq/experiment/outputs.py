"""The files that a run leaves in its folder, and that MLflow keeps as artifacts.

| file | what |
|---|---|
| `model.onnx`, `.pt`, `.pt2`, `.tflite` | the quantized model, written by its backend |
| `config.yaml` | the resolved config |
| `result.json` | status and every metric |
| `per_class.csv`, `classes.png` | accuracy and delta of each class |
| `confusion.csv`, `confusion.png` | true classes down, predicted classes across |
| `predictions.npz` | per test image: probabilities, prediction, label, the baseline's prediction |
| `calibration.csv` | places of the calibration images in the training split, with labels |
| `calibration.json`, `.flatbuffers`, `.cache` | the ranges as `calib.table` reads them |
| `exclusion.csv` | with `nodes_to_exclude=auto`: what was tried |
| `qat_loss.png` | with `method=qat`: the curves |
| `ranges.json` | activation ranges that calibration chose, and the weights' ranges |
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from omegaconf import OmegaConf

from resnet8ptq.backends.contract import Artifact
from resnet8ptq.config.combination import Combination
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import figures, files
from resnet8ptq.data.dataset import CalibrationSet
from resnet8ptq.evaluation.result import Measurement, RunResult
from resnet8ptq.experiment import plots
from resnet8ptq.graph import layers
from resnet8ptq.models.model import Fp32Model


def write(
    folder: Path,
    config: RunConfig,
    result: RunResult,
    artifact: Artifact,
    calibration: CalibrationSet,
    fp32: Fp32Model,
) -> None:
    """Write everything but the model, each file whole or not at all; `result.json` comes last."""
    measured = result.measurement
    assert measured is not None  # only measured runs come here
    scores = measured.comparison.model
    files.write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
    _write_csv(folder / "per_class.csv", _per_class(measured))
    confusion = scores.confusion()
    rows = (
        [name, *row] for name, row in zip(measured.class_names, confusion.tolist(), strict=True)
    )
    _write_csv(folder / "confusion.csv", [["true \\ predicted", *measured.class_names], *rows])
    paired, title = measured.comparison.paired, _title(config, scores.accuracy)
    figures.save(plots.confusion(paired, measured.class_names, title), folder / "confusion.png")
    figures.save(plots.classes(paired, measured.class_names, title), folder / "classes.png")
    with files.atomic(folder / "predictions.npz") as temporary:
        np.savez_compressed(
            temporary,
            probabilities=scores.probabilities,
            predictions=scores.predictions,
            labels=scores.labels,
            baseline_predictions=measured.comparison.baseline.predictions,
        )
    pairs = zip(calibration.indices.tolist(), calibration.split.labels.tolist(), strict=True)
    _write_csv(folder / "calibration.csv", [["index", "label"], *pairs])
    weights = layers.weight_ranges(onnx.load(fp32.onnx_path).graph)
    ranges = {"activations": artifact.ranges, "weights": weights}
    files.write_text(folder / "ranges.json", json.dumps(ranges, indent=2))
    record = {"status": result.status, "resolved": result.resolved, "metrics": result.to_metrics()}
    files.write_text(folder / "result.json", json.dumps(record, indent=2))


def _title(config: RunConfig, accuracy: float) -> str:
    parts = (config.data.name, *filter(None, Combination.of_config(config).cells))
    return f"{' · '.join(parts)}: {accuracy:.2%}"


def _per_class(measured: Measurement) -> Iterable[Sequence[object]]:
    yield ["class", "accuracy", "baseline_accuracy", "delta"]
    for label, name in enumerate(measured.class_names):
        yield [
            name,
            measured.comparison.model.class_accuracy(label),
            measured.comparison.baseline.class_accuracy(label),
            measured.comparison.class_delta(label),
        ]


def _write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    files.write_text(path, files.to_csv(rows))
