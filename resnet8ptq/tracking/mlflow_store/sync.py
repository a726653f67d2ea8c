"""Logs runs that are missing in MLflow, because the store was unavailable or the run was killed.

    resnet8ptq sync                   every run below runs/
    resnet8ptq sync folder=PATH       every run below that folder

An ended run that is missing or open in the store is logged from its folder. A killed run is closed
as killed. A running run is skipped, and so are runs of other experiments. The command may be
repeated. An empty store gets all runs with their sweeps. `uri=`, `root=` and `experiment=` name the
store, as for `resnet8ptq report`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resnet8ptq.core import command, invocation
from resnet8ptq.core.console import track, waiting
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.text import printable
from resnet8ptq.tracking import history, journal
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import upload
from resnet8ptq.tracking.mlflow_store.store import Store, StoreArguments, open_store
from resnet8ptq.tracking.record import RunRecord

log = logging.getLogger(__name__)

_KILLED = {"status": "killed", "reason": "its process ended without an error message"}


@dataclass
class Synced:
    """The folders of the runs, by outcome, and the ids of their sweeps."""

    logged: list[Path] = field(default_factory=list)
    killed: list[Path] = field(default_factory=list)
    running: list[Path] = field(default_factory=list)
    whole: list[Path] = field(default_factory=list)  # the store already had them
    parents: set[str] = field(default_factory=set)  # ids of sweeps with logged or closed runs

    def __str__(self) -> str:
        return (
            f"{len(self.logged)} runs logged, {len(self.killed)} closed as killed, "
            f"{len(self.running)} still running, {len(self.whole)} were in the store"
        )


def sync(store: Store, root: Path, wait_s: float = 0) -> Synced:
    """Log the ended runs below `root` that the store lacks or has in part; close killed runs.

    Runs of experiments other than the store's are left out.

    Args:
        wait_s: seconds to wait for each running job, because its process may be about to end.
    """
    pairs = _load_all(root, store.experiment_name)
    synced = Synced()
    known = _find_known(store, [kept for _, kept in pairs])
    ids: dict[str | None, str] = {}  # run ids in the folders -> in this store
    for folder, kept in track(pairs, "Reading the records", "runs"):
        # Skip whole and running runs, and close killed runs
        record = known.get(kept.key)
        if record is not None:
            ids[kept.run_id] = record.run_id
        if kept.ended and record is not None and record.ended:
            synced.whole.append(folder)
            continue
        job_wait_s = 0 if kept.parent_id is None else wait_s
        if kept.ended:
            synced.logged.append(folder)
        elif journal.is_alive(folder, job_wait_s):
            synced.running.append(folder)
            continue
        else:
            kept.end("KILLED", _KILLED)
            kept.save(folder)
            synced.killed.append(folder)

        # Log the run below the sweep's run in this store
        if kept.parent_id is not None and kept.parent_id in ids:
            kept.parent_id = ids[kept.parent_id]
            kept.tags[journal.PARENT_TAG] = kept.parent_id
        ids[kept.run_id] = upload.push(store, kept, folder)
        if kept.parent_id is not None:
            synced.parents.add(kept.parent_id)
    return synced


def _find_known(store: Store, journals: Sequence[Journal]) -> dict[str, RunRecord]:
    """Return the records of the journals' runs that are in the store, by the journals' keys."""
    ids = [kept.run_id for kept in journals if kept.run_id]
    known = {}
    for record in history.load_runs(store, ids).values():
        if record.key:
            known[record.key] = record
    for kept in journals:
        if kept.key not in known:  # the run was logged under another id, if at all
            logged = history.find_logged(store, kept.key)
            if logged is not None:
                known[kept.key] = logged
    return known


def load_records(root: Path) -> list[RunRecord]:
    """Return the runs of sweeps below `root` from their folders, in the order of the jobs."""
    jobs = []
    for folder, kept in _load_all(root):
        if kept.parent_id is not None:
            number = history.to_number(kept.tags.get("job_number", ""))
            jobs.append((number, RunRecord.of_journal(kept, folder)))
    jobs.sort(key=lambda job: job[0])
    return [record for _, record in jobs]


def _load_all(root: Path, experiment: str | None = None) -> list[tuple[Path, Journal]]:
    """Return folders with their journals: sweeps and single runs first, then the runs of sweeps.

    A damaged journal is left out, with a warning. If a run has two journals, the newer counts; a
    sweep that was resumed and killed may leave two.

    Args:
        experiment: the name of the runs' experiment; None for any.
    """
    # In the order in which they were written, so that the newer of two journals stays
    pairs: dict[str, tuple[Path, Journal]] = {}
    for path in sorted(root.rglob(journal.FILE), key=lambda path: path.stat().st_mtime_ns):
        try:
            kept = Journal.load(path.parent)
        except TrackingError as error:
            log.warning("%s; it is skipped", error)
            continue
        if experiment in (None, kept.experiment):
            pairs[kept.key] = (path.parent, kept)
    return sorted(pairs.values(), key=lambda pair: (pair[1].parent_id is not None, pair[0]))


@dataclass
class Arguments(StoreArguments):
    """The settings of `resnet8ptq sync`, as key=value."""

    folder: str = "runs"


def main(words: list[str]) -> None:
    """Log the missing runs; print them, their counts, and the commands of the sweeps' reports.

    Raises:
        ConfigError: the folder does not exist, or a word or the store's address is wrong.
        TrackingError: the store cannot be used, or a run cannot be logged.
    """
    asked = command.parse_words(words, Arguments, __doc__)
    folder = Path(asked.folder)
    if not folder.is_dir():
        raise ConfigError(f"folder: got {folder}, expected a folder of runs or sweeps")
    with waiting("Opening the store"):
        store = open_store(asked.tracking)
    synced = sync(store, folder)
    for state in ("logged", "killed", "running"):
        for path in getattr(synced, state):
            print(f"{state:8} {printable(str(path))}")
    print(synced)
    for parent in sorted(synced.parents):
        print(f"Report:  {invocation.command('report', f'run_id={parent}', *store.words)}")
