"""Finds and reads a run or a sweep by id, folder or tags, or the newest one.

Reading a sweep by its folder needs the store only if it may have taken over runs of other folders.
"""

import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.text import no_such_name, printable, redact
from resnet8ptq.report import loading, logged_limits, terminal
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.report.selection import load_selections, select
from resnet8ptq.results.summaries import SweepSummary, assess_runs, summarize_sweep
from resnet8ptq.tracking import history, origin
from resnet8ptq.tracking.journal import FILE, Journal
from resnet8ptq.tracking.mlflow_store import local, sync
from resnet8ptq.tracking.mlflow_store.local import NewestRun
from resnet8ptq.tracking.mlflow_store.store import Store, find_store, open_store
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.sweep_file import SharedSweep

_NO_STORE = Store("", "", "")  # for records whose files lie in their own folders
# The settings of the command line that name a sweep or a run
SWEEP = "sweep"
RUN = "run_id"
_WORD = re.compile(r"[\w.:/@ -]+")  # texts of a query, without quotes

Asked = Mapping[str, float | None]  # limits by key of `report`; None for the logged limit


@dataclass(frozen=True)
class Runs:
    """The runs of a sweep, of which one may be requested, or a single run.

    Attributes:
        parent: the sweep's parent run; None for a single run.
        records: the runs to assess together, without analyses.
        run: the requested run; None if the whole sweep is requested.
    """

    store: Store
    parent: RunRecord | None
    records: Sequence[RunRecord]
    run: RunRecord | None = None

    def includes(self, run: RunRecord) -> bool:
        """Return whether a run is among `records`; a newer run of its job may have replaced it."""
        return any(record.run_id == run.run_id for record in self.records)

    def select(self, asked: Asked) -> list[ModelSelection]:
        """Assess the runs as in the report, by the requested limits, or else the logged ones.

        Raises:
            ConfigError: a limit is unknown, not a number or out of range, or a logged preference is
                unknown.
            TrackingError: the runs have logged invalid limits, or an invalid task.
        """
        unknown = asked.keys() - {*logged_limits.LIMITS}
        if unknown:
            raise ConfigError(no_such_name("limits", min(unknown), logged_limits.LIMITS))
        limits = logged_limits.limits_of(self.records, asked)
        if self.parent is not None:
            return load_selections(self.store, self.parent, self.records, limits)
        return select(loading.load_families(self.store, self.records), limits)

    def assess_run(self, asked: Asked) -> RunRecord:
        """Return the requested run, assessed among the runs of its sweep.

        Raises:
            ConfigError: the run is an analysis, or see `select`.
            TrackingError: the store does not list the run's files, or see `select`.
        """
        assert self.run is not None
        # Look up only this run's file, because each takes a request to a server
        artifacts = {self.run.run_id: _find_artifact(self.store, self.run)}
        for selected in self.select(asked):
            for assessed in assess_runs(selected, artifacts):
                if assessed.run_id == self.run.run_id:
                    return assessed
        raise ConfigError(
            f"run_id: run {self.run.run_id} is an analysis, expected a run that quantized a network"
        )

    def assess_sweep(self, asked: Asked) -> SweepSummary:
        """Return the sweep with its runs, verdicts and recommendations.

        Raises:
            ConfigError: see `select`.
            TrackingError: the store does not list the files of a run, or see `select`.
        """
        assert self.parent is not None
        selections = self.select(asked)
        artifacts = {r.run_id: _find_artifact(self.store, r) for r in self.records}
        report = _find_file(self.store, self.parent, {terminal.REPORT})
        return summarize_sweep(self.parent, selections, artifacts, report)


