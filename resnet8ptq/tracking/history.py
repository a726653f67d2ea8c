"""Reads runs back from the store."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from resnet8ptq.core import interrupts
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.tracking import journal
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.store import Store

_AT_ONCE = 100  # ids in one query
_ADOPTED = "job_"  # with a job's number: a sweep's tag with the id of another sweep's run


def load_run(store: Store, run_id: str) -> RunRecord:
    """Read one run back."""
    return RunRecord.of_mlflow(store.client.get_run(run_id))


def load_named(store: Store, key: str, run_id: str) -> RunRecord:
    """Return the run whose id the setting `key` holds.

    A run that ended before the store had an id for it is known in its folder by its journal's key.

    Raises:
        ConfigError: the store has no such run, or it was deleted.
    """
    from mlflow.exceptions import MlflowException

    wrong = ConfigError(f"{key}: got {run_id!r}, expected the id of a run in the store")
    try:
        run = store.client.get_run(run_id)
    except MlflowException:
        logged = find_logged(store, run_id) if re.fullmatch(r"\w+", run_id) else None
        if logged is None:
            raise wrong from None
        return logged
    if run.info.lifecycle_stage == "deleted":
        raise ConfigError(f"{key}: run {run_id} was deleted; restore it in MLflow, or take another")
    return RunRecord.of_mlflow(run)


def load_runs(store: Store, run_ids: Sequence[str]) -> dict[str, RunRecord]:
    """Read runs back by their ids, including deleted runs; missing runs are left out."""
    runs: dict[str, RunRecord] = {}
    for start in range(0, len(run_ids), _AT_ONCE):
        listed = ", ".join(f"'{run_id}'" for run_id in run_ids[start : start + _AT_ONCE])
        records = find_runs(store, f"attributes.run_id IN ({listed})", deleted=True)
        runs |= {record.run_id: record for record in records}
    return runs


def find_runs(
    store: Store,
    filters: str,
    newest_first: bool = True,
    most: int | None = None,
    deleted: bool = False,
) -> list[RunRecord]:
    """Return the experiment's runs that match MLflow's filter, at most `most` of them."""
    from mlflow.entities import ViewType

    view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
    order = [f"attributes.start_time {'DESC' if newest_first else 'ASC'}"]
    records: list[RunRecord] = []
    token = None
    while True:
        page = store.client.search_runs(
            [store.experiment_id], filters, view, most or 1000, order, token
        )
        records += [RunRecord.of_mlflow(run) for run in page]
        token = page.token
        if not token or (most is not None and len(records) >= most):
            return records


def find_logged(store: Store, key: str) -> RunRecord | None:
    """Return the run with a journal's key, even if it was deleted."""
    runs = find_runs(store, f"tags.record = '{key}'", most=1, deleted=True)
    return runs[0] if runs else None


def under(parent_id: str) -> str:
    """Return the filter for a sweep's own runs."""
    return f"tags.`{journal.PARENT_TAG}` = '{parent_id}'"


def load_children(store: Store, parent_id: str) -> list[RunRecord]:
    """Read the runs of a sweep back, in the order of its jobs.

    A repeated job has its newest run; a job that another sweep had finished has the run of that
    sweep. No run is returned twice.

    Raises:
        TrackingError: a run of another sweep is no longer in the store.
    """
    records = find_runs(store, under(parent_id), newest_first=False)
    jobs = {record.job_number or record.run_id: record for record in records}
    adopted = {
        key.removeprefix(_ADOPTED): run_id
        for key, run_id in load_run(store, parent_id).tags.items()
        if key.startswith(_ADOPTED) and key.removeprefix(_ADOPTED) not in jobs
    }
    elsewhere = load_runs(store, list(adopted.values()))
    if missing := sorted(set(adopted.values()) - elsewhere.keys()):
        raise TrackingError(
            f"run {missing[0]}, which sweep {parent_id} shares, is not in the store"
        )
    jobs |= {job: elsewhere[run_id] for job, run_id in adopted.items()}
    # Sorting keeps runs without a number in the order of their start.
    order = sorted(jobs, key=lambda key: int(key) if key.isdigit() else 0)
    return list({jobs[key].run_id: jobs[key] for key in order}.values())


@interrupts.deferred()
def adopt(store: Store, parent_id: str, number: int, record: RunRecord) -> None:
    """Tag a sweep with another sweep's finished run, as the run of its job `number`."""
    store.client.set_tag(parent_id, f"{_ADOPTED}{number}", record.run_id)


def load_compared(store: Store, parent_id: str) -> list[RunRecord]:
    """Read a sweep's runs back, without analyses, which have no result to compare."""
    return [record for record in load_children(store, parent_id) if not record.is_analysis]


def find_parent(store: Store, filters: str = "tags.kind = 'sweep'") -> RunRecord | None:
    """Return the newest sweep of the experiment that matches the filter, or None."""
    newest = find_runs(store, filters, most=1)
    return newest[0] if newest else None


@contextmanager
def artifact(store: Store, record: RunRecord, name: str) -> Iterator[Path]:
    """Yield the path of a run's file, or of a temporary copy if the file is on another machine.

    Raises:
        TrackingError: the run has no such file, or its folder has moved.
    """
    address = urlsplit(record.artifact_uri)
    if address.scheme in ("", "file"):
        path = Path(url2pathname(address.path), name)
        if not path.is_file():  # a pipe would block, a device never end
            raise TrackingError(f"run {record.run_id}: no artifact {name} in {path.parent}")
        yield path
        return
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    uri = f"{record.artifact_uri}/{name}"  # with the run's id, MLflow would read the run again
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = mlflow.artifacts.download_artifacts(
                artifact_uri=uri, dst_path=folder, tracking_uri=store.uri
            )
        except (MlflowException, OSError) as error:
            raise TrackingError(f"run {record.run_id}: no artifact {name} ({error})") from error
        yield Path(path)
