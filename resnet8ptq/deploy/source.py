"""Finds the run to deploy, and copies its files.

The run is named by its id, recommended by a sweep, or the newest one.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.config.loading import CONFIG_FILE, find_paths, load_config, without_paths
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import files, isolation
from resnet8ptq.core.descriptor import Backend
from resnet8ptq.core.errors import ConfigError, QuantizationError, TrackingError, errors_as
from resnet8ptq.core.registry import look_up
from resnet8ptq.core.text import one_line, printable
from resnet8ptq.experiment.outputs import TOKENIZER
from resnet8ptq.report.families import Cell
from resnet8ptq.report.recommend import RECOMMENDED, Recommendation, find_use
from resnet8ptq.report.verdicts import PASS
from resnet8ptq.results import lookup
from resnet8ptq.results.lookup import Asked
from resnet8ptq.tracking import history, origin
from resnet8ptq.tracking.mlflow_store.mlflow_model import EXAMPLE
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord

# Suffixes of files that can run code when they are loaded.
RUN_CODE: set[str] = set()
for _backend in BACKENDS.values():
    if _backend.runs_code:
        RUN_CODE.update(_backend.suffixes)
T = TypeVar("T")
_COPIED = (EXAMPLE, "predictions.npz", "detections.json", TOKENIZER)


@dataclass(frozen=True)
class SourceRun:
    """A finished run with an artifact, and its files copied into a folder."""

    record: RunRecord
    config: RunConfig
    artifact: Path  # in a folder with `config.yaml` and the files of `_COPIED` that the run has
    use: str = ""  # the recommended use; empty for a run by its id
    trusted: bool = False  # whether the run's code may run in this process
    unread: str = ""  # the reason if the run's data must not be read

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Call a function that loads the artifact, in a separate process unless the run is trusted.

        Files that may hold code, such as torch's, are always loaded in a separate process.

        Raises:
            QuantizationError: the artifact does not run in that process, or ends it.
        """
        if self.trusted and self.artifact.suffix not in RUN_CODE:
            return function(*args)
        name = f"run {self.record.run_id}: {self.artifact.name}"
        crashed = QuantizationError(f"{name} ended the process that ran it")
        with errors_as(QuantizationError, f"{name} cannot be run"):
            return isolation.call(function, *args, crashed=crashed)

    @property
    def backend(self) -> Backend:
        """The backend that wrote the artifact."""
        return self.config.backend.descriptor

    @property
    def cautions(self) -> list[str]:
        """Warnings for the user: a verdict on the loss other than pass."""
        text = self.record.verdict_text
        if self.record.verdict == PASS or not text:
            return []
        return [f"CAUTION: verdict on its loss: {text}, not pass"]

    @property
    def folder(self) -> Path:
        """The folder of the copied files."""
        return self.artifact.parent


def find_run(
    store: Store, run_id: str | None, sweep: str | None, use: str, asked: Asked
) -> tuple[RunRecord, str]:
    """Return the run to deploy, with its verdict, and the use for which a sweep recommends it.

    The use is empty for a run by its id, and for a single run.

    Args:
        run_id: the id of the run; None for a sweep's recommendation or the newest single run.
        sweep: the id of a sweep's parent run; None for the newest sweep or single run.
        use: see `Recommendation.use`.
        asked: requested limits by key of `report`; a limit of None is as logged.

    Raises:
        ConfigError: the sweep does not recommend exactly one run for the use, or a use is named for
            the newest run, which has no sweep.
        TrackingError: nothing is recommended, and the predictions of a run cannot be read.
        PtqError: see `lookup.find_in_store` and `lookup.Runs.select`.
    """
    runs = lookup.find_in_store(store, run_id, sweep)
    if runs.run is not None:
        if use != RECOMMENDED and run_id is None:
            raise ConfigError(
                f"use: got {use!r}, but the newest is a single run, {runs.run.run_id}; try "
                "without use=, or sweep=ID"
            )
        return _assess(runs.run, runs, asked), ""

    # Find the recommendation of a sweep
    assert runs.parent is not None
    parent = runs.parent
    recommended: list[Recommendation] = []
    lost: list[Cell] = []
    for selected in runs.select(asked):
        recommended += selected.recommendations
        lost += [cell for cell in selected.family.cells if cell.lost]
    if lost and not recommended:
        raise TrackingError(f"sweep {parent.run_id}: {printable(lost[0].record.reason)}")

    # A sweep with a broken FP32 network has no advice
    nothing = "none passes; try run_id= of one of its runs"
    for record in runs.records:
        if record.doubt:
            nothing = f"void: {printable(record.doubt)}"
            break
    record, _ = find_use(use, recommended, parent.run_id, nothing=nothing)
    return record, use


