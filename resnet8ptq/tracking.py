"""Everything that is logged to MLflow, and read back. The only module that imports mlflow."""

import json
import logging
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import requests
from filelock import FileLock
from omegaconf import OmegaConf

# Before the import: no telemetry, and neither run URLs nor bars between our tables.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
import mlflow.data
import mlflow.data.numpy_dataset
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.types import Schema, TensorSpec
from sqlalchemy import event
from sqlalchemy.engine import Engine

from resnet8ptq import environment, files, ui_view
from resnet8ptq.config import RunConfig, TrackingConfig
from resnet8ptq.data import CalibrationSet, Dataset, Split
from resnet8ptq.errors import ConfigError, PtqError, TrackingError, redact
from resnet8ptq.results import RunResult

log = logging.getLogger(__name__)

for _noisy in ("alembic", "mlflow.store.db.utils", "mlflow.models.model"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


@dataclass(frozen=True)
class Store:
    """An MLflow store that is known to answer, and the experiment in it."""

    uri: str
    experiment_id: str

    @property
    def ui_command(self) -> str:
        """What to type, or where to look, to browse the runs."""
        page = ui_view.path(self.experiment_id)
        if self.uri.startswith("http"):
            return f"{_without_password(self.uri)}{page}"
        return f"make ui, then http://127.0.0.1:5000{page}"


def open_store(config: TrackingConfig) -> Store:
    """Find or make the store and the experiment, under a lock; fail now rather than later.

    A URI in the config wins, then `$MLFLOW_TRACKING_URI`, then `<root>/mlflow.db`.

    Raises:
        ConfigError: `tracking.uri` holds a password.
        TrackingError: the folder cannot be written, or the server does not answer.
    """
    if urlsplit(config.uri or "").password is not None:
        raise ConfigError(
            "tracking.uri: holds a password, which would be written down with the config; takes "
            "one without: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_URI"
        )
    uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI")
    root = Path(config.root).absolute()
    if uri:
        _check_answers(uri)
        return _open(uri, config.experiment_name, None)
    uri = f"sqlite:///{root / 'mlflow.db'}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root), FileLock(root / ".lock"):
            # Parallel first use of a fresh SQLite store races its migrations.
            return _open(uri, config.experiment_name, root)
    except OSError as error:
        raise TrackingError(f"tracking.root: cannot write to {root} ({error})") from error


def _make_database(path: Path) -> None:
    """Make MLflow's tables in a scratch file, and put it in place when it is whole.

    MLflow migrates an empty database through all its versions. Each of dozens of steps waits
    for the disk, seconds in all, which a file that is not in use yet need not.
    """

    def wait_for_no_disk(connection: Any, _: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / path.name
        event.listen(Engine, "connect", wait_for_no_disk)
        try:
            mlflow.MlflowClient(tracking_uri=f"sqlite:///{scratch}").search_experiments()
        finally:
            event.remove(Engine, "connect", wait_for_no_disk)
        with files.atomic(path) as temporary:
            shutil.copyfile(scratch, temporary)


def _open(uri: str, name: str, root: Path | None) -> Store:
    try:
        if root is not None and not (root / "mlflow.db").exists():
            _make_database(root / "mlflow.db")
        experiment_id = _find_experiment(uri, name, root and root / "artifacts")
        _offer_view(uri, experiment_id)
    except PtqError:
        raise
    except Exception as error:  # MLflow's own, SQLAlchemy's, requests'
        shown = _without_password(uri)
        reason = " ".join(str(error).split())[:300].replace(uri, shown)
        raise TrackingError(f"tracking.uri: {shown} cannot be used ({reason})") from error
    return Store(uri, experiment_id)


def _check_answers(uri: str) -> None:
    if not uri.startswith(("http://", "https://")):
        return
    shown = _without_password(uri)
    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=10)
    except requests.RequestException as error:
        raise TrackingError(
            f"tracking.uri: {shown} does not answer ({type(error).__name__}); start the server, "
            "or unset MLFLOW_TRACKING_URI to log to mlruns/"
        ) from error


def _without_password(uri: str) -> str:
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _find_experiment(uri: str, name: str, artifacts: Path | None) -> str:
    """Return the experiment's id, creating it where it is not there yet."""
    client = mlflow.MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(name)
    if found is None:
        location = None if artifacts is None else (artifacts / files.safe_name(name)).as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:  # another process was faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise TrackingError(
            f"tracking.experiment_name: {name!r} was deleted in {_without_password(uri)}; restore "
            "it there, or take another name"
        )
    return str(found.experiment_id)


def _offer_view(uri: str, experiment_id: str) -> None:
    """Give MLflow's UI the columns that matter, unless somebody has changed that view."""
    client = mlflow.MlflowClient(tracking_uri=uri)
    tags = client.get_experiment(experiment_id).tags
    wanted = {ui_view.TAG: ui_view.tag_value(), "mlflow.experimentKind": "custom_model_development"}
    for key, value in wanted.items():
        if key not in tags:
            client.set_experiment_tag(experiment_id, key, value)


