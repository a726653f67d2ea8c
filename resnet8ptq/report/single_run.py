"""The end of a single run: prints its result and paths, and completes its page in MLflow."""

from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import background, console, invocation
from resnet8ptq.report import loading, terminal, verdicts
from resnet8ptq.report.pages import run_pages
from resnet8ptq.report.recommend import ModelSelection, families_of
from resnet8ptq.report.verdicts import FAIL
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord


@dataclass(frozen=True)
class SingleRun:
    """A run that has ended; `close` shows its result."""

    record: RunRecord
    store: Store
    limits: ReportConfig

    def close(self) -> None:
        """Print the table, the verdict and the paths, and wait for the background process.

        An analysis has printed its own table, and has no verdict.

        Raises:
            TrackingError: a file of the run could not be drawn or sent; the folder has the run.
        """
        record = self.record
        store = self.store
        verdict = ""

        # Assess the run, and print its table and verdict
        if not record.is_analysis:
            families = loading.add_earlier_runs(store, loading.load_families(store, [record]))
            selections = []  # a run alone has nothing to choose from: only its verdict is used
            for family in families:
                assessed = verdicts.assess(family, self.limits)
                selections.append(ModelSelection(assessed))
            terminal.print_families(families_of(selections))
            verdict = terminal.print_verdict(selections, record.run_id)
            run_pages.log_run_pages(store, selections)

        # Name the files, and the command for a model that may be deployed
        terminal.print_paths(Path(record.folder), store)
        print(f"Run:    {record.run_id}")
        is_model = not record.is_analysis and bool(record.deploy_words)
        is_deployable = record.status == "ok" and not record.doubt and verdict != FAIL
        if is_model and is_deployable:
            words = [f"run_id={record.run_id}", *store.words]
            print(f"Deploy: {invocation.command('deploy', *words)}")
        with console.waiting("Sending the run to MLflow"):
            background.wait()