def _assess(run: RunRecord, runs: lookup.Runs, asked: Asked) -> RunRecord:
    """Return a run with its verdict; if it is recommended, with that of the recommendation."""
    try:
        selections = runs.select(asked)
    except TrackingError as error:  # a run of the sweep has damaged texts
        return run.changed(verdict_text=f"not judged ({one_line(error)})")
    for selected in selections:
        recommended = [model.choice for model in selected.recommendations if model.choice]
        for cell in (*recommended, *selected.family.cells):
            if cell.record.run_id != run.run_id:
                continue
            if cell.lost:
                return run.changed(verdict_text=f"not judged ({cell.record.reason})")
            return cell.record
    return run


def fetch_run(
    store: Store,
    record: RunRecord,
    folder: Path,
    use: str = "",
    trust: bool = False,
) -> SourceRun:
    """Copy a run's artifact and its files into `folder`.

    Args:
        use: the use for which the run is recommended; empty without one.
        trust: whether to run the code of a run that was not made here, and to read its paths.

    Raises:
        ConfigError: the run has no result, is void, has an unknown backend, scored another
            program's file, or would run untrusted code; or `load_config` refuses its config.
        TrackingError: the run has no artifact, the artifact is not the measured file, the config
            has another backend, or the store does not give the files.
    """
    if record.status != "ok":
        raise ConfigError(
            f"run_id: run {record.run_id} is {record.status}; expected one that is ok"
        )
    if record.doubt:
        raise ConfigError(f"run_id: run {record.run_id} is void: {printable(record.doubt)}")
    backend = look_up("backend.name", record.backend, BACKENDS)
    if not backend.quantizes:
        raise ConfigError(
            f"run_id: run {record.run_id} scored a file of another program; "
            "expected a run that quantized a network"
        )

    # Copy the run's files
    names = history.list_artifacts(store, record)
    models = [name for name in backend.model_files if name in names]
    if len(models) != 1 or CONFIG_FILE not in names:
        raise TrackingError(
            f"run {record.run_id}: has no artifact to deploy; expected a run that quantized a "
            "network"
        )
    copied = [models[0], CONFIG_FILE]
    copied += [name for name in _COPIED if name in names]
    for name in copied:
        with history.artifact(store, record, name) as path:
            shutil.copyfile(path, folder / name)
    artifact = folder / models[0]
    digest = files.sha256(artifact)
    if digest != record.artifact_sha256:
        raise TrackingError(
            f"run {record.run_id}: {models[0]} is not the file that was measured (its SHA-256 is "
            f"{digest}, the run has logged {record.artifact_sha256})"
        )

    # Without trust, no code of the run may run, and no path of it is read
    trusted = trust or origin.made_here(record, [artifact, folder / CONFIG_FILE])
    if artifact.suffix in RUN_CODE and not trusted:
        raise ConfigError(
            f"run_id: run {record.run_id} has {models[0]}, which can run code when it is loaded, "
            f"and was not made below {origin.RUNS.absolute()}; expected a run that was made there; "
            "if you trust its author, add trust=true"
        )
    config = load_config(folder / CONFIG_FILE, trusted)
    if config.backend.name != backend.name:  # the backend decides how the file is loaded
        raise TrackingError(
            f"run {record.run_id}: {CONFIG_FILE} has backend={config.backend.name}, the run has "
            f"logged {backend.name}"
        )
    if trusted:
        return SourceRun(record, config, artifact, use=use, trusted=trusted)
    unread = _forbid_data(record, config)
    return SourceRun(
        record, config=without_paths(config), artifact=artifact, use=use, unread=unread
    )


def _forbid_data(record: RunRecord, config: RunConfig) -> str:
    """Return why the data of another user's run must not be read; empty if they may.

    Such a run's config may name private files of this user, and the deployed folder is passed on to
    others. Data without a path in the config are public, or named by this user's environment.
    """
    paths = find_paths(config)
    if paths:
        named = ", ".join(f"{key}={printable(path)}" for key, path in paths.items())
        return f"another user's run names {named}; trust=true reads them"
    if not record.samples_digest:
        return "another user's run names no digest of its samples"
    return ""
