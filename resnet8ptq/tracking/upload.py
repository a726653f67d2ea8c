"""From a run's journal to the MLflow store: the calls, each of which may be made again.

What writes to a database is not interrupted.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resnet8ptq.core import interrupts
from resnet8ptq.core.text import one_line
from resnet8ptq.tracking import history, mlflow_model
from resnet8ptq.tracking.journal import FILE, SWEEP_FILE, Journal, Point
from resnet8ptq.tracking.store import Store, is_away

log = logging.getLogger(__name__)

_AT_ONCE = 100  # params or tags that MLflow takes in one call; metrics may be more


@interrupts.deferred()
def create(store: Store, journal: Journal) -> str:
    """Make the run in the store; return its id."""
    from mlflow.tracking.context.registry import resolve_tags

    tags = resolve_tags({**journal.tags, "record": journal.key, "status": "running"})
    run = store.client.create_run(store.experiment_id, journal.start_ms, tags, journal.name)
    return str(run.info.run_id)


@interrupts.deferred()
def log_batch(
    store: Store,
    run_id: str,
    points: Sequence[Point] = (),
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> None:
    """Log metrics, params and tags, in as many calls as MLflow's limits ask for."""
    from mlflow.entities import Metric, Param, RunTag

    metrics = [Metric(*point) for point in points]
    named = [Param(key, value) for key, value in (params or {}).items()]
    tagged = [RunTag(key, value) for key, value in (tags or {}).items()]
    for start in range(0, max(len(metrics), len(named), len(tagged)), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        store.client.log_batch(run_id, metrics[part], named[part], tagged[part])


@interrupts.deferred()
def log_datasets(store: Store, run_id: str, datasets: Sequence[Mapping[str, Any]]) -> None:
    """Log the data sets of a run, as its journal describes them."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    inputs = []
    for described in datasets:
        context = InputTag(MLFLOW_DATASET_CONTEXT, described["context"])
        inputs.append(DatasetInput(Dataset(**_to_fields(described)), [context]))
    for last in (False, False, True):
        try:
            return store.client.log_inputs(run_id, inputs)
        # MLflow looks for a data set and then adds it: of jobs that are the first to log it at
        # the same time, one succeeds, and the others find it when they try again.
        except Exception:  # SQLAlchemy's, or the server's
            if last:
                raise


def _to_fields(described: Mapping[str, Any]) -> dict[str, str]:
    """Return a data set as MLflow's fields, all of them text."""
    from mlflow.data.numpy_dataset import NumpyDataset
    from mlflow.data.sources import LocalArtifactDatasetSource

    # MLflow looks at shape and type alone, so that one value stands for all: no sample is read.
    arrays = {
        key: np.broadcast_to(np.zeros((), dtype), shape)
        for key in ("images", "targets")
        for dtype, shape in [described.get(key, (None, None))]
        if dtype is not None
    }
    return NumpyDataset(
        arrays["images"],
        source=LocalArtifactDatasetSource(described["source"]),
        targets=arrays.get("targets"),
        name=described["name"],
        digest=described["digest"][:36],  # what MLflow keeps; the whole one is a tag of the run
    ).to_dict()


def log_files(store: Store, run_id: str, paths: Iterable[Path]) -> None:
    """Add files to a run, replacing those of the same name."""
    for path in paths:
        store.client.log_artifact(run_id, str(path))


def log_folder(store: Store, run_id: str, folder: Path) -> None:
    """Add the files of a run's folder to it."""
    log_files(store, run_id, files_of(folder))


def files_of(folder: Path) -> list[Path]:
    """Return what is uploaded of a folder: no hidden files, nor those that serve the program."""
    private = (FILE, SWEEP_FILE)  # the second may hold a database's password
    paths = (path for path in sorted(folder.iterdir()) if path.is_file())
    return [path for path in paths if not path.name.startswith(".") and path.name not in private]


def replace_runs(store: Store, earlier: Sequence[str], run_id: str) -> None:
    """Delete runs, by their ids, that run again as another one.

    MLflow keeps deleted runs, and shows them on request; so does the folder of each.
    """
    for old in earlier:
        try:
            log_batch(store, old, tags={"run_again_as": run_id})
            with interrupts.deferred():
                store.client.delete_run(old)
        except Exception as error:
            if not is_away(error):
                raise
            # Reports take a job's newest run. A server may let only its owner delete a run.
            log.warning("run %s stays beside %s: %s", old, run_id, one_line(error))


@interrupts.deferred()
def finish(store: Store, run_id: str, journal: Journal) -> None:
    """Close the run as its journal says: the last call, so that a closed run is whole."""
    named = ("status", "reason")
    status = {key: value for key, value in journal.tags.items() if key in named}
    log_batch(store, run_id, tags=status)
    store.client.set_terminated(run_id, journal.status, journal.end_ms)


def push(store: Store, journal: Journal, folder: Path) -> str:
    """Log an ended run to the store, which may have parts of it; return the run's id."""
    there = history.find_logged(store, journal.key)
    run_id = create(store, journal) if there is None else there.run_id
    mlflow_model.log_model(
        store, run_id, journal, folder
    )  # first: MLflow copies the run's metrics to it
    log_datasets(store, run_id, journal.datasets)
    tags = {key: value for key, value in journal.tags.items() if key != "status"}
    log_batch(store, run_id, journal.points, journal.params, tags)
    log_folder(store, run_id, folder)
    finish(store, run_id, journal)
    return run_id
