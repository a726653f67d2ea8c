"""Runs logged to a store, directly or later."""

from pathlib import Path
from typing import Any

import numpy as np

from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.tracking.run import start_run
from resnet8ptq.tracking.store import Store
from tests.helpers.configs import make_config


def log_everything(store: Store, folder: Path, parent_id: str | None = None) -> str:
    """Log a run with all that a run may log; return its id, empty where the store is away."""
    folder.mkdir(parents=True)
    split = Split(np.zeros((10, 2, 2, 3), np.uint8), np.arange(10), "made up")
    with start_run(store, "a run", {}, folder, parent_id, {"job_number": "3"}) as run:
        run.log_config(make_config("data=shapes"))
        run.log_datasets(
            Dataset("made up", ("a", "b"), split, split), CalibrationSet(split, np.arange(10))
        )
        for step in range(3):
            run.log_step(step, {"loss": 1.0 / (step + 1)})
        (folder / "result.json").write_text("{}")
        run.log_result(RunResult("ok", resolved={"weight_dtype": "int8"}))
    return run.run_id


def only_run(store: Store) -> Any:
    """Return the run of a store that has one."""
    (run,) = store.client.search_runs([store.experiment_id])
    return run