def load_sweep(
    run_id: str | None = None,
    *,
    folder: str | Path | None = None,
    tags: Mapping[str, str] | None = None,
    limits: Asked | None = None,
    tracking: TrackingConfig | None = None,
) -> SweepSummary:
    """Return a sweep with its runs, verdicts and recommendations.

        load_sweep()  # the newest of the store
        load_sweep("0123...", limits={"max_drop": 0.02})
        load_sweep(folder="runs/sweeps/2026-01-31/12-00-00-123456")
        load_sweep(tags={"release": "1.2"})  # the newest with these tags

    Args:
        run_id: the id of the sweep's parent run; by default the newest sweep.
        folder: the folder of the sweep, instead of its id.
        tags: tags of the sweep, instead of its id; the newest sweep with all of them is returned.
        limits: `max_drop`, `min_sqnr_db` and `min_accuracy`; by default as the runs logged them.
        tracking: the store; by default `MLFLOW_TRACKING_URI`, or `mlruns` in the current folder.

    Raises:
        ConfigError: the sweep does not exist or has no runs, or an argument is wrong.
        TrackingError: the store cannot be read, a record is damaged, or the store no longer has a
            run that the sweep has taken over.
    """
    source = _find(SWEEP, run_id, folder, tags=tags, tracking=tracking or TrackingConfig())
    return source.assess_sweep(limits or {})


def load_run(
    run_id: str | None = None,
    *,
    folder: str | Path | None = None,
    tags: Mapping[str, str] | None = None,
    limits: Asked | None = None,
    tracking: TrackingConfig | None = None,
) -> RunRecord:
    """Return a run, assessed among the runs of its sweep; by default the newest run.

        load_run("0123...").verdict
        load_run(folder="runs/2026-01-31/12-00-00-123456_onnx-int8-minmax")

    Arguments and errors are those of `load_sweep`, for a run in place of the sweep. An analysis has
    no verdict and raises `ConfigError`.
    """
    source = _find(RUN, run_id, folder, tags=tags, tracking=tracking or TrackingConfig())
    return source.assess_run(limits or {})


def find_newest(tracking: TrackingConfig) -> Runs:
    """Return the newest sweep or single run of the experiment.

    It is read from its folder if possible, because this is faster, see `_read_newest`.

    Raises:
        ConfigError, TrackingError: see `find_in_store`.
    """
    store = find_store(tracking)
    newest = None if store is None else local.find_newest(store)
    if newest is not None:
        with suppress(ConfigError, TrackingError):  # the folder is damaged, and MLflow has the run
            in_folder = _read_newest(newest, tracking)
            if in_folder is not None:
                return in_folder
    return find_in_store(open_store(tracking), run_id=None, sweep=None)


def _read_newest(newest: NewestRun, tracking: TrackingConfig) -> Runs | None:
    """Return the runs of the newest run's folder; None if the store must be read.

    The store must be read if the folder was not made here, or its runs differ from those of the
    store. The same holds if the run is an analysis or still running, or if the sweep may have taken
    over runs of other folders.

    Raises:
        ConfigError: the folder lacks a file, or all runs of the sweep are analyses.
        TrackingError: a file of the folder is damaged.
    """
    folder = origin.find_own(newest.folder, newest.key)
    if folder is None:
        return None
    record = RunRecord.of_journal(Journal.load(folder), folder)
    if record.is_analysis or not record.ended:
        return None
    if record.kind == SWEEP and SharedSweep.load(folder).resume:
        return None  # the sweep may have runs of other folders
    keys = {record.key, *(job.key for job in sync.load_records(folder))}
    if keys != newest.ids.keys():
        return None
    return _with_ids(read_folder(folder, tracking), newest.ids)


def _with_ids(runs: Runs, ids: Mapping[str, str]) -> Runs:
    """Return runs of a folder with MLflow's ids, which `ids` has by the keys of the journals."""

    def name(record: RunRecord | None) -> RunRecord | None:
        return None if record is None else record.changed(run_id=ids[record.key])

    records = [record.changed(run_id=ids[record.key]) for record in runs.records]
    return replace(runs, parent=name(runs.parent), records=records, run=name(runs.run))


def find_in_store(store: Store, run_id: str | None, sweep: str | None) -> Runs:
    """Return a run or a sweep by its id; without an id, the newest sweep or single run.

    Raises:
        ConfigError: the run or sweep does not exist or was deleted, the id is of the other kind, or
            the sweep has no runs.
        TrackingError: the store cannot be read, a record is damaged, or the store lacks the sweep
            of the run, or a run that the sweep has taken over.
    """
    if run_id is not None:
        return _load_run(store, history.load_named(store, RUN, run_id))
    if sweep is not None:
        return _load_sweep(store, history.load_named(store, SWEEP, sweep))
    newest = history.require_newest(store)
    if newest.kind == SWEEP:
        return _load_sweep(store, newest)
    return _load_run(store, newest)


