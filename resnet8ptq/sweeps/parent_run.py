"""Opens the parent run of a sweep in the store, adds missing runs of jobs, and ends the parent run.

The functions run in the process that has MLflow (`core.background`). They import the modules that
use MLflow only when called, because the process of the jobs does not need MLflow.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core import command

if TYPE_CHECKING:
    from resnet8ptq.tracking.mlflow_store.store import Store
    from resnet8ptq.tracking.record import RunRecord
    from resnet8ptq.tracking.sweep_file import SharedSweep

log = logging.getLogger(__name__)


def begin(tracking: TrackingConfig, folder: Path, tags: Mapping[str, str]) -> "tuple[Store, str]":
    """Open the store and create the sweep's run; return the store and the run's id.

    The function warns if the last sweep with these settings was interrupted or killed.
    """
    from resnet8ptq.sweeps import resume
    from resnet8ptq.tracking.mlflow_store.store import in_one_line, open_store
    from resnet8ptq.tracking.run import start_parent

    store = open_store(tracking)
    name = f"sweep {folder.parent.name} {folder.name}"

    # Mention an interrupted sweep before its successor replaces it as the newest
    with in_one_line(store):
        killed = resume.find_killed(store, tags["sweep_key"])
        if killed is not None:
            log.warning(
                "the last sweep with these settings was interrupted: %s; the same command with "
                "sweep.resume=true keeps its finished runs",
                killed.folder,
            )
        return store, start_parent(store, name, folder, tags)


def collect(sweep: "SharedSweep") -> "list[RunRecord]":
    """Log the runs that are missing in the store; return the runs to compare."""
    from resnet8ptq.tracking import history
    from resnet8ptq.tracking.mlflow_store import sync
    from resnet8ptq.tracking.mlflow_store.store import check_answers

    check_answers(sweep.store.uri)
    # This includes runs whose processes ended with the sweep.
    done = sync.sync(sweep.store, sweep.folder, wait_s=10 if sweep.parallel else 0)
    if len(done.running) > 1:  # runs other than the sweep itself
        log.warning("%d jobs of the sweep are still running", len(done.running) - 1)
    return history.load_compared(sweep.store, sweep.parent_id)


def end(store: "Store", parent_id: str, status: str, folder: Path) -> str:
    """Close the sweep's run; return the error of an unavailable store, or an empty text."""
    from resnet8ptq.tracking.mlflow_store.store import is_away
    from resnet8ptq.tracking.run import end_parent

    try:
        end_parent(store, parent_id, status, folder)
    except Exception as error:
        if not is_away(error):
            raise
        return command.explain(error)
    return ""
