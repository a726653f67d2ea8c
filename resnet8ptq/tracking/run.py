"""Opens, logs and closes runs and sweeps, in their folders and in MLflow."""

import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import background, command, interrupts, machine
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.records import names_of
from resnet8ptq.core.text import escape_markdown, redact, show
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.tracking import details, journal, ledger, params
from resnet8ptq.tracking.journal import DataSet, Journal, Kind, LoggedModel
from resnet8ptq.tracking.mlflow_store import mlflow_model, sender, upload
from resnet8ptq.tracking.mlflow_store.store import Store, check_answers
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.sweep_file import is_sweep_folder

log = logging.getLogger(__name__)

_CLOSED_AS = {"ok": "FINISHED", "failed": "FAILED", "killed": "KILLED"}  # our status -> MLflow's


@dataclass
class Run:
    """An open run, to which an experiment logs; see `Recorder`."""

    store: Store
    journal: Journal
    folder: Path
    _opened: "Future[str] | None" = None  # the run's id in the store

    @property
    def run_id(self) -> str:
        """The run's id in the store; empty until the store has created the run, if it does."""
        opened = self._opened
        if opened is None or not opened.done() or opened.exception() is not None:
            return ""
        return opened.result()

    def wait_for_id(self) -> None:
        """Wait until the store has answered; the store's errors are reported at the end."""
        if self._opened is not None:
            futures.wait([self._opened])

    @property
    def record(self) -> RunRecord:
        """The run's record so far."""
        return RunRecord.of_journal(self.journal, self.folder, self.run_id)

    def log_config(self, config: RunConfig) -> None:
        """Log the config, unless it was logged before; `params` selects what MLflow shows."""
        if "backend" in self.journal.params:  # MLflow refuses to change a param
            return
        flat = dict(params.flatten(asdict(config)))
        for group in params.GROUPS:
            flat[group] = flat.get(f"{group}.name", "")
        flat["threads"] = str(machine.threads(config.threads))
        self.log_params(flat)

    def log_params(self, resolved: Mapping[str, str]) -> None:
        """Log params that the run determines, in addition to the config."""
        added = self._add_params(resolved)
        if added:
            self._send(upload.log_batch, (), added)

    def _add_params(self, resolved: Mapping[str, str]) -> dict[str, str]:
        """Add params to the journal; return those that MLflow shows and does not have yet."""
        before: dict[str, str] = {}
        if self.journal.params:
            before = params.select(self.journal)
        self.journal.params |= resolved
        now = params.select(self.journal)
        return {key: value for key, value in now.items() if key not in before}

    def log_datasets(
        self, data: Dataset, calibration: CalibrationSet, class_names: Sequence[str] = ()
    ) -> None:
        """Log a description of the calibration and the scored samples, and the class names."""
        drawn = calibration.split
        test = data.test
        self.journal.datasets = [
            _describe(
                f"{data.name}-calibration",
                split=drawn,
                digest=calibration.digest,
                context="calibration",
            ),
            _describe(f"{data.name}-test", split=test, digest=test.digest, context="test"),
        ]
        described = {"dataset": data.name, "calibration_samples": str(len(drawn))}
        tags = {"calibration_digest": calibration.digest, "test_digest": test.digest}
        tags["sample_sketch"] = ledger.sketch(test.sample_ids)
        if class_names:
            tags["class_names"] = json.dumps(class_names)

        # Keep everything in the journal, then send it
        added = self._add_params(described)
        self.journal.tags |= tags
        self._send(upload.log_datasets, self.journal.datasets)
        self._send(upload.log_batch, (), added, tags)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log points of curves, such as a loss, at `step`."""
        self._send(upload.log_batch, self.journal.note(metrics, step))

    def log_model(
        self, path: Path, outputs: Mapping[str, Sequence[int]], engine: str | None = None
    ) -> None:
        """Log a file of the run's folder also as an MLflow model; see `Recorder`."""
        shapes = {name: list(shape) for name, shape in outputs.items()}
        self.journal.model = LoggedModel(path.name, shapes, engine)
        self._send(mlflow_model.log_model, self.journal, path.parent)

    def log_result(self, result: RunResult) -> None:
        """Log the metrics and the resolved settings, and write `result.json` if the run is `ok`.

        MLflow gets the status when the run ends.
        """
        self.journal.note(result.to_metrics())
        added = self._add_params(result.resolved)
        self.journal.tags["status"] = result.status
        if result.reason:
            self.journal.tags["reason"] = result.reason
        note = {journal.NOTE_TAG: escape_markdown(result.summary())}
        self.journal.tags |= note
        if result.status == "ok":
            details.write_result(self.folder, self.journal)
        self._send(upload.log_result, self.journal, added, note)

    def _send(self, call: Callable[..., object], *arguments: Any) -> None:
        background.put(sender.send, self.store, self.folder, call, *arguments)

    def open(self) -> None:
        """Write the journal to the run's folder, and begin to create the run in the store."""
        self.journal.save(self.folder)
        self._opened = background.put(sender.open_run, self.store, self.journal, self.folder)

    def upload_folder(self) -> None:
        """Log the files of the run's folder as artifacts, see `upload.log_folder`."""
        self._send(upload.log_folder, self.folder)

    def fail(self, error: Exception) -> None:
        """Record the reason in one line and the exit code, and write `traceback.txt`."""
        reason = redact(" ".join(str(error).split())) or type(error).__name__
        note = f"**failed**: {escape_markdown(reason[:4000])}"
        self.journal.tags |= {"status": "failed", "reason": reason[:4000], journal.NOTE_TAG: note}
        self.journal.tags[journal.EXIT_CODE_TAG] = str(command.exit_code(error))
        text = show(redact("".join(traceback.format_exception(error))))
        (self.folder / "traceback.txt").write_text(text, encoding="utf-8")

    def close(self, status: str) -> None:
        """Close the run in its folder and then in the store, with a status of `journal.ENDED`."""
        self.journal.run_id = self.run_id or None
        self.journal.end(status)
        _try_to_save(self.journal, self.folder)
        background.put(sender.close_run, self.store, self.journal, self.folder)


