"""Finds and reads runs in the store, and their files."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeVar

from resnet8ptq.core import interrupts, invocation
from resnet8ptq.core.console import say, stderr
from resnet8ptq.core.errors import ConfigError, TrackingError, errors_as
from resnet8ptq.core.text import one_line
from resnet8ptq.tracking import details, journal
from resnet8ptq.tracking.mlflow_store import artifacts
from resnet8ptq.tracking.mlflow_store.store import ID, Store, check_id, in_one_line
from resnet8ptq.tracking.record import RunRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

SWEEP = "sweep"  # the kind of a sweep's parent run
_AT_ONCE = 100  # ids in one query
_NO_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow's codes for a missing run
_ADOPTED = "job_"  # begins the tag, with a job's number, for the id of another sweep's run


def load_run(store: Store, run_id: str) -> RunRecord:
    """Return the run with this id, without the values that only `result.json` has.

    Raises:
        TrackingError: the store has no such run, or cannot be read.
    """
    return RunRecord.of_mlflow(store.client.get_run(run_id), store.words)


def complete(store: Store, record: RunRecord) -> RunRecord:
    """Return a run with all its settings and metrics, which `result.json` has.

    A sweep, a run that did not end as `ok`, and a record from a run's folder stay unchanged. If
    the file cannot be read, the reason is in `RunRecord.unread`.
    """
    if record.in_folder or record.kind == SWEEP or record.status != "ok":
        return record
    try:
        with artifact(store, record, details.FILE) as path:
            return details.add_result(record, path)
    except TrackingError as error:
        return record.changed(unread=str(error))


def load_named(store: Store, key: str, run_id: str) -> RunRecord:
    """Return the run whose id the setting `key` of a command holds.

    The id may also be the key of the run's journal, for a run that ended before the store gave it
    an id.

    Raises:
        ConfigError: the store has no such run, or the run with this id was deleted.
        TrackingError: the store cannot be read.
    """
    try:
        run = store.client.get_run(run_id)
    except TrackingError as error:
        if getattr(error.__cause__, "error_code", "") not in _NO_RUN:
            raise
        # The text may be the key of a journal
        logged = None
        if ID.fullmatch(run_id):
            logged = find_logged(store, run_id)
        if logged is None:
            raise ConfigError(
                f"{key}: got {run_id!r}, expected the id of a run in the store"
            ) from None
        return logged
    if run.info.lifecycle_stage == "deleted":
        raise ConfigError(f"{key}: run {run_id} was deleted; restore it in MLflow, or take another")
    return complete(store, RunRecord.of_mlflow(run, store.words))


def load_runs(store: Store, run_ids: Sequence[str]) -> dict[str, RunRecord]:
    """Return the experiment's runs by id, including deleted runs; other ids are left out."""
    runs: dict[str, RunRecord] = {}
    for start in range(0, len(run_ids), _AT_ONCE):
        part = map(check_id, run_ids[start : start + _AT_ONCE])
        listed = ", ".join(f"'{run_id}'" for run_id in part)
        for record in find_runs(store, f"attributes.run_id IN ({listed})", deleted=True):
            runs[record.run_id] = record
    return runs


def find_runs(
    store: Store,
    filters: str,
    newest_first: bool = True,
    most: int | None = None,
    deleted: bool = False,
) -> list[RunRecord]:
    """Return the experiment's runs that match a filter, sorted by their start.

    The records lack the values that only `result.json` has.

    Args:
        filters: in MLflow's syntax; empty for all runs.
        most: the largest number of runs; None for all.
        deleted: whether to include deleted runs.
    """
    from mlflow.entities import ViewType

    view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
    direction = "DESC" if newest_first else "ASC"
    words = store.words

    # Read page by page
    records: list[RunRecord] = []
    token = None
    while True:
        page = store.client.search_runs(
            [store.experiment_id],
            filter_string=filters,
            run_view_type=view,
            max_results=most or 1000,
            order_by=[f"attributes.start_time {direction}"],
            page_token=token,
        )
        records += [RunRecord.of_mlflow(run, words) for run in page]
        token = page.token
        if not token or (most is not None and len(records) >= most):
            return records


