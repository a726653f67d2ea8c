"""The open run: everything goes to its journal, and to MLflow as long as the store is there."""

import json
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlflow.data
import mlflow.data.numpy_dataset
import numpy as np
from mlflow.tracking.context.registry import resolve_tags

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import interrupts, machine
from resnet8ptq.core.text import one_line, redact
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.tracking import journal, serving, upload
from resnet8ptq.tracking.history import Record
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.store import Store, is_away

log = logging.getLogger(__name__)

_CLOSED_AS = {"ok": "FINISHED", "failed": "FAILED", "killed": "KILLED"}  # ours -> MLflow's


@dataclass
class Run:
    """An open run."""

    store: Store
    journal: Journal
    folder: Path
    _composed: Mapping[str, Any] = field(default_factory=dict)  # logged if nothing better comes
    _away: bool = False  # the store

    @property
    def run_id(self) -> str:
        """The run's id in the store; empty where the store has not been reached."""
        return self.journal.run_id or ""

    @property
    def record(self) -> Record:
        """What is known of the run so far."""
        kept = self.journal
        found = kept.params, kept.metrics, kept.tags
        return Record(self.run_id or kept.key, *found, self.folder.as_uri())

    def log_config(self, config: RunConfig) -> None:
        """Log `backend`, `dtype`, `calib`, `per_channel`, and the whole config as flat params."""
        self._log_settings(asdict(config))

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        if "backend" in self.journal.params:  # MLflow does not change what is logged
            return
        flat = dict(_flatten(settings))
        for group in ("backend", "dtype", "calib", "model", "data", "preprocess"):
            flat[group] = flat.get(f"{group}.name", "")
        flat["threads"] = str(machine.threads(settings.get("threads")))
        self.log_params(flat)

    def log_params(self, params: Mapping[str, str]) -> None:
        """Log what the run has determined, besides the config."""
        self.journal.params |= params
        self._send(upload.log_batch, params=params)

    def log_datasets(
        self, data: Dataset, calibration: CalibrationSet, class_names: Sequence[str] = ()
    ) -> None:
        """Log which images calibrated and which tested, with digests, and names of classes."""
        drawn, test = calibration.split, data.test
        self.journal.datasets = [
            _describe(f"{data.name}-calibration", drawn, calibration.digest, "calibration"),
            _describe(f"{data.name}-test", test, test.digest, "test"),
        ]
        params = {"dataset": data.name}
        tags = {"calibration_digest": calibration.digest, "test_digest": test.digest}
        if class_names:
            tags["class_names"] = json.dumps(class_names)
        self.journal.params |= params
        self.journal.tags |= tags
        self._send(upload.log_datasets, self.journal.datasets)
        self._send(upload.log_batch, params=params, tags=tags)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log points of curves, such as a loss, at `step`."""
        self._send(upload.log_batch, self.journal.note(metrics, step))

    def log_model(
        self, path: Path, outputs: Mapping[str, Sequence[int]], engine: str | None = None
    ) -> None:
        """Log a file of the run's folder as an MLflow model too; see `Recorder`."""
        shapes = {name: list(shape) for name, shape in outputs.items()}
        self.journal.model = {"file": path.name, "outputs": shapes, "engine": engine}
        self._send(serving.log_model, self.journal, path.parent)

    def log_result(self, result: RunResult) -> None:
        """Log metrics and what the settings came to; the status when the run ends."""
        points = self.journal.note(result.to_metrics())
        self.journal.params |= result.resolved
        self.journal.tags["status"] = result.status
        if result.reason:
            self.journal.tags["reason"] = result.reason
        self._send(upload.log_batch, points, result.resolved)

    def _send(self, call: Callable[..., object], *what: Any, **named: Any) -> None:
        """Call with the store, this run and `what`, unless it is away; find out that it is."""
        if self._away:
            return
        try:
            call(self.store, self.run_id, *what, **named)
        except Exception as error:  # MLflow's, SQLAlchemy's, requests', the disk's
            if not is_away(error):
                raise
            self._away = True
            shout = "TRACKING STORE UNAVAILABLE: the run is kept in %s (%s)"
            log.warning(shout, self.folder, one_line(error))

    def open(self) -> None:
        """Note the run in its folder, and make it in the store."""
        self.journal.save(self.folder)
        self._send(
            lambda *_: setattr(self.journal, "run_id", upload.create(self.store, self.journal))
        )

    def upload_folder(self) -> None:
        """Log the run's files as artifacts; Hydra's own hidden folder stays behind."""
        self._send(upload.log_files, upload.files_of(self.folder))

    def fail(self, error: BaseException) -> None:
        """Log what went wrong: the config as far as it was known, one line, the traceback."""
        reason = redact(" ".join(str(error).split())) or type(error).__name__
        self.journal.tags |= {"status": "failed", "reason": reason[:4000]}
        self._log_settings(self._composed)
        text = redact("".join(traceback.format_exception(error)))
        (self.folder / "traceback.txt").write_text(text, encoding="utf-8")

    def close(self, status: str) -> None:
        """Close the run in its folder and in the store, which may have come back meanwhile.

        Args:
            status: FINISHED, FAILED or KILLED.
        """
        self.journal.end(status)
        _try_to_save(self.journal, self.folder)
        if self._away and self.store.answers:
            self._away = False
            self._send(lambda store, _: upload.push(store, self.journal, self.folder))
        else:
            self._send(upload.finish, self.journal)


