"""Runs logged to a store, directly or later."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import background, files
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.tasks import classification
from resnet8ptq.tasks.classification import ClassScores
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.run import Run, start_run
from tests.helpers import cells
from tests.helpers.calling import EMPTY
from tests.helpers.configs import make_config
from tests.helpers.results import make_result


def log_everything(store: Store, folder: Path, parent_id: str | None = None) -> str:
    """Log a run with all that a run may log; return its id, empty where the store is away."""
    folder.mkdir(parents=True)
    split = Split(np.zeros((10, 2, 2, 3), np.uint8), np.arange(10), "made up")
    with start_run(store, "a run", folder, parent_id, {"job_number": "3"}) as run:
        run.log_config(make_config("data=shapes"))
        run.log_datasets(
            Dataset("made up", ("a", "b"), split, split), CalibrationSet(split, np.arange(10))
        )
        for step in range(3):
            run.log_step(step, {"loss": 1.0 / (step + 1)})
        (folder / "result.json").write_text("{}")
        run.log_result(RunResult("ok", resolved={"weight_dtype": "int8"}))
    return run.run_id


def log_measured(
    store: Store, folder: Path, parent_id: str | None, number: int, *words: str, lost: int = 0
) -> str:
    """Log a run that loses `lost` of 1,000 images, with every file that readers open."""
    tags = {"job_number": str(number)}
    return record_measured(store, folder, parent_id, tags, lost, f"seed={number}", *words)


def record_measured(
    store: Store,
    folder: Path,
    parent_id: str | None,
    tags: Mapping[str, str],
    lost: int,
    *words: str,
    opened: Callable[[Run], None] = lambda run: None,
) -> str:
    """Record a run by the calls of a real one; call `opened` as soon as it is open."""
    task = classification.build(cells.NAMES)
    comparison = task.compare(score(cells.predictions(lost)), score(cells.BASELINE))
    split = Split(np.zeros((1, 2, 2, 3), np.uint8), np.zeros(1, int), "made up")
    folder.mkdir(parents=True)
    with start_run(store, "job", folder, parent_id, tags) as run:
        opened(run)
        run.log_config(make_config("data=shapes", "report.max_drop=0.03", *words))
        run.log_params(task.describe())
        data = Dataset("shapes", cells.NAMES, split, split)
        run.log_datasets(data, CalibrationSet(split, np.arange(1)), cells.NAMES)
        background.put(draw, folder, task.files.captions)
        with files.atomic(folder / "predictions.npz") as temporary:
            np.savez(temporary, **task.files.arrays(comparison))
        files.write_text(folder / "ranges.json", '{"activations": {"x": [0, 1]}, "weights": {}}')
        run.log_result(make_result(task, comparison))
    return run.run_id


def draw(folder: Path, names: Collection[str]) -> None:
    """Write empty pictures."""
    for name in names:
        files.write_bytes(folder / name, EMPTY)


def score(predictions: NDArray[np.int64]) -> ClassScores:
    """Return the scores of a model with these predictions."""
    probabilities = np.full((len(predictions), len(cells.NAMES)), 0.2, np.float32)
    probabilities[np.arange(len(predictions)), predictions] = 0.8
    return ClassScores(probabilities, cells.LABELS)


def only_run(store: Store) -> Any:
    """Return the run of a store that has one."""
    (run,) = store.client.search_runs([store.experiment_id])
    return run