def find_logged(store: Store, key: str) -> RunRecord | None:
    """Return the run with the key of a journal, even if it was deleted; None without one."""
    runs = find_runs(store, f"tags.record = '{key}'", most=1, deleted=True)
    if not runs:
        return None
    return complete(store, runs[0])


def under(parent_id: str) -> str:
    """Return the filter for a sweep's own runs."""
    return f"tags.`{journal.PARENT_TAG}` = '{parent_id}'"


def load_children(store: Store, parent_id: str) -> list[RunRecord]:
    """Return the runs of a sweep, in the order of its jobs.

    For a repeated job, its newest finished run counts, or else its newest run. Start times alone
    do not decide, because a clock may have been set back. A job without a finished run in this
    sweep may have one from outside, see `adopt`. No run is returned twice.

    Raises:
        TrackingError: such a run from outside is not in the experiment, or the store cannot be
            read.
    """
    records = find_runs(store, under(parent_id), newest_first=False)
    records.sort(key=lambda record: record.finished)  # finished runs last: the last one counts
    jobs = {record.job_number or record.run_id: record for record in records}

    # Find jobs whose run is another sweep's
    adopted = {}
    for key, run_id in load_run(store, parent_id).tags.items():
        job = key.removeprefix(_ADOPTED)
        is_finished = job in jobs and jobs[job].finished
        if key.startswith(_ADOPTED) and not is_finished:
            adopted[job] = run_id
    elsewhere = load_runs(store, list(adopted.values()))
    missing = sorted(set(adopted.values()) - elsewhere.keys())
    if missing:
        raise TrackingError(
            f"run {missing[0]}, which sweep {parent_id} shares, is not in the store"
        )
    for job, run_id in adopted.items():
        jobs[job] = elsewhere[run_id]

    # The sort is stable, so runs without a number keep the order of their start
    once = {}
    for job in sorted(jobs, key=to_number):
        once[jobs[job].run_id] = jobs[job]
    return [complete(store, record) for record in once.values()]


def to_number(text: str) -> int:
    """Return the number of at most 9 digits in a tag; 0 for another text.

    A store is untrusted, and may hold any text.
    """
    if text.isdecimal() and len(text) < 10:
        return int(text)
    return 0


@interrupts.deferred()
def adopt(store: Store, parent_id: str, number: int, record: RunRecord) -> None:
    """Tag a sweep with a finished run from outside, as the run of its job `number`."""
    store.client.set_tag(parent_id, f"{_ADOPTED}{number}", record.run_id)


def load_compared(store: Store, parent_id: str) -> list[RunRecord]:
    """Return a sweep's runs, without analyses, which have no result to compare."""
    return [record for record in load_children(store, parent_id) if not record.is_analysis]


def find_parent(store: Store, filters: str = "tags.kind = 'sweep'") -> RunRecord | None:
    """Return the experiment's newest run that matches the filter; None without one."""
    newest = find_runs(store, filters, most=1)
    if not newest:
        return None
    return newest[0]


def find_newest(store: Store) -> RunRecord | None:
    """Return the newest sweep or single run of the experiment; None without one.

    Single analyses are left out, because they have no verdict. If the newest run belongs to a
    sweep, the result is the sweep.
    """
    # Read all runs only if the newest ones are analyses
    for most in (_AT_ONCE, None):
        for record in find_runs(store, "", most=most):
            if not record.is_analysis:
                if record.sweep_id:
                    return load_run(store, record.sweep_id)
                return complete(store, record)
    return None