@dataclass
class Run:
    """An open MLflow run."""

    store: Store
    run_id: str
    folder: Path
    _config: Mapping[str, Any] = field(default_factory=dict)
    _config_logged: bool = False

    def log_config(self, config: RunConfig) -> None:
        """Log `backend`, `dtype`, `calib`, `per_channel`, and the whole config as flat params."""
        self._config = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)  # type: ignore[assignment]
        self._flush_config()

    def _flush_config(self) -> None:
        if self._config_logged:
            return
        self._config_logged = True
        flat = dict(_flatten(self._config))
        for group in ("backend", "dtype", "calib", "model", "data"):
            flat[group] = flat.get(f"{group}.name", "")
        flat["threads"] = str(environment.threads(self._config.get("threads")))
        params = [Param(key, value) for key, value in flat.items()]
        mlflow.MlflowClient().log_batch(self.run_id, params=params)

    def log_params(self, params: Mapping[str, str]) -> None:
        """Log what was found out on the way, beside the config."""
        found = [Param(key, value) for key, value in params.items()]
        mlflow.MlflowClient().log_batch(self.run_id, params=found)

    def log_datasets(self, data: Dataset, calibration: CalibrationSet) -> None:
        """Log which images calibrated and which tested, with digests."""
        drawn, test = calibration.split, data.test
        inputs = [
            _dataset(f"{data.name}-calibration", drawn, calibration.digest),
            _dataset(f"{data.name}-test", test, test.digest),
        ]
        for last in (False, False, True):
            try:
                mlflow.log_inputs(inputs, contexts=["calibration", "test"], tags_list=[None, None])
                break
            # MLflow looks for a data set and then adds it: of jobs that are the first to log it at
            # the same time, one succeeds, and the others find it when they try again.
            except Exception:  # SQLAlchemy's, or the server's
                if last:
                    raise
        digests = {"calibration_digest": calibration.digest, "test_digest": data.test.digest}
        mlflow.set_tags({**digests, "class_names": json.dumps(data.class_names)})

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log points of curves, such as a loss, at `step`."""
        now = mlflow.utils.time.get_current_time_millis()
        points = [Metric(key, value, now, step) for key, value in metrics.items()]
        mlflow.MlflowClient().log_batch(self.run_id, metrics=points)

    def log_model(self, path: Path, data: Dataset) -> None:
        """Log an ONNX file as an MLflow model too, with its signature, in one file."""
        if path.suffix != ".onnx":
            return
        import mlflow.onnx
        import onnx

        inputs = TensorSpec(np.dtype(np.float32), (-1, *data.image_shape), "input")
        outputs = TensorSpec(np.dtype(np.float32), (-1, len(data.class_names)), "probabilities")
        packages = ("onnx", "onnxruntime", "numpy")
        versions = environment.versions()
        mlflow.onnx.log_model(
            onnx.load(path),
            name="model",
            signature=ModelSignature(Schema([inputs]), Schema([outputs])),
            save_as_external_data=False,
            pip_requirements=[f"{name}=={versions[f'version.{name}']}" for name in packages],
        )

    def log_result(self, result: RunResult) -> None:
        """Log status, metrics and what the settings came to, in one call."""
        now = mlflow.utils.time.get_current_time_millis()
        tags = {"status": result.status, "reason": result.reason}
        mlflow.MlflowClient().log_batch(
            self.run_id,
            metrics=[Metric(key, value, now, 0) for key, value in result.to_metrics().items()],
            params=[Param(key, value) for key, value in result.resolved.items()],
            tags=[RunTag(key, value) for key, value in tags.items() if value],
        )

    def fail(self, error: BaseException) -> None:
        """Log what went wrong: the config as far as it was known, one line, the traceback."""
        self._flush_config()
        one_line = redact(" ".join(str(error).split())) or type(error).__name__
        # First the tags: the folder may be what failed.
        mlflow.set_tags({"status": "failed", "reason": one_line[:4000]})
        text = redact("".join(traceback.format_exception(error)))
        (self.folder / "traceback.txt").write_text(text, encoding="utf-8")

    def upload_folder(self) -> None:
        """Log the run's files as artifacts; Hydra's own hidden folder stays behind."""
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                mlflow.log_artifact(str(path))


def _dataset(name: str, split: Split, digest: str) -> mlflow.data.numpy_dataset.NumpyDataset:
    source = mlflow.data.sources.LocalArtifactDatasetSource(split.source)
    # MLflow looks at shape and type alone, so that one pixel stands for all: no image is read.
    images = np.broadcast_to(np.uint8(0), split.images.shape)
    # MLflow keeps at most 36 characters of a digest; the whole one is a tag of the run.
    return mlflow.data.numpy_dataset.NumpyDataset(
        images, source=source, targets=split.labels, name=name, digest=digest[:36]
    )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" == "tracking.uri" and value:
            yield f"{prefix}{key}", _without_password(value)
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


@contextmanager
def start_run(
    store: Store,
    name: str,
    config: Any,
    folder: Path,
    parent_id: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """Open a run, and close it as what it became: finished, failed or killed.

    Args:
        config: the composed config (nested dicts), logged if the run fails before it logs its own.
        folder: the run's own folder; its files are uploaded when the run closes.
        tags: set besides those of every run.
    """
    mlflow.set_tracking_uri(store.uri)
    tags = {"status": "running", "folder": str(folder), **environment.describe(), **(tags or {})}
    opened = mlflow.start_run(
        experiment_id=store.experiment_id, run_name=name, parent_run_id=parent_id, tags=tags
    )
    run = Run(store, opened.info.run_id, folder, config)
    ended = RunStatus.FAILED
    try:
        yield run
        run.upload_folder()
        ended = RunStatus.FINISHED
    except Exception as error:
        try:
            run.fail(error)
            run.upload_folder()
        except Exception as another:  # the store is gone; the first error is the one to report
            log.error("the failure could not be recorded: %s", redact(str(another)))
        raise
    except BaseException:  # Ctrl-C, SIGTERM
        ended = RunStatus.KILLED
        mlflow.set_tags({"status": "killed"})
        raise
    finally:
        mlflow.end_run(RunStatus.to_string(ended))


def start_parent(store: Store, name: str, tags: Mapping[str, str]) -> str:
    """Make the run that a sweep's runs stand under; return its id."""
    client = mlflow.MlflowClient(tracking_uri=store.uri)
    tags = {**tags, **environment.describe(), "kind": "sweep", "status": "running"}
    return str(client.create_run(store.experiment_id, run_name=name, tags=tags).info.run_id)


