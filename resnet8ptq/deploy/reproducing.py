"""The artifact run again, on the samples that it was scored on: does it still predict the same?"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.core import cache, isolation, machine
from resnet8ptq.core.errors import ConfigError, DataError, ModelError, QuantizationError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.text import printable
from resnet8ptq.data.dataset import Split
from resnet8ptq.deploy import vectors
from resnet8ptq.deploy.source import TORCH, Source
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.experiment import preparation
from resnet8ptq.experiment.compatibility import load, make_task
from resnet8ptq.experiment.samples import draw
from resnet8ptq.experiment.settings import settle
from resnet8ptq.tasks.contract import Array, Comparison, Task
from resnet8ptq.tracking.mlflow_model import EXAMPLE

log = logging.getLogger(__name__)

PREDICTIONS = ("probabilities", "predictions", "scores", "model")  # a task's name of them
ROUNDING = 1e-5  # of float operations, in another order on another number of threads


@dataclass(frozen=True)
class Scored:
    """The samples that a run was scored on, and what scores them."""

    samples: Split
    evaluator: Evaluator


def open_samples(source: Source, cache_dir: str | None) -> Scored | str:
    """Return the samples that the run was scored on; or why they are not at hand, in words.

    Raises:
        DataError: other samples lie where they were.
    """
    config = source.config
    try:
        settings = settle(replace(config, cache_dir=cache_dir or config.cache_dir))
        config = settings.config
        data, network = load(settings)
        check = partial(make_task, config.task, data, network)
        samples = draw(config, data, preparation.tunes(config), check)
        task = make_task(config.task, data, network, samples.reported)
    except (ConfigError, DataError, ModelError) as error:
        return printable(str(error))
    known, digest = source.record.test_digest, samples.reported.digest
    if known and digest != known:
        raise DataError(
            f"{samples.reported.source}: run {source.record.run_id} was scored on other samples "
            f"(their digest is {digest[:12]}, the run has logged {known[:12]})"
        )
    batch_size = config.evaluate.batch_size
    return Scored(samples.reported, Evaluator(network, task, settings.runtime, batch_size))


@dataclass(frozen=True)
class Rerun:
    """What the artifact did when it was run again.

    Attributes:
        said: how that compares with the run, in a sentence.
        tested, more: inputs and outputs, few and many; the latter where they were asked for.
    """

    said: str
    tested: Vectors
    more: Vectors | None = None


def run(source: Source, scored: Scored | str, runtime: Runtime, many: bool) -> Rerun:
    """Run the artifact; files of torch, which may hold code, in a process of their own.

    Args:
        scored: a text says why they are not at hand: the sample that the run has kept is run.

    Raises:
        QuantizationError: see `reproduce`; there is no sample; the process ended.
    """
    if source.artifact.suffix not in TORCH:
        return _run(source, scored, runtime, many)
    crashed = QuantizationError(
        f"run {source.record.run_id}: {source.artifact.name} ended the process that ran it"
    )
    return isolation.call(_run, source, scored, runtime, many, crashed=crashed)


def _run(source: Source, scored: Scored | str, runtime: Runtime, many: bool) -> Rerun:
    predictor = make_quantizer(source.config, runtime).load(source.artifact, runtime.threads)
    if isinstance(scored, str):
        said = f"not compared on the run's samples, which are not at hand ({scored})"
        return Rerun(said, vectors.of_inputs(_kept_input(source), predictor))
    said = reproduce(source, scored)
    more = vectors.many_of_split(scored.samples, predictor) if many else None
    return Rerun(said, vectors.of_split(scored.samples, predictor), more)


def _kept_input(source: Source) -> NDArray[np.float32]:
    """Return the input [1, ...] that the run has kept.

    Raises:
        QuantizationError: it has kept none.
    """
    path = source.folder / EXAMPLE
    if not path.exists():
        raise QuantizationError(
            f"run {source.record.run_id}: neither its data are at hand nor has it kept a sample"
        )
    with np.load(path, allow_pickle=False) as arrays:
        return np.asarray(arrays["inputs"])


def reproduce(source: Source, scored: Scored) -> str:
    """Run the artifact on all samples, compare with what the run has kept; say it in a sentence.

    Raises:
        QuantizationError: it predicts something else, on the CPU that the run had.
    """
    label = "Running the artifact"
    evaluator, samples = scored.evaluator, scored.samples
    again = evaluator.compare(source.config, source.artifact, samples, label, logits=False)
    return compare(source, evaluator.task, again.comparison, len(samples))


def compare(source: Source, task: Task, again: Comparison, samples: int) -> str:
    """Compare outputs for the scored samples with what the run has kept; see `reproduce`."""
    metric, value = task.metric, again.model.value
    logged = source.record.value(metric)
    differ = _differing(source.folder, task.arrays(again), task.documents(again), samples)
    if differ is None:
        same = logged is not None and abs(value - logged) <= ROUNDING
        said = f"{metric.title} {metric.show(value)} on {samples} samples"
    else:
        same = differ == 0
        said = f"predictions equal to the run's on {samples - differ} of {samples} samples"
    if not same:
        here, there = machine.describe()["cpu"], source.record.cpu
        if here == there:
            raise QuantizationError(
                f"run {source.record.run_id}: its artifact does not predict what the run has "
                f"logged: {said}"
            )
        log.warning("the run was measured on another CPU (%s): %s", there, said)
    return said


def _differing(
    folder: Path, arrays: Mapping[str, Array], documents: Mapping[str, str], samples: int
) -> int | None:
    """Return for how many samples predictions differ; None where the run has kept none."""
    if "detections.json" in documents and (folder / "detections.json").exists():
        kept = (folder / "detections.json").read_text("utf-8")
        ours, theirs = (
            _by_picture(json.loads(text)) for text in (documents["detections.json"], kept)
        )
        return sum(_differ(ours.get(key, []), theirs.get(key, [])) for key in {*ours, *theirs})
    if not (folder / "predictions.npz").exists():
        return None
    with np.load(folder / "predictions.npz", allow_pickle=False) as known:
        names = [name for name in PREDICTIONS if name in known and name in arrays]
        if not names:
            return None
        values = known[names[0]]
    found = arrays[names[0]]
    if found.shape != values.shape:
        return samples
    away = np.abs(found.astype(np.float64) - values) > ROUNDING * max(1.0, np.abs(values).max())
    return int(away.reshape(len(away), -1).any(1).sum())


def _by_picture(detections: list[dict[str, object]]) -> dict[object, list[list[float]]]:
    found: dict[object, list[list[float]]] = {}
    for each in detections:
        box = [*each["bbox"], each["score"], each["category_id"]]  # type: ignore[misc]
        found.setdefault(each["image_id"], []).append(box)
    return found


def _differ(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    one, other = np.sort(ours, 0), np.sort(theirs, 0)
    return one.shape != other.shape or not np.allclose(one, other, rtol=1e-4, atol=1e-3)


def runtime_of(source: Source, cache_dir: str | None) -> Runtime:
    """Return what this command may use of the machine."""
    return cache.runtime(cache_dir or source.config.cache_dir, source.config.threads)