def _describe(name: str, split: Split, digest: str, context: str) -> DataSet:
    samples = split.stored
    labels = split.labels
    targets: Kind | None = None  # MLflow has no type for boxes, nor for texts of any length
    if labels is not None and labels.dtype.kind in "biuf":
        targets = (str(labels.dtype), list(labels.shape))
    return DataSet(
        name=name,
        source=str(split.source),
        digest=digest,
        context=context,
        samples=_describe_inputs(samples.dtype, samples.shape),
        targets=targets,
    )


def _describe_inputs(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Kind | dict[str, Kind]:
    """Return dtype and shape of samples; for structured samples, those of each input by name."""
    names = names_of(dtype)
    if not names:
        return str(dtype), list(shape)
    kinds: dict[str, Kind] = {}
    for name in names:
        own = dtype[name]
        kinds[name] = (str(own.base), [*shape, *own.shape])
    return kinds


@contextmanager
def start_run(
    store: Store,
    name: str,
    folder: Path,
    parent_id: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """Open a run for the block, and close it as finished, failed or killed.

    Args:
        folder: the run's own folder; its files are uploaded when the run closes, unless it was
            killed.
        parent_id: the id of the sweep's parent run; None for a single run.
        tags: tags in addition to those of every run.

    Raises:
        TrackingError: another run works in the folder.
    """
    held = journal.lock(folder)
    try:
        kept = _start_journal(store, name, parent_id, tags={"folder": str(folder), **(tags or {})})
        run = Run(store, kept, folder)
        ended = "FAILED"  # until the block has ended without an error
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
        except BaseException:  # Ctrl-C or SIGTERM
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
    # MLflow adds other tags, such as the user and the git commit, when it creates the run.
    every = {"status": "running", "mlflow.source.name": sys.argv[0]}
    every |= machine.describe()
    if parent_id:
        every[journal.PARENT_TAG] = parent_id
    every |= tags
    return Journal(name, store.experiment_name, parent_id, tags=every)


def start_parent(store: Store, name: str, folder: Path, tags: Mapping[str, str]) -> str:
    """Create a sweep's parent run in the store and in its folder; return its id."""
    kept = _start_journal(
        store, name, parent_id=None, tags={**tags, "kind": "sweep", "folder": str(folder)}
    )
    kept.run_id = upload.create_run(store, kept)
    kept.save(folder)
    return kept.run_id


@interrupts.deferred()
def restart_parent(store: Store, earlier: RunRecord, folder: Path) -> str:
    """Reopen a sweep's parent run, to continue the sweep in `folder`; return its id.

    The earlier record is removed last. If this process is killed before then, the folder named in
    the store still has a record, and `sync` uses the newer of the two.
    """
    before = Path(earlier.folder)
    kept = _load_parent(store, earlier, before)
    kept.status = "RUNNING"
    kept.end_ms = None
    kept.tags |= {"status": "running", "folder": str(folder)}
    kept.save(folder)
    upload.log_batch(store, earlier.run_id, tags=kept.tags)
    store.client.update_run(earlier.run_id, "RUNNING")
    if before != folder and is_sweep_folder(before, earlier.run_id):
        (before / journal.FILE).unlink(missing_ok=True)  # a sweep has one record
    return earlier.run_id


def _load_parent(store: Store, earlier: RunRecord, folder: Path) -> Journal:
    """Read a sweep's journal; if it is missing, damaged or another's, restore it from the store."""
    key = earlier.key
    try:
        kept = Journal.load(folder)
        if kept.key == key:
            return kept
        log.warning(
            "%s: holds another run's record; the sweep's is restored from the tracking store",
            folder,
        )
    except TrackingError as error:
        log.warning("%s; it is restored from the tracking store", error)

    # Restore the journal, with the start that MLflow has
    name = earlier.name or "sweep"
    tags = dict(earlier.tags)
    start_ms = store.client.get_run(earlier.run_id).info.start_time
    return Journal(
        name,
        experiment=store.experiment_name,
        parent_id=None,
        run_id=earlier.run_id,
        key=key,
        start_ms=start_ms,
        tags=tags,
    )


def _try_to_save(kept: Journal, folder: Path) -> None:
    try:
        kept.save(folder)
    # The disk is full or the folder gone, but the store may still accept the record
    except OSError as error:
        log.error("the run's own record could not be written: %s", error)


def replace_runs(store: Store, earlier: Sequence[RunRecord], run: Run) -> None:
    """Delete a job's earlier unfinished runs from the store, because `run` replaces them."""
    if earlier:
        background.wait_until_idle()  # so that the run has an id
        again = [record.run_id for record in earlier]
        background.put(upload.replace_runs, store, again, run.run_id)


def end_parent(store: Store, parent_id: str, status: str, folder: Path) -> None:
    """Close a sweep's run as `ok`, `failed` or `killed`, in its folder and in the store.

    Raises:
        TrackingError: the folder's journal is missing or damaged, or the store cannot be used.
    """
    kept = Journal.load(folder)
    kept.end(_CLOSED_AS[status], {"status": status})
    _try_to_save(kept, folder)
    check_answers(store.uri)
    upload.finish(store, parent_id, kept)