def end_parent(store: Store, parent_id: str, status: str) -> None:
    """Close a sweep's run as `ok`, `failed` or `killed`."""
    _end(store, parent_id, status)


def end_children(store: Store, parent_id: str, status: str) -> None:
    """Close those runs of a sweep that are still open, as `failed` or `killed`."""
    client = mlflow.MlflowClient(tracking_uri=store.uri)
    for record in load_children(store, parent_id):
        if record.tags.get("status") == "running":
            client.set_tag(record.run_id, "reason", "the sweep ended, and its process with it")
            _end(store, record.run_id, status)


def _end(store: Store, run_id: str, status: str) -> None:
    client = mlflow.MlflowClient(tracking_uri=store.uri)
    client.set_tag(run_id, "status", status)
    final = {"ok": RunStatus.FINISHED, "failed": RunStatus.FAILED, "killed": RunStatus.KILLED}
    client.set_terminated(run_id, RunStatus.to_string(final[status]))


@dataclass(frozen=True)
class Record:
    """One run as MLflow has it; its artifacts lie at `artifact_uri`."""

    run_id: str
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]
    artifact_uri: str = ""

    @property
    def is_analysis(self) -> bool:
        """Whether it is no comparison with a baseline, but an analysis such as sensitivity."""
        return self.params.get("analysis.name", "null") != "null"


def load_run(store: Store, run_id: str) -> Record:
    """Read one run back."""
    return _record(mlflow.MlflowClient(tracking_uri=store.uri).get_run(run_id))


def load_children(store: Store, parent_id: str) -> list[Record]:
    """Read the runs of a sweep back, in the order of its jobs, however they were started."""
    client = mlflow.MlflowClient(tracking_uri=store.uri)
    records, token = [], None
    while True:
        page = client.search_runs(
            [store.experiment_id],
            f"tags.`mlflow.parentRunId` = '{parent_id}'",
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
        records += [_record(run) for run in page]
        token = page.token
        if not token:  # sorting keeps runs without a number in the order they were started
            return sorted(records, key=lambda record: int(record.tags.get("job_number", 0)))


def load_compared(store: Store, parent_id: str) -> list[Record]:
    """Read a sweep's runs back without analyses: those have no accuracy to compare."""
    return [record for record in load_children(store, parent_id) if not record.is_analysis]


def find_parent(store: Store) -> Record | None:
    """Return the newest sweep of the experiment; None where there is none."""
    client = mlflow.MlflowClient(tracking_uri=store.uri)
    order = ["attributes.start_time DESC"]
    found = client.search_runs([store.experiment_id], "tags.kind = 'sweep'", order_by=order)
    return _record(found[0]) if found else None


@contextmanager
def artifact(store: Store, record: Record, name: str) -> Iterator[Path]:
    """Yield a copy of one of a run's files; it is gone after the block.

    Raises:
        TrackingError: the run has no such file, or its folder has moved.
    """
    uri = f"{record.artifact_uri}/{name}"  # by the run's id MLflow would read the run again
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = mlflow.artifacts.download_artifacts(
                artifact_uri=uri, dst_path=folder, tracking_uri=store.uri
            )
        except (MlflowException, OSError) as error:
            raise TrackingError(f"run {record.run_id}: no artifact {name} ({error})") from error
        yield Path(path)


def log_files(store: Store, run_id: str, paths: list[Path]) -> None:
    """Add files to a run, replacing those of the same name."""
    client = mlflow.MlflowClient(tracking_uri=store.uri)
    for path in paths:
        client.log_artifact(run_id, str(path))


def _record(run: Any) -> Record:
    info, data = run.info, run.data
    figures = dict(data.params), dict(data.metrics), dict(data.tags)
    return Record(info.run_id, *figures, artifact_uri=info.artifact_uri)