def require_newest(store: Store) -> RunRecord:
    """Return the newest sweep or single run.

    Raises:
        ConfigError: there is none, see `find_newest`; the message names the command that makes one.
    """
    newest = find_newest(store)
    if newest is None:
        again = invocation.command("run", "model.path=FILE", "data.root=PATH")
        raise ConfigError(
            f"experiment: got {store.experiment_name!r}, which has no run, expected one with a run "
            f"or a sweep; try {again} first, or root=, uri= or experiment= of another"
        )
    return newest


def say_newest(newest: RunRecord) -> None:
    """Print on stderr which sweep or run a command without an id has taken."""
    kind = "sweep" if newest.kind == SWEEP else "run"
    say(stderr(), f"the newest {kind}: {newest.run_id} ({newest.name or 'without a name'})")


def locate(store: Store, record: RunRecord, name: str = "") -> Path | None:
    """Return the folder of a run's files, or the path of its file `name`; None if a server has it.

    Raises:
        TrackingError: the address of the files is outside the store, whose records are untrusted.
    """
    uri = record.artifact_uri
    if name:
        uri += f"/{name}"
    if record.in_folder:
        return artifacts.locate(uri, store_uri="")
    return store.locate(uri)


@contextmanager
def artifact(store: Store, record: RunRecord, name: str) -> Iterator[Path]:
    """Yield the path of a run's file, or of a temporary copy if a server holds the file.

    Raises:
        TrackingError: the run has no such file, its folder has moved, its address does not belong
            to the store, or the server does not send it.
    """
    path = locate(store, record, name)
    if path is not None:
        if not path.is_file():  # a pipe would block, a device would never end
            raise TrackingError(f"run {record.run_id}: no artifact {name} in {path.parent}")
        yield path
        return

    # Download the file from a server
    import mlflow.artifacts

    with tempfile.TemporaryDirectory() as folder:
        with errors_as(TrackingError, f"run {record.run_id}: no artifact {name}"):
            copy = mlflow.artifacts.download_artifacts(
                # not by the run's id, with which MLflow would read the run again
                artifact_uri=f"{record.artifact_uri}/{name}",
                dst_path=folder,
                tracking_uri=store.uri,
            )
        yield Path(copy)


def list_artifacts(store: Store, record: RunRecord) -> list[str]:
    """Return the names of a run's files and folders, sorted.

    Raises:
        TrackingError: the address of the files does not belong to the store, or the server does
            not answer.
    """
    folder = locate(store, record)
    if folder is not None:
        return sorted(path.name for path in folder.glob("*"))
    import mlflow.artifacts

    with in_one_line(store):
        listed = mlflow.artifacts.list_artifacts(
            artifact_uri=record.artifact_uri, tracking_uri=store.uri
        )
    # A server that hands out its artifacts lists `artifacts/model.onnx`
    return sorted(PurePosixPath(item.path).name for item in listed)


def read_artifact(store: Store, record: RunRecord, name: str, reader: Callable[[Path], T]) -> T:
    """Return the value that `reader` makes of a run's file.

    Anyone with write access to the store may have replaced the file.

    Raises:
        TrackingError: see `artifact`; or the file is damaged, so that `reader` has raised an error.
    """
    damaged = errors_as(TrackingError, f"run {record.run_id}: {name} is damaged")
    with artifact(store, record, name) as path, damaged:
        return reader(path)


def read_if_sound(
    store: Store,
    record: RunRecord,
    name: str,
    reader: Callable[[Path], T],
    lacks: str,
    optional: bool = False,
) -> T | None:
    """Return the value of `read_artifact`; None, with a warning, if the file cannot be read.

    Args:
        lacks: the consequence for the warning, such as `the report leaves out a figure`.
        optional: whether a run may lack the file, which then needs no warning.
    """
    try:
        if optional and name not in list_artifacts(store, record):
            return None
        return read_artifact(store, record, name, reader)
    except (TrackingError, OSError) as error:
        log.warning("%s: %s", lacks, one_line(error))
        return None
