"""Logs a run's journal to MLflow; `push` may be repeated after an interruption.

Ctrl-C and SIGTERM are delayed until a write to the database is complete.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from resnet8ptq.core import interrupts
from resnet8ptq.core.text import one_line
from resnet8ptq.tracking import details, history, metrics, params
from resnet8ptq.tracking.journal import FILE, NOTE_TAG, DataSet, Journal, Kind, Point
from resnet8ptq.tracking.mlflow_store import mlflow_model
from resnet8ptq.tracking.mlflow_store.store import Store, is_away
from resnet8ptq.tracking.sweep_file import FILE as SWEEP_FILE

log = logging.getLogger(__name__)

DIGEST = 36  # characters of a data set's digest that MLflow takes
# Colours of the dots in MLflow's list, which shows even an unsupported run with a green check.
_COLORS = {"unsupported": "#9e9e9e", "failed": "#c62828", "killed": "#c62828"}
_AT_ONCE = 100  # most params or tags in one call of MLflow, which takes more metrics


@interrupts.deferred()
def create_run(store: Store, journal: Journal) -> str:
    """Create the run in the store, with the tags that MLflow shows; return its id."""
    from mlflow.tracking.context.registry import resolve_tags

    own = details.shown_tags(journal.tags)
    tags = resolve_tags({**own, "record": journal.key, "status": "running"})
    run = store.client.create_run(store.experiment_id, journal.start_ms, tags, journal.name)
    return str(run.info.run_id)


@interrupts.deferred()
def log_batch(
    store: Store,
    run_id: str,
    points: Sequence[Point] = (),
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    links: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Log metrics, params and tags, in calls within MLflow's limits.

    Tags that only `result.json` has are left out, see `details`.

    Args:
        links: the model and the data set to link to the leading metrics.
    """
    from mlflow.entities import Metric, Param, RunTag

    # Make MLflow's entities of each kind
    values = []
    for point in points:
        if _leads(point):
            values.append(Metric(*point, **links))
        else:
            values.append(Metric(*point))
    named = [Param(key, value) for key, value in (params or {}).items()]
    shown = details.shown_tags(tags or {})
    tagged = [RunTag(key, value) for key, value in shown.items()]

    # Send a slice of each kind in every call
    for start in range(0, max(len(values), len(named), len(tagged)), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        store.client.log_batch(run_id, values[part], named[part], tagged[part])


def _leads(point: Point) -> bool:
    """Return whether a point is of a leading metric: at step 0, and without a group."""
    key, _, _, step = point
    return step == 0 and "/" not in key


def log_result(
    store: Store,
    run_id: str,
    journal: Journal,
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> None:
    """Log a run's metrics, params and tags; link the leading metrics to the model and the data.

    MLflow's page of models shows the linked metrics.
    """
    points = metrics.select(journal)
    leading = {key for key, *_ in filter(_leads, points)}
    model = None
    if leading:
        model = mlflow_model.find_model(store, run_id)
    links = {}
    if model is not None:
        # A model that is logged after the metrics has them already, and MLflow refuses a second
        # link.
        linked = {metric.key for metric in model.metrics or ()}
        if leading.isdisjoint(linked):
            links = {"model_id": str(model.model_id), **_scored(journal)}
    log_batch(store, run_id, points, params=params, tags=tags, links=links)


def _scored(journal: Journal) -> dict[str, str]:
    """Return the name and the digest of the scored data set, as links of a metric."""
    for described in journal.datasets:
        if described.context == "test":
            digest = described.digest[:DIGEST]
            return {"dataset_name": described.name, "dataset_digest": digest}
    return {}


@interrupts.deferred()
def log_datasets(store: Store, run_id: str, datasets: Sequence[DataSet]) -> None:
    """Log the data sets that a run's journal describes; try up to three times."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    inputs = []
    for described in datasets:
        context = InputTag(MLFLOW_DATASET_CONTEXT, described.context)
        inputs.append(DatasetInput(Dataset(**_to_fields(described)), [context]))
    for last in (False, False, True):
        try:
            return store.client.log_inputs(run_id, inputs)
        # MLflow looks for a data set and then adds it. If several jobs log a new data set at the
        # same time, one job succeeds, and the others find the data set when they try again.
        except Exception:  # an error of SQLAlchemy or the server
            if last:
                raise


def _to_fields(described: DataSet) -> dict[str, str]:
    """Return a data set as MLflow's fields, all as text."""
    from mlflow.data.numpy_dataset import NumpyDataset
    from mlflow.data.sources import LocalArtifactDatasetSource

    targets = None
    if described.targets is not None:
        targets = _zeros(described.targets)
    return NumpyDataset(
        _zeros(described.samples),
        source=LocalArtifactDatasetSource(described.source),
        targets=targets,
        name=described.name,
        digest=described.digest[:DIGEST],  # a tag of the run has the whole digest
    ).to_dict()


def _zeros(kind: Kind | dict[str, Kind]) -> Any:
    """Return an array of zeros of a dtype and shape, or several arrays by name.

    MLflow only reads dtype and shape, so a single broadcast zero is enough.
    """
    if isinstance(kind, dict):
        return {name: _zeros(values) for name, values in kind.items()}
    dtype, shape = kind
    return np.broadcast_to(np.zeros((), dtype), shape)


def describe(store: Store, run_id: str, markdown: str) -> None:
    """Set the description of a run in MLflow's UI."""
    log_batch(store, run_id, tags={NOTE_TAG: markdown})


def log_files(store: Store, run_id: str, paths: Iterable[Path]) -> None:
    """Add files to a run; they replace earlier files of the same name.

    Raises:
        TrackingError: the address of the run's files does not belong to the store.
    """
    store.locate(store.client.get_run(run_id).info.artifact_uri)
    for path in paths:
        store.client.log_artifact(run_id, str(path))


def log_folder(store: Store, run_id: str, folder: Path) -> None:
    """Add the files of a run's folder, without hidden files and internal ones.

    Links are left out, because other people's links may name any file of this user.
    """
    private = (FILE, SWEEP_FILE)  # the second may hold a database's password
    shared = []
    for path in sorted(folder.iterdir()):
        is_own = path.is_file() and not path.is_symlink()
        is_hidden = path.name.startswith(".") or path.name in private
        if is_own and not is_hidden:
            shared.append(path)
    log_files(store, run_id, shared)


def replace_runs(store: Store, earlier: Sequence[str], run_id: str) -> None:
    """Delete the runs with the ids `earlier`, which run `run_id` replaces.

    MLflow keeps deleted runs and shows them on request; their folders stay. If the store is
    unavailable or forbids it, a warning is logged.
    """
    for old in earlier:
        try:
            log_batch(store, old, tags={"run_again_as": run_id})
            with interrupts.deferred():
                store.client.delete_run(old)
        except Exception as error:
            if not is_away(error):
                raise
            # Reports use a job's newest run anyway. A server may let only the owner delete a run.
            log.warning(
                "run %s, which %s replaces, cannot be deleted: %s", old, run_id, one_line(error)
            )


@interrupts.deferred()
def finish(store: Store, run_id: str, journal: Journal) -> None:
    """Close the run with its journal's status and reason; the report may add a verdict later."""
    named = ("status", "reason", NOTE_TAG)
    tags = {key: value for key, value in journal.tags.items() if key in named}
    status = tags.get("status", "")
    if status in _COLORS:  # the run has no verdict on a model
        tags |= {"verdict": status, "mlflow.runColor": _COLORS[status]}
    log_batch(store, run_id, tags=tags)
    store.client.set_terminated(run_id, journal.status, journal.end_ms)


def push(store: Store, journal: Journal, folder: Path) -> str:
    """Log an ended run, of which the store may have a part, from its folder; return its id."""
    record = history.find_logged(store, journal.key)
    run_id = create_run(store, journal) if record is None else record.run_id
    tags = {key: value for key, value in journal.tags.items() if key != "status"}
    # Log params first: MLflow copies them to the model, and would log those of its code to a run
    # without params.
    log_batch(store, run_id, points=(), params=params.select(journal), tags=tags)
    mlflow_model.log_model(store, run_id, journal, folder)  # before metrics, which name it
    log_datasets(store, run_id, journal.datasets)
    log_batch(store, run_id, metrics.select_curves(journal))
    log_result(store, run_id, journal)
    log_folder(store, run_id, folder)
    finish(store, run_id, journal)
    return run_id