def _describe(name: str, split: Split, digest: str, context: str) -> dict[str, str]:
    """Return a data set as MLflow's fields, all of them text."""
    source = mlflow.data.sources.LocalArtifactDatasetSource(split.source)
    # MLflow looks at shape and type alone, so that one value stands for all: no sample is read.
    images = np.broadcast_to(np.zeros((), split.images.dtype), split.images.shape)
    # MLflow keeps at most 36 characters of a digest; the whole one is a tag of the run.
    targets = split.labels  # MLflow has no words for boxes
    if targets is not None and targets.dtype.kind == "V":
        targets = None
    described = mlflow.data.numpy_dataset.NumpyDataset(
        images, source=source, targets=targets, name=name, digest=digest[:36]
    )
    return {**described.to_dict(), "context": context}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" == "tracking.uri" and value:
            yield f"{prefix}{key}", redact(value)
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

    Raises:
        TrackingError: another run works in the folder.
    """
    held = journal.lock(folder)
    try:
        kept = _start_journal(store, name, parent_id, {"folder": str(folder), **(tags or {})})
        run = Run(store, kept, folder, config)
        ended = "FAILED"
        try:
            run.open()
            yield run
            run.upload_folder()
            ended = "FINISHED"
        except Exception as error:
            try:
                run.fail(error)
                run.upload_folder()
            except Exception as another:  # the first error is the one to report
                log.error("the failure could not be recorded: %s", redact(str(another)))
            raise
        except BaseException:  # Ctrl-C, SIGTERM
            ended = "KILLED"
            kept.tags["status"] = "killed"
            raise
        finally:
            run.close(ended)
    finally:
        held.release()


def _start_journal(
    store: Store, name: str, parent_id: str | None, tags: Mapping[str, str]
) -> Journal:
    parent = {journal.PARENT_TAG: parent_id} if parent_id else {}
    every = {"status": "running", **machine.describe(), **parent, **tags}
    return Journal(name, store.experiment_name, parent_id, tags=resolve_tags(every))


def start_parent(store: Store, name: str, folder: Path, tags: Mapping[str, str]) -> str:
    """Make the run that a sweep's runs stand under, noted in the sweep's folder; return its id."""
    kept = _start_journal(store, name, None, {**tags, "kind": "sweep", "folder": str(folder)})
    kept.run_id = upload.create(store, kept)
    kept.save(folder)
    return kept.run_id


@interrupts.deferred()
def restart_parent(store: Store, earlier: Record, folder: Path) -> str:
    """Open a sweep's run again, to go on with it in another folder; return its id."""
    before = Path(earlier.tags["folder"], journal.FILE)
    kept = Journal.load(before.parent)
    kept.status, kept.end_ms = "RUNNING", None
    kept.tags |= {"status": "running", "folder": str(folder)}
    kept.save(folder)
    before.unlink()  # a sweep has one record
    upload.log_batch(store, earlier.run_id, tags=kept.tags)
    store.client.update_run(earlier.run_id, "RUNNING")
    return earlier.run_id


def replace_runs(store: Store, earlier: Sequence[Record], run: Run) -> None:
    """Delete runs of a job that did not finish, now that it runs again as `run`.

    MLflow keeps deleted runs, and shows them on request; so does the folder of each.
    """
    for record in earlier:
        try:
            upload.log_batch(store, record.run_id, tags={"run_again_as": run.run_id})
            with interrupts.deferred():
                store.client.delete_run(record.run_id)
        except Exception as error:
            if not is_away(error):
                raise
            # Reports take a job's newest run. A server may let only its owner delete a run.
            log.warning("run %s stays beside %s: %s", record.run_id, run.run_id, one_line(error))


def end_record(status: str, folder: Path) -> Journal:
    """Close a sweep's record as `ok`, `failed` or `killed`, in its folder; return it."""
    kept = Journal.load(folder)
    kept.end(_CLOSED_AS[status], {"status": status})
    _try_to_save(kept, folder)
    return kept


def _try_to_save(kept: Journal, folder: Path) -> None:
    try:
        kept.save(folder)
    except OSError as error:  # the disk is full, or the folder gone: the store may take it
        log.error("the run's own record could not be written: %s", error)


def end_parent(store: Store, parent_id: str, status: str, folder: Path) -> None:
    """Close a sweep's run, in its folder and in the store."""
    upload.finish(store, parent_id, end_record(status, folder))
