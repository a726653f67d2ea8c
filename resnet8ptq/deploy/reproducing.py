"""Runs the artifact again on the scored samples, and compares predictions with those of the run."""

import json
import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.core import machine, masks
from resnet8ptq.core.errors import ConfigError, DataError, ModelError, QuantizationError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.text import printable
from resnet8ptq.data.dataset import Split
from resnet8ptq.deploy import vectors
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.experiment import preparation
from resnet8ptq.experiment.network_and_data import load_data_and_network, make_task
from resnet8ptq.experiment.samples import draw
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.outputs import Array
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking.mlflow_store.mlflow_model import EXAMPLE

log = logging.getLogger(__name__)

PREDICTIONS = ("probabilities", "predictions", "scores", "model")  # names in predictions.npz
ROUNDING = 1e-5  # error of float sums, whose order depends on the number of threads


@dataclass(frozen=True)
class Scored:
    """The scored samples of a run, and the evaluator that scores them."""

    samples: Split
    evaluator: Evaluator


def open_samples(source: SourceRun, cache_dir: str | None) -> Scored | str:
    """Return the scored samples and their evaluator, or the reason why they cannot be read.

    Raises:
        DataError: the data have changed since the run.
        UnsupportedError: the settings cannot be run here.
    """
    if source.unread:
        return source.unread
    config = source.config
    try:
        settings = resolve(replace(config, cache_dir=cache_dir or config.cache_dir))
        config = settings.config
        data, network = load_data_and_network(settings)
        check = partial(make_task, config.task, data, network)
        samples = draw(config, data, tunes=preparation.tunes(config), check=check)
        task = make_task(config.task, dataset=data, fp32=network, scored=samples.reported)
    except (ConfigError, DataError, ModelError) as error:
        return printable(str(error))

    # Refuse data that have changed since the run
    known = source.record.samples_digest
    digest = samples.reported.digest
    if known and digest != known:
        raise DataError(
            f"{samples.reported.source}: run {source.record.run_id} was scored on other samples "
            f"(their digest is {digest[:12]}, the run has logged {known[:12]})"
        )
    batch_size = config.evaluate.batch_size
    scored = samples.as_scored(config.evaluate).reported
    if source.record.stopped_early:
        scored = scored.take(np.arange(int(source.record.samples or 0)))
    return Scored(scored, Evaluator(settings.quantizer, network, task, batch_size))


@dataclass(frozen=True)
class Rerun:
    """The artifact's test vectors, and a sentence on its predictions compared with the run's."""

    summary: str
    vectors: Vectors
    more: Vectors | None = None  # vectors of more samples, see `rerun`


def rerun(source: SourceRun, scored: Scored | str, runtime: Runtime, many: bool) -> Rerun:
    """Run the artifact on the scored samples, unless the cache has the outputs.

    Call it by `SourceRun.call`, because it loads the artifact.

    Args:
        scored: the samples, or as text the reason why they are missing. If they are missing, the
            sample that the run kept is used.
        many: whether to return vectors of more samples too; never without the samples.

    Raises:
        QuantizationError: the predictions differ on the run's own CPU, or there is no sample.
    """
    predictor = make_quantizer(source.config, runtime).load(source.artifact, runtime.threads)
    if isinstance(scored, str):
        path = source.folder / EXAMPLE
        if not path.exists():
            raise QuantizationError(
                f"run {source.record.run_id}: its data are missing, and it has kept no sample"
            )
        with np.load(path, allow_pickle=False) as arrays:
            inputs = np.asarray(arrays["inputs"])
        summary = f"not compared on the run's samples, which are missing ({scored})"
        return Rerun(summary, vectors.predict(inputs, inputs, predictor))

    # Compare on all scored samples
    evaluator = scored.evaluator
    samples = scored.samples
    label = "Running the artifact"
    again = evaluator.compare(source.artifact, samples, label, logits=False)
    summary = compare(source, evaluator.task, again=again.comparison, samples=len(samples))
    more = vectors.of_split(samples, predictor, many=True) if many else None
    return Rerun(summary, vectors.of_split(samples, predictor), more)