def read_folder(folder: Path, tracking: TrackingConfig) -> Runs:
    """Return the run or the sweep of a folder.

    Raises:
        ConfigError: the folder has no journal, or is of a sweep without runs; or its run or sweep
            must be read from the store, which lacks it.
        TrackingError: a file of the folder is damaged, or the store cannot be read, or lacks a run
            that the sweep has taken over.
    """
    folder = folder.resolve()
    if _is_sweep(folder):
        return _read_sweep(folder, tracking)
    return _read_run(folder, tracking)


def _find(
    kind: str,
    run_id: str | None,
    folder: str | Path | None,
    tags: Mapping[str, str] | None,
    tracking: TrackingConfig,
) -> Runs:
    """Return a sweep or a run, see `load_sweep` for the arguments.

    Args:
        kind: `SWEEP` or `RUN`.
    """
    named = [value for value in (run_id, folder, tags) if value is not None]
    if len(named) > 1:
        raise ConfigError("run_id: got more than one of run_id, folder and tags, expected one")
    if folder is not None:
        path = Path(folder).resolve()
        if kind == SWEEP:
            return _read_sweep(path, tracking)
        return _read_run(path, tracking)

    # Read from the store, by id or the newest
    store = open_store(tracking)
    if run_id is None:
        record = _find_newest(store, kind, tags or {})
    else:
        record = history.load_named(store, kind, run_id)
    if kind == SWEEP:
        return _load_sweep(store, record)
    return _load_run(store, record)


def _find_newest(store: Store, kind: str, tags: Mapping[str, str]) -> RunRecord:
    if kind == SWEEP:
        newest = history.find_parent(store, _filter({"kind": SWEEP, **tags}))
    else:
        runs = history.find_runs(store, _filter(tags))
        newest = _first_model(runs)
    if newest is not None:
        return history.complete(store, newest)

    # Name in the message what was searched, and where else to look
    named = kind.removesuffix("_id")
    other = ""
    if tags:
        shown = ", ".join(f"{key}={value}" for key, value in tags.items())
        named += f" with {shown}"
    else:
        other = _name_other(store, kind)
    raise ConfigError(
        f"{kind}: experiment {store.experiment_name!r} has no {named}; try run_id=ID, "
        f"folder=PATH or experiment=NAME{other}"
    )


def _first_model(runs: Sequence[RunRecord]) -> RunRecord | None:
    """Return the first run that is neither a sweep nor an analysis; None without one."""
    for run in runs:
        if run.kind != SWEEP and not run.is_analysis:
            return run
    return None


def _name_other(store: Store, kind: str) -> str:
    """Return the end of the message on a missing sweep: the newest run; empty without one."""
    if kind != SWEEP:
        return ""
    newest = history.find_newest(store)
    if newest is None:
        return ""
    return f"; its newest run is {newest.run_id}: load_run()"


def _load_sweep(store: Store, parent: RunRecord, run: RunRecord | None = None) -> Runs:
    if parent.kind != SWEEP:
        raise ConfigError(f"sweep: {parent.run_id} is a run; try run_id={parent.run_id}")
    records = history.load_compared(store, parent.run_id)
    if not records:
        raise ConfigError(f"sweep: {parent.run_id} has no runs, expected a sweep with runs")
    return Runs(store, parent, records, run)


def _load_run(store: Store, record: RunRecord) -> Runs:
    """Return a run with its sweep; alone unless a sweep includes it, see `Runs.includes`."""
    if record.kind == SWEEP:
        raise ConfigError(f"run_id: {record.run_id} is a sweep; try sweep={record.run_id}")
    if record.sweep_id:
        source = _load_sweep(store, history.load_run(store, record.sweep_id), record)
        if source.includes(record):
            return source
    return _alone(store, record)


