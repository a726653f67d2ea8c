"""The files that an experiment writes into a run's folder, and MLflow keeps as artifacts.

This module writes the files for which the table names no other writer.

| file | content |
|---|---|
| `model.onnx`, `.pt`, `.pt2`, `.pte`, `.tflite`, `.zip` | the model, written by its backend |
| any name | with `backend=file`: a copy of the file, under its name; written by its backend |
| `config.yaml` | the resolved config |
| `result.json` | every setting and every metric; written by `tracking.details` |
| `predictions.npz` | the values that the task keeps for each scored sample, of model and baseline |
| `choice.npz` | the same for the selection samples |
| `per_class.csv`, `confusion.csv`, `roc.png`, ... | tables, texts and figures of the task |
| `calibration.csv` | indices of the calibration samples in their source split, with labels |
| `calibration.json`, `.flatbuffers`, `.cache` | ranges; written by `calibration.table` |
| `calibration.provenance.json` | the origin of these ranges; written by `calibration.table` |
| `plan.csv` | with `precision.plan=auto`: the trials; written by `layers.planning` |
| `exclusion.csv` | with `nodes_to_exclude=auto`: the trials; written by `layers.exclusion` |
| `placement.csv` | the blocks of `precision.placement`, timed; written by `layers.placement` |
| `qat_loss.png` | with `method=qat`: loss and accuracy over the steps; written by `preparation` |
| `example.npz` | the network input of the first scored sample, `inputs` [1, ...] |
| `wrong_examples.json` | pictures or texts with a wrong class; written by `wrong_examples` |
| `tokenizer.json` | with texts: the file of `data.tokenizer` |
| `ranges.json` | activation ranges that the quantizer used, and the weights' ranges |
| `network.svg` | the faults of another program's file; written by `exploration.file_check` |
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Artifact
from resnet8ptq.config.loading import CONFIG_FILE, save_config
from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import RunConfig, TableConfig
from resnet8ptq.core import background, files
from resnet8ptq.data.dataset import CalibrationSet, Split
from resnet8ptq.evaluation.result import Measurement, RunResult
from resnet8ptq.experiment import wrong_examples
from resnet8ptq.experiment.samples import SamplesByRole
from resnet8ptq.graph import layers
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.values import SAMPLES

TOKENIZER = "tokenizer.json"


def write(
    folder: Path,
    config: RunConfig,
    result: RunResult,
    artifact: Artifact,
    samples: SamplesByRole,
    fp32: Fp32Model,
) -> None:
    """Write the files of a measured run, each atomically; see the table of this module.

    A process in the background may still draw the figures when the function returns.
    """
    measured = result.measurement
    assert measured is not None  # only measured runs are written
    save_config(config, folder / CONFIG_FILE)
    write_scores(folder, config, measured, samples=samples.reported)
    example = samples.reported.inputs(slice(1))
    _save_arrays(folder / "example.npz", {"inputs": example})
    if measured.choice is not None:
        _save_arrays(folder / "choice.npz", measured.task.files.arrays(measured.choice))

    # Write the calibration samples and the ranges
    _write_csv(folder / "calibration.csv", _drawn(samples.calibrating))
    weights = layers.weight_ranges(onnx.load(fp32.onnx_path).graph)
    ranges = {"activations": artifact.ranges, "weights": weights}
    files.write_text(folder / "ranges.json", json.dumps(ranges, indent=2))
    if isinstance(config.data, TableConfig) and config.data.tokenizer is not None:
        with files.atomic(folder / TOKENIZER) as temporary:
            shutil.copyfile(config.data.tokenizer, temporary)


def write_scores(folder: Path, config: RunConfig, measured: Measurement, samples: Split) -> None:
    """Write the files of the scored samples: tables, texts, figures, examples, values by sample."""
    task = measured.task
    comparison = measured.comparison
    for name, rows in task.files.tables(comparison).items():
        _write_csv(folder / name, rows)
    for name, text in task.files.documents(comparison).items():
        files.write_text(folder / name, text)
    title = _title(config, task.metric.show(comparison.model.value))
    background.put(task.files.save_figures, folder, comparison, title)
    wrong_examples.write(folder, task, comparison, samples=samples)

    # Keep the values of each sample, for later tests
    ids = _scored_ids(samples, comparison)
    _save_arrays(folder / "predictions.npz", task.files.arrays(comparison) | {SAMPLES: ids})


def _save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    with files.atomic(path) as temporary:
        np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]


def _scored_ids(samples: Split, comparison: Comparison) -> NDArray[np.uint64]:
    """Return the ids of the scored samples; a run that stopped early has scored the first ones."""
    ids = samples.sample_ids
    return ids if comparison.stopped is None else ids[: comparison.model.total]


def _title(config: RunConfig, value: str) -> str:
    cells = filter(None, Combination.of_config(config).cells)
    title = " · ".join([config.data.name, *cells])
    return f"{title}: {value}"


def _drawn(calibration: CalibrationSet) -> Iterable[Sequence[object]]:
    """Return the rows of `calibration.csv`: indices, and labels if each sample has one value."""
    labels = calibration.split.labels
    indices = calibration.indices.tolist()
    if labels is None or labels.ndim > 1 or labels.dtype.kind == "V":
        return [["index"], *([index] for index in indices)]
    return [["index", "label"], *zip(indices, labels.tolist(), strict=True)]


def _write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    files.write_text(path, files.to_csv(rows))
