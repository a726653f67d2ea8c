"""The runs that a store has, read back."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from resnet8ptq.core import interrupts
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tracking import journal
from resnet8ptq.tracking.store import Store

_AT_ONCE = 100  # ids in one query
_ADOPTED = "job_"  # and its number: a tag of a sweep's run that names a run of another sweep


@dataclass(frozen=True)
class Record:
    """One run as MLflow has it; its artifacts lie at `artifact_uri`."""

    run_id: str
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]
    artifact_uri: str = ""
    ended: bool = True

    @property
    def drop(self) -> float | None:
        """How much worse than its baseline it is, for sweepers; None where nothing was measured."""
        delta = self.metrics.get("delta")  # all there is of runs from before there were tasks
        return self.metrics.get("drop", None if delta is None else -delta)


def load_run(store: Store, run_id: str) -> Record:
    """Read one run back."""
    return _record(store.client.get_run(run_id))


def load_runs(store: Store, run_ids: Sequence[str]) -> dict[str, Record]:
    """Read runs back by their ids, deleted ones too; those that the store has."""
    found: dict[str, Record] = {}
    for start in range(0, len(run_ids), _AT_ONCE):
        listed = ", ".join(f"'{run_id}'" for run_id in run_ids[start : start + _AT_ONCE])
        records = find_runs(store, f"attributes.run_id IN ({listed})", deleted=True)
        found |= {record.run_id: record for record in records}
    return found


def find_runs(
    store: Store,
    filters: str,
    newest_first: bool = True,
    most: int | None = None,
    deleted: bool = False,
) -> list[Record]:
    """Return the experiment's runs that MLflow's filter lets through, at most `most` of them."""
    from mlflow.entities import ViewType

    view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
    order = [f"attributes.start_time {'DESC' if newest_first else 'ASC'}"]
    records: list[Record] = []
    token = None
    while True:
        page = store.client.search_runs(
            [store.experiment_id], filters, view, most or 1000, order, token
        )
        records += [_record(run) for run in page]
        token = page.token
        if not token or (most is not None and len(records) >= most):
            return records


def find_logged(store: Store, key: str) -> Record | None:
    """Return the run that was logged from a record, deleted or not, by the record's key."""
    found = find_runs(store, f"tags.record = '{key}'", most=1, deleted=True)
    return found[0] if found else None


def under(parent_id: str) -> str:
    """Return the filter that lets a sweep's own runs through."""
    return f"tags.`{journal.PARENT_TAG}` = '{parent_id}'"


def load_children(store: Store, parent_id: str) -> list[Record]:
    """Read the runs of a sweep back, in the order of its jobs, however they were started.

    A job that has been run again has one run here, the newest; one whose configuration had
    finished in another sweep has that sweep's. A run is here once, whoever shares it.

    Raises:
        TrackingError: the store no longer has a run of another sweep.
    """
    records = find_runs(store, under(parent_id), newest_first=False)
    jobs = {record.tags.get("job_number", record.run_id): record for record in records}
    adopted = {
        key.removeprefix(_ADOPTED): run_id
        for key, run_id in load_run(store, parent_id).tags.items()
        if key.startswith(_ADOPTED) and key.removeprefix(_ADOPTED) not in jobs
    }
    elsewhere = load_runs(store, list(adopted.values()))
    if gone := sorted(set(adopted.values()) - elsewhere.keys()):
        raise TrackingError(f"run {gone[0]}, which sweep {parent_id} shares, is not in the store")
    jobs |= {job: elsewhere[run_id] for job, run_id in adopted.items()}
    # Sorting keeps runs without a number in the order they were started.
    order = sorted(jobs, key=lambda key: int(key) if key.isdigit() else 0)
    return list({jobs[key].run_id: jobs[key] for key in order}.values())


@interrupts.deferred()
def adopt(store: Store, parent_id: str, number: int, record: Record) -> None:
    """Name a finished run as that of a sweep's job `number`."""
    store.client.set_tag(parent_id, f"{_ADOPTED}{number}", record.run_id)


def load_compared(store: Store, parent_id: str) -> list[Record]:
    """Read a sweep's runs back without analyses: those have nothing to compare."""
    found = load_children(store, parent_id)
    return [record for record in found if record.params.get("analysis.name", "null") == "null"]


def find_parent(store: Store, filters: str = "tags.kind = 'sweep'") -> Record | None:
    """Return the newest sweep of the experiment that the filter lets through, or None."""
    newest = find_runs(store, filters, most=1)
    return newest[0] if newest else None


@contextmanager
def artifact(store: Store, record: Record, name: str) -> Iterator[Path]:
    """Yield one of a run's files: itself where it lies on this machine, else a passing copy.

    Raises:
        TrackingError: the run has no such file, or its folder has moved.
    """
    place = urlsplit(record.artifact_uri)
    if place.scheme in ("", "file"):
        path = Path(url2pathname(place.path), name)
        if not path.exists():
            raise TrackingError(f"run {record.run_id}: no artifact {name} in {path.parent}")
        yield path
        return
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    uri = f"{record.artifact_uri}/{name}"  # by the run's id MLflow would read the run again
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = mlflow.artifacts.download_artifacts(
                artifact_uri=uri, dst_path=folder, tracking_uri=store.uri
            )
        except (MlflowException, OSError) as error:
            raise TrackingError(f"run {record.run_id}: no artifact {name} ({error})") from error
        yield Path(path)


def _record(run: Any) -> Record:
    info, data = run.info, run.data
    figures = dict(data.params), dict(data.metrics), dict(data.tags)
    return Record(info.run_id, *figures, info.artifact_uri, info.status in journal.ENDED)
