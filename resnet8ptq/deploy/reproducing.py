"""The artifact run again, on the samples that it was scored on: does it still predict the same?"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from resnet8ptq.core import cache, machine
from resnet8ptq.core.errors import ConfigError, DataError, ModelError, QuantizationError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.text import printable
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.sampling import choose_scored, draw_calibration
from resnet8ptq.deploy.source import Source
from resnet8ptq.evaluation.evaluate import targets_of
from resnet8ptq.evaluation.trial import Bench
from resnet8ptq.experiment import choice
from resnet8ptq.experiment.compatibility import load, settle, settle_task
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.contract import Array, Outputs, Task

log = logging.getLogger(__name__)

PREDICTIONS = ("probabilities", "predictions", "scores", "model")  # a task's name of them
ROUNDING = 1e-5  # of float operations, in another order on another number of threads


@dataclass(frozen=True)
class Samples:
    """What the run was scored on, and what it was scored by.

    Attributes:
        scored: as the network takes them.
    """

    scored: Split
    task: Task
    fp32: Fp32Model


def open_samples(source: Source, runtime: Runtime) -> Samples | str:
    """Return the samples that the run was scored on; or why they are not at hand, in words.

    Raises:
        DataError: there are others where they were.
    """
    config = source.config
    try:
        config = settle(config, runtime.cache_root)
        dataset, fp32 = load(config, runtime.cache_root)
        data = choose_scored(dataset, config.evaluate.split, config.held_out_images)
        task = settle_task(config.task, dataset, data.test, fp32)
        if config.evaluate.choice in ("auto", "half"):  # half of the samples may have chosen
            taken = [] if data is dataset else [data.test]
            calibration = draw_calibration(
                dataset, config.calib.samples_per_class, config.seed, taken
            )
            data, _ = choice.part(config, data, calibration.split, None, fp32)
    except (ConfigError, DataError, ModelError) as error:
        return printable(str(error))
    known = source.record.tags.get("test_digest")
    if known is not None and data.test.digest != known:
        raise DataError(
            f"{data.test.source}: run {source.record.run_id} was scored on other samples (their "
            f"digest is {data.test.digest[:12]}, the run has logged {known[:12]})"
        )
    return Samples(data.test, task, fp32)


def reproduce(source: Source, samples: Samples, runtime: Runtime) -> str:
    """Run the artifact on all samples, compare with what the run has kept; say it in a sentence.

    Raises:
        QuantizationError: it predicts something else, on the CPU that the run had.
    """
    task, scored = samples.task, samples.scored
    bench = Bench(
        samples.fp32.sha256,
        runtime,
        source.config.evaluate.batch_size,
        samples.fp32.final,
        task.reduction,
    )
    found = bench.evaluate(source.config, source.artifact, scored, "Running the artifact").outputs
    return compare(source, task, found, scored)


def compare(source: Source, task: Task, found: Outputs, scored: Split) -> str:
    """Compare outputs for the scored samples with what the run has kept; see `reproduce`."""
    scores = task.score(found, targets_of(scored))
    again = task.compare(scores, scores)
    metric, known = task.metric, source.record.metrics.get(task.metric.name)
    differ = _differing(source.folder, task.arrays(again), task.documents(again), len(scored))
    if differ is None:
        same = known is not None and abs(scores.value - known) <= ROUNDING
        said = f"{metric.title} {metric.show(scores.value)} on {len(scored)} samples"
    else:
        same = differ == 0
        said = f"predictions equal to the run's on {len(scored) - differ} of {len(scored)} samples"
    if not same:
        here, there = machine.describe()["cpu"], source.record.tags.get("cpu")
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
