"""A sweep: one parent run in MLflow, its jobs as children, and the table at the end.

The parent is made before the first job. Its id goes to the jobs in a file of the sweep's folder,
since environment variables do not reach jobs on another machine, and a shared folder does.
"""

import json
import logging
import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from resnet8ptq import cli, files, jobs, journal, search
from resnet8ptq.config import ReportConfig, TrackingConfig
from resnet8ptq.errors import ConfigError, PtqError, TrackingError, one_line

if TYPE_CHECKING:  # Hydra imports this module for every job; most of them make no report
    from filelock import FileLock

    from resnet8ptq.mlflow_store import Store

log = logging.getLogger(__name__)

MAX_BYTES = 2**20


@dataclass(frozen=True)
class Sweep:
    """The running sweep: its store, its parent run, its folder."""

    store: "Store"
    parent_id: str
    folder: Path
    limits: ReportConfig = field(default_factory=ReportConfig)
    worker: jobs.Worker | None = None  # None: the jobs run in this process
    resume: bool = False
    lock: "FileLock | None" = None  # held as long as the sweep runs

    def save(self) -> None:
        """Leave the store, the parent's id and what workers need where the jobs find them."""
        worker = self.worker and asdict(self.worker)
        kept = {"parent_id": self.parent_id, "resume": self.resume, "worker": worker}
        # Nobody else's: the URI of a database may hold its password, as may a variable.
        text = json.dumps({**asdict(self.store), **kept}, indent=2)
        files.write_text(self.folder / journal.SWEEP_FILE, text, mode=0o600)

    @classmethod
    def load(cls, folder: Path) -> "Sweep":
        """Read what `save` left.

        Raises:
            ConfigError: this machine does not see the file.
            TrackingError: the file is damaged; the ids in it become parts of queries.
        """
        from resnet8ptq.mlflow_store import Store

        path = folder / journal.SWEEP_FILE
        try:
            kept = json.loads(files.read_bytes(path, MAX_BYTES))
            texts = [kept[key] for key in ("uri", "experiment_name", "experiment_id", "parent_id")]
            if (
                not all(isinstance(found, str) for found in texts)
                or type(kept["resume"]) is not bool
            ):
                raise ValueError("what it holds is of other types")
            uri, experiment_name, *ids = texts
            if not all(re.fullmatch(r"\w+", found) for found in ids):
                raise ValueError("its ids are none")
            worker = None if kept["worker"] is None else jobs.Worker.parse(kept["worker"])
        except FileNotFoundError as error:
            raise ConfigError(
                f"hydra.sweep.dir: {platform.node()} does not see {path}; takes a folder that "
                "every node of the cluster sees"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TrackingError(f"{path}: not what the sweep wrote ({one_line(error)})") from None
        experiment_id, parent_id = ids
        store = Store(uri, experiment_id, experiment_name)
        return cls(store, parent_id, folder, worker=worker, resume=kept["resume"])

    def close(self, status: str) -> str:
        """Print the comparison, write it to the folder and the parent run, close the parent.

        Args:
            status: `ok`, `failed` or `killed`, as the sweep ended.

        Returns:
            The status that its run got: `failed` where a job has.

        Raises:
            TrackingError: the store is away; the runs are in the sweep's folder.
        """
        try:
            return self._close(status)
        except PtqError:
            raise
        except Exception as error:
            from resnet8ptq import mlflow_store, sync, table, tracking

            if not mlflow_store.is_away(error):
                raise
            tracking.end_record(status, self.folder)
            table.print_table(sync.load_records(self.folder))
            raise TrackingError(
                f"the tracking store does not answer ({cli.one_line(error)[:200]}); the runs are "
                f"kept in {self.folder}: `python -m resnet8ptq.sync folder={self.folder}` logs "
                "them when it is back"
            ) from error

    def _close(self, status: str) -> str:
        from resnet8ptq import history, report, sync, table, tracking, upload

        known = history.find_runs(self.store, history.under(self.parent_id), deleted=True)
        # Runs that the store did not take, and those whose processes ended with the sweep.
        done = sync.sync(self.store, self.folder, known, wait_s=10 if self.worker else 0)
        if len(done.running) > 1:  # besides the sweep itself
            log.warning("%d jobs of the sweep are still running", len(done.running) - 1)
        records = history.load_compared(self.store, self.parent_id)
        if records:
            table.print_table(records)
            report.write(self.store, self.parent_id, records, self.folder, self.limits)
        if self.resume:
            here = [r for r in records if self.folder in Path(r.tags["folder"]).parents]
            skipped = len(records) - len(here)
            print(f"Skipped: {skipped} of {len(records)} runs had finished before")
        if (found := self.folder / search.RESULTS_FILE).exists():
            upload.log_files(self.store, self.parent_id, [found])
        # A search goes on past a failure, and its sweeper ends in peace.
        if status == "ok" and any(r.tags.get("status") == "failed" for r in records):
            status = "failed"
        tracking.end_parent(self.store, self.parent_id, status, self.folder)
        table.print_places(self.folder, self.store)
        return status


current: Sweep | None = None  # of this process; run.py closes it, also after a failure


class SweepCallback(Callback):
    """Hydra calls this before the first job of a multirun."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Open the store and the parent run, or end the program: no job could be recorded."""
        global current
        folder = Path(config.hydra.sweep.dir).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            current = _start(config, folder)
            current.save()
        except cli.EXPECTED as error:
            # Hydra turns an exception of a callback into a warning, and would go on.
            raise SystemExit(cli.report(error)) from None


def _start(config: DictConfig, folder: Path) -> Sweep:
    """Open the store and the sweep's run: a new one, or that of the sweep to go on with."""
    from resnet8ptq import history, mlflow_store, reference, resume, sync, tracking

    settings, limits = map(OmegaConf.to_object, (config.tracking, config.report))
    # For mypy: the schema says so.
    assert isinstance(settings, TrackingConfig) and isinstance(limits, ReportConfig)
    if limits.reference is not None:
        reference.load(limits.reference)  # a wrong name now rather than after the sweep
    objectives = search.prepare(config)
    worker = jobs.plan(config.hydra.launcher)
    if worker:
        jobs.prepare_workers()
        if worker.at_once > 1 and config.latency.enabled:
            log.warning("%d jobs at once: each is timed while others run", worker.at_once)
    store = mlflow_store.open_store(settings)
    overrides = list(config.hydra.overrides.task)
    key = resume.sweep_key(overrides)
    earlier = resume.find_sweep(store, key) if config.sweep.resume else None
    tags = {"overrides": " ".join(overrides), "sweep_key": key, **objectives}
    held = journal.lock(folder)
    if earlier is None:
        if config.sweep.resume:
            log.warning("sweep.resume: no earlier sweep with these overrides, code and versions")
        name = f"sweep {folder.parent.name} {folder.name}"
        parent_id = tracking.start_parent(store, name, folder, tags)
    else:
        print(f"Resume: going on with {earlier.tags['mlflow.runName']}")  # no log is set up yet
        known = history.find_runs(store, history.under(earlier.run_id), deleted=True)
        sync.sync(store, Path(earlier.tags["folder"]), [earlier, *known], wait_s=5)
        parent_id = tracking.restart_parent(store, earlier, folder)
    return Sweep(store, parent_id, folder, limits, worker, config.sweep.resume, held)