def _alone(store: Store, record: RunRecord) -> Runs:
    records = [record]
    if record.is_analysis:  # an analysis has no result to compare
        records = []
    return Runs(store, parent=None, records=records, run=record)


def _read_sweep(folder: Path, tracking: TrackingConfig, run: RunRecord | None = None) -> Runs:
    """Read a sweep from its folder, or from the store if it may have taken over other runs."""
    if not _is_sweep(folder):
        raise ConfigError(f"folder: got {folder}, a run's folder, expected the folder of a sweep")
    kept = _read_journal(folder)

    # Only the store knows which runs of another sweep belong to a resumed one
    if SharedSweep.load(folder).resume:
        store = open_store(tracking)
        return _load_sweep(store, _find_logged(store, kept, folder), run)

    # The folder of any other sweep has all its runs
    records = []
    for record in sync.load_records(folder):
        if not record.is_analysis:
            records.append(_of_folder(record))
    if not records:
        raise ConfigError(f"folder: got {folder}, expected the folder of a sweep with runs")
    return Runs(_NO_STORE, parent=RunRecord.of_journal(kept, folder), records=records, run=run)


def _read_run(folder: Path, tracking: TrackingConfig) -> Runs:
    """Read a run by its folder, with its sweep if it has one.

    The sweep is read from the folder above. If that lacks the run, the run and its sweep are read
    from the store.
    """
    kept = _read_journal(folder)
    record = _of_folder(RunRecord.of_journal(kept, folder))
    if record.kind == SWEEP:
        raise ConfigError(f"folder: got {folder}, a sweep's folder, expected the folder of a run")
    if not record.sweep_id:
        return _alone(_NO_STORE, record)

    # A sweep's folder usually holds those of its runs, except for runs of another sweep
    above = folder.parent
    if (above / FILE).is_file() and Journal.load(above).run_id == record.sweep_id:
        source = _read_sweep(above, tracking, record)
        if source.includes(record):
            return source
    store = open_store(tracking)
    return _load_run(store, _find_logged(store, kept, folder))


def _of_folder(record: RunRecord) -> RunRecord:
    """Return the record of a folder, without its logged store unless the folder was made here."""
    if origin.own_folder(record):
        return record
    return record.changed(store_words=())


def _is_sweep(folder: Path) -> bool:
    return _read_journal(folder).tags.get("kind") == SWEEP


def _read_journal(folder: Path) -> Journal:
    if not (folder / FILE).is_file():
        raise ConfigError(f"folder: got {folder}, expected the folder of a run or a sweep ({FILE})")
    return Journal.load(folder)


def _find_logged(store: Store, kept: Journal, folder: Path) -> RunRecord:
    record = history.find_logged(store, kept.key)
    if record is None:
        raise ConfigError(
            f"folder: {folder} shares runs with another folder, and experiment "
            f"{store.experiment_name!r} does not have it; try experiment=, root= or uri="
        )
    return record


def _filter(tags: Mapping[str, str]) -> str:
    for text in (*tags, *tags.values()):
        if not _WORD.fullmatch(text):
            raise ConfigError(f"tags: got {text!r}, expected letters, digits, spaces and _.:/@-")
    return " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())


def _find_artifact(store: Store, record: RunRecord) -> str | None:
    """Return the path or address of a run's model file; None without a result or a file."""
    if record.status != "ok":
        return None
    # Each backend has other names for the file
    possible: set[str] = set()
    for backend in find_backends().values():
        possible.update(backend.model_files)
    return _find_file(store, record, possible)


def _find_file(store: Store, record: RunRecord, possible: Set[str]) -> str | None:
    """Return the path of a run's file in its folder, or else its path or address in the store.

    Returns None if neither has a file with one of the `possible` names.
    """
    # The folder of a run made here saves a request to the store
    own = origin.own_folder(record)
    if own is not None:
        for path in sorted(own.glob("*")):
            if path.name in possible:
                return printable(str(path))
    for name in history.list_artifacts(store, record):
        if name in possible:
            folder = history.locate(store, record)
            return printable(redact(f"{folder or record.artifact_uri}/{name}"))
    return None
