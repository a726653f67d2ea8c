"""From a run's journal to the MLflow store: the calls, each of which may be made again.

What writes to a database is not interrupted.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from resnet8ptq.core import interrupts, machine
from resnet8ptq.tracking import history
from resnet8ptq.tracking.journal import FILE, SWEEP_FILE, Journal, Point
from resnet8ptq.tracking.store import Store

_AT_ONCE = 100  # params or tags that MLflow takes in one call; metrics may be more


@interrupts.deferred()
def create(store: Store, journal: Journal) -> str:
    """Make the run in the store; return its id."""
    tags = {**journal.tags, "record": journal.key, "status": "running"}
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
    metrics = [Metric(*point) for point in points]
    named = [Param(key, value) for key, value in (params or {}).items()]
    tagged = [RunTag(key, value) for key, value in (tags or {}).items()]
    for start in range(0, max(len(metrics), len(named), len(tagged)), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        store.client.log_batch(run_id, metrics[part], named[part], tagged[part])


@interrupts.deferred()
def log_datasets(store: Store, run_id: str, datasets: Sequence[Mapping[str, str]]) -> None:
    """Log the data sets of a run, given as MLflow's fields with a `context`."""
    inputs = []
    for fields in datasets:
        context = InputTag(MLFLOW_DATASET_CONTEXT, fields["context"])
        kept = {key: value for key, value in fields.items() if key != "context"}
        inputs.append(DatasetInput(Dataset(**kept), [context]))
    for last in (False, False, True):
        try:
            return store.client.log_inputs(run_id, inputs)
        # MLflow looks for a data set and then adds it: of jobs that are the first to log it at
        # the same time, one succeeds, and the others find it when they try again.
        except Exception:  # SQLAlchemy's, or the server's
            if last:
                raise


@interrupts.deferred()
def log_model(store: Store, run_id: str, journal: Journal, folder: Path) -> None:
    """Log the run's ONNX file as an MLflow model with its signature, in one file; once."""
    described = journal.model
    if described is None or store.client.get_run(run_id).outputs.model_outputs:
        return
    import mlflow.onnx
    import onnx

    proto = onnx.load(folder / described["file"])
    taken = proto.graph.input[0].name
    inputs = TensorSpec(np.dtype(np.float32), (-1, *described["image_shape"]), taken)
    outputs = [
        TensorSpec(np.dtype(np.float32), (-1, *(dim.dim_value or -1 for dim in dims[1:])), name)
        for name, dims in ((o.name, o.type.tensor_type.shape.dim) for o in proto.graph.output)
    ]
    packages = ("onnx", "onnxruntime", "numpy")
    versions = machine.versions()
    # What follows has no argument for the store and the experiment.
    mlflow.set_tracking_uri(store.uri)
    mlflow.set_experiment(experiment_id=store.experiment_id)
    Model.log(
        None,
        flavor=mlflow.onnx,
        run_id=run_id,
        name="model",
        onnx_model=proto,
        signature=ModelSignature(Schema([inputs]), Schema(outputs)),
        save_as_external_data=False,
        pip_requirements=[f"{name}=={versions[f'version.{name}']}" for name in packages],
    )


def log_files(store: Store, run_id: str, paths: Iterable[Path]) -> None:
    """Add files to a run, replacing those of the same name."""
    for path in paths:
        store.client.log_artifact(run_id, str(path))


def files_of(folder: Path) -> list[Path]:
    """Return what is uploaded of a folder: no hidden files, nor those that serve the program."""
    private = (FILE, SWEEP_FILE)  # the second may hold a database's password
    paths = (path for path in sorted(folder.iterdir()) if path.is_file())
    return [path for path in paths if not path.name.startswith(".") and path.name not in private]


@interrupts.deferred()
def finish(store: Store, run_id: str, journal: Journal) -> None:
    """Close the run as its journal says: the last call, so that a closed run is whole."""
    named = ("status", "reason")
    status = {key: value for key, value in journal.tags.items() if key in named}
    log_batch(store, run_id, tags=status)
    store.client.set_terminated(run_id, journal.status, journal.end_ms)


def push(store: Store, journal: Journal, folder: Path) -> str:
    """Log an ended run to the store, which may have parts of it; return the run's id."""
    there = history.find_runs(store, f"tags.record = '{journal.key}'", most=1, deleted=True)
    run_id = there[0].run_id if there else create(store, journal)
    log_model(store, run_id, journal, folder)  # first: MLflow copies the run's metrics to it
    log_datasets(store, run_id, journal.datasets)
    tags = {key: value for key, value in journal.tags.items() if key != "status"}
    log_batch(store, run_id, journal.points, journal.params, tags)
    log_files(store, run_id, files_of(folder))
    finish(store, run_id, journal)
    return run_id
