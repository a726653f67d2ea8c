"""A sweep: one parent run in MLflow, its jobs as children, and the table at the end.

The parent is made before the first job. Its id goes to the jobs in a file of the sweep's folder,
since environment variables do not reach jobs on another machine, and a shared folder does.
"""

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from resnet8ptq import cli, files, jobs, search
from resnet8ptq.config import ReportConfig, TrackingConfig

if TYPE_CHECKING:  # Hydra imports this module for every job; most of them make no report
    from resnet8ptq.tracking import Store

log = logging.getLogger(__name__)

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Sweep:
    """The running sweep: its store, its parent run, its folder."""

    store: "Store"
    parent_id: str
    folder: Path
    limits: ReportConfig = field(default_factory=ReportConfig)
    jobs: int = 1  # at once

    def save(self) -> None:
        """Leave the store and the parent's id where the jobs find them."""
        record = {**asdict(self.store), "parent_id": self.parent_id, "jobs": self.jobs}
        path = self.folder / SWEEP_FILE
        files.write_text(path, json.dumps(record, indent=2))
        path.chmod(0o600)  # the URI of a database may hold its password

    @classmethod
    def load(cls, folder: Path) -> "Sweep":
        """Read what `save` left."""
        from resnet8ptq import tracking

        record = json.loads((folder / SWEEP_FILE).read_text())
        store = tracking.Store(record["uri"], record["experiment_id"])
        return cls(store, record["parent_id"], folder, jobs=record["jobs"])

    def close(self, status: str) -> str:
        """Print the comparison, write it to the folder and the parent run, close the parent.

        Args:
            status: `ok`, `failed` or `killed`, as the sweep ended.

        Returns:
            The status that the parent got: `failed` where a run has.
        """
        from resnet8ptq import report, table, tracking

        if self.jobs > 1 and status != "ok":
            # Their processes ended with the sweep, and could not close their runs themselves.
            tracking.end_children(self.store, self.parent_id, status)
        if records := tracking.load_compared(self.store, self.parent_id):
            table.print_table(records)
            report.write(self.store, self.parent_id, records, self.folder, self.limits)
        if (found := self.folder / search.RESULTS_FILE).exists():
            tracking.log_files(self.store, self.parent_id, [found])
        # A search goes on after a failure, and its sweeper ends in peace.
        if status == "ok" and any(r.tags.get("status") == "failed" for r in records):
            status = "failed"
        tracking.end_parent(self.store, self.parent_id, status)
        table.print_places(self.folder, self.store)
        return status


current: Sweep | None = None  # of this process; run.py closes it, also after a failure


class SweepCallback(Callback):
    """Hydra calls this before the first job of a multirun."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Open the store and the parent run, or end the program: no job could be recorded."""
        global current
        from resnet8ptq import tracking

        folder = Path(config.hydra.sweep.dir).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            settings, limits = map(OmegaConf.to_object, (config.tracking, config.report))
            # For mypy: the schema says so.
            assert isinstance(settings, TrackingConfig) and isinstance(limits, ReportConfig)
            if limits.reference is not None:
                from resnet8ptq import reference

                reference.load(limits.reference)  # a wrong name now rather than after the sweep
            objectives = search.prepare(config)
            at_once = jobs.count(config.hydra.launcher)
            if at_once > 1:
                jobs.prepare_workers()
                if config.latency.enabled:
                    log.warning("%d jobs at once: each is timed while others run", at_once)
            store = tracking.open_store(settings)
            name = f"sweep {folder.parent.name} {folder.name}"
            overrides = " ".join(config.hydra.overrides.task)
            tags = {"folder": str(folder), "overrides": overrides, **objectives}
            parent_id = tracking.start_parent(store, name, tags)
            current = Sweep(store, parent_id, folder, limits, at_once)
            current.save()
        except cli.EXPECTED as error:
            # Hydra turns an exception of a callback into a warning, and would go on.
            raise SystemExit(cli.report(error)) from None