def compare(source: SourceRun, task: Task, again: Comparison, samples: int) -> str:
    """Compare predictions for the scored samples with those of the run; return a sentence.

    If the run has kept no comparable predictions, the task's metric is compared. If the CPU is not
    the run's, a difference is only a warning.

    Raises:
        QuantizationError: predictions or metric differ on the run's own CPU.
    """
    metric = task.metric
    value = again.model.value
    logged = source.record.value_of(metric)
    files = task.files
    different = _count_different(
        source.folder, arrays=files.arrays(again), documents=files.documents(again), samples=samples
    )
    if different is None:
        same = logged is not None and abs(value - logged) <= ROUNDING
        summary = f"{metric.title} {metric.show(value)} on {samples} samples"
    else:
        same = different == 0
        summary = f"predictions equal to the run's on {samples - different} of {samples} samples"

    # Another CPU may round differently; on the run's own CPU, the predictions must be equal
    if not same:
        here = machine.describe()["cpu"]
        there = source.record.cpu
        if here == there:
            raise QuantizationError(
                f"run {source.record.run_id}: its artifact's predictions differ from "
                f"those that the run has logged: {summary}"
            )
        log.warning("the run was measured on another CPU (%s): %s", there, summary)
    return summary


def _count_different(
    folder: Path, arrays: Mapping[str, Array], documents: Mapping[str, str], samples: int
) -> int | None:
    """Return the number of samples with different predictions; None if none can be compared."""
    name = "detections.json"
    if name in documents and (folder / name).exists():
        ours = _by_picture(json.loads(documents[name]))
        theirs = _by_picture(json.loads((folder / name).read_text("utf-8")))
        different = 0
        for picture in {*ours, *theirs}:
            if _differ(ours.get(picture, []), theirs.get(picture, [])):
                different += 1
        return different

    # Other tasks than detection keep arrays
    if not (folder / "predictions.npz").exists():
        return None
    with np.load(folder / "predictions.npz", allow_pickle=False) as known:
        kept = _find_kept(known, arrays)
        if kept is None:
            return None
        values = known[kept]
        predicted = arrays[kept]
    if predicted.shape != values.shape:
        return samples
    logged = values.astype(np.float64)
    largest = np.abs(logged[np.isfinite(logged)]).max(initial=1.0)
    again = predicted.astype(np.float64)
    equal = np.isclose(again, logged, rtol=0, atol=ROUNDING * largest, equal_nan=True)
    return int((~equal.reshape(len(equal), -1).all(1)).sum())


def _find_kept(known: Container[str], arrays: Container[str]) -> str | None:
    """Return the name under which both the run and the task have predictions; None without one."""
    for name in PREDICTIONS:
        if name in known and name in arrays:
            return name
    return None


def _read_geometry(detection: dict[str, Any]) -> list[float]:
    """Return the keypoints of a detection, its box, or the box and the area of its mask."""
    if "segmentation" in detection:
        return masks.measure(detection["segmentation"])
    key = "keypoints" if "keypoints" in detection else "bbox"
    numbers: list[float] = detection[key]
    return numbers


def _by_picture(detections: list[dict[str, Any]]) -> dict[object, list[list[float]]]:
    boxes: dict[object, list[list[float]]] = {}
    for detection in detections:
        box = [*_read_geometry(detection), detection["score"], detection["category_id"]]
        boxes.setdefault(detection["image_id"], []).append(box)
    return boxes


def _differ(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    """Return whether the detections of a picture differ, other than by rounding or in order."""
    if len(ours) != len(theirs):
        return True
    left = np.asarray(theirs)
    for box in ours:
        same = np.isclose(left, box, rtol=1e-4, atol=1e-3).all(axis=1)
        if not same.any():
            return True
        left = np.delete(left, same.argmax(), axis=0)
    return False
