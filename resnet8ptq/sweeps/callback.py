"""A sweep: one parent run in MLflow, its jobs as children, and the table at the end.

`SweepCallback` begins the sweep, and `core.command.finish` calls `RunningSweep.close` at its end.

The parent run is created before the first job. Jobs in other processes read its id from a file in
the sweep's folder. If the jobs run in this process, Hydra composes them while MLflow is imported.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from resnet8ptq.config import words
from resnet8ptq.config.schema import ReportConfig, TrackingConfig
from resnet8ptq.core import background, clock, command, console, invocation
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.text import one_line
from resnet8ptq.sweeps import jobs, ongoing
from resnet8ptq.tracking import journal
from resnet8ptq.tracking.mlflow_store import address

if TYPE_CHECKING:  # Hydra imports this module for every job; most of them make no report
    from filelock import FileLock

    from resnet8ptq.report.recommend import ModelSelection
    from resnet8ptq.sweeps.budget import Budget
    from resnet8ptq.sweeps.delivery import Delivery
    from resnet8ptq.tracking.mlflow_store.store import Store
    from resnet8ptq.tracking.record import RunRecord
    from resnet8ptq.tracking.sweep_file import ParallelJobs, SharedSweep


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningSweep:
    """A running sweep, which this process closes."""

    open: "Callable[[], SharedSweep]"  # waits for the store, and returns the sweep with its run
    parallel: "ParallelJobs | None"  # of the sweep, known before it is open
    limits: ReportConfig  # of a recommended model
    lock: "FileLock"  # on the sweep's folder, held while the sweep runs
    jobs: int | None = None  # the largest number of jobs, if known
    goal: str | None = None  # of a search (`experiment=auto`)
    delivery: "Delivery | None" = None  # of a search: its best model so far
    budget: "Budget | None" = None  # of a search
    command_begun_s: float = field(default_factory=clock.begun_s)
    words: Sequence[str] = ()  # of the command line
    begun_s: float = field(default_factory=time.monotonic)
    failures: dict[str, str] = field(default_factory=dict)  # the first job of each error's text

    @property
    def is_search(self) -> bool:
        """Whether the jobs are steps of a search."""
        return self.goal is not None

    def shorten(self, reason: str, job: str) -> str:
        """Return the reason of a job's failure, or name the earlier job that had the same."""
        first = self.failures.setdefault(reason, job)
        if first == job:
            return reason
        return f"the same error as {first}"

    def seconds_left(self, job: int) -> float | None:
        """Return the expected time of the jobs from number `job` on; None if unknown.

        It is based on the mean time of the earlier jobs.
        """
        if not job or self.jobs is None or self.parallel is not None:
            return None
        return (time.monotonic() - self.begun_s) / job * max(0, self.jobs - job)

    @cached_property
    def shared(self) -> "SharedSweep":
        """The data of the sweep for its jobs.

        The first access waits for the store, and writes `sweep.json`; see `open_running_sweep`.
        """
        opened = self.open()
        opened.save()
        background.name_store(opened.store.words)
        return opened

    def close(self, status: str) -> int:
        """Print the comparison, write it to the folder and the parent run, and close that run.

        Args:
            status: the status of the sweep's end: `ok`, `failed` or `killed`.

        Returns:
            The exit code: 1 if a job failed; for a search, that of the winner's verdict.

        Raises:
            TrackingError: the store is unavailable (the runs are in the sweep's folder), or the
                report failed (the sweep's run is closed).
            KeyboardInterrupt: the report was interrupted; the message names the command for it.
        """
        # matplotlib is imported here, while the last runs are uploaded.
        from resnet8ptq.report import loading, terminal
        from resnet8ptq.tracking.mlflow_store import sync

        store = self.shared.store
        parent_id = self.shared.parent_id
        folder = self.shared.folder
        records: list[RunRecord] = []
        chosen: list[ModelSelection] = []
        failure: BaseException | None = None
        code: int | None = None  # of a search

        # Wait for the last uploads
        try:
            with console.waiting("Sending the runs to MLflow"):
                background.wait()
        except TrackingError as error:
            log.error("%s", error)
            if status == "ok":
                status = "failed"

        # Compare, and write the report
        try:
            records += background.ask(_collect, self.shared)
            is_timed = status != "killed" and not self.is_search
            chosen = self._print_comparison(records, timed=is_timed)
            code = self._announce(chosen, status)  # before the report, which may take long
            self._write_report(records, chosen)
        except (Exception, KeyboardInterrupt) as error:  # raised after the sweep is closed
            failure = error

        # Close the sweep's run
        if status == "killed":
            done = records or sync.load_records(folder)
            print(_how_far(done, self.jobs, self.words), file=sys.stderr)
        # A job may fail without Hydra's knowledge: another package's sweeper may go on after it.
        has_failed = any(record.status == "failed" for record in records)
        if status == "ok" and not self.is_search and has_failed:
            status = "failed"
        away = background.ask(_end_parent, store, parent_id, status, folder)
        if away:
            done = sync.load_records(folder)
            terminal.print_runs(loading.without_files(done, self.limits))
            if code is None:
                self._announce(chosen, status)
            raise TrackingError(
                f"the tracking store does not answer ({away[:200]}); the runs are kept in "
                f"{folder}; try `{invocation.command('sync', f'folder={folder}', *store.words)}` "
                "when it is back"
            )

        # Print the paths, then the answer
        if records:
            terminal.print_paths(folder, store)
            if not self.is_search:
                terminal.print_answers(chosen)
        if code is None:
            code = self._announce(chosen, status)
        if failure is not None:
            again = invocation.command("report", f"run_id={parent_id}", *store.words)
            if isinstance(failure, KeyboardInterrupt):
                raise KeyboardInterrupt(f"the report was not written; try `{again}`")
            raise TrackingError(
                f"the report could not be made ({one_line(failure)}); try `{again}`"
            ) from failure
        if self.goal and status == "ok":
            return code
        return int(status != "ok")

    def _announce(self, chosen: "list[ModelSelection]", status: str) -> int:
        """Print the winner of a search, also after an error or Ctrl-C; return its exit code."""
        from resnet8ptq.sweeps import winner

        if self.goal is None or self.delivery is None:
            return 0
        if status == "failed" and self.delivery.record is None:
            return 0  # the error says why there is no model
        return winner.announce(chosen, self.delivery, self.goal)

    def _has_analyses(self) -> bool:
        """Return whether a job of the sweep was an analysis, which the report shows."""
        from resnet8ptq.tracking import history

        runs = background.ask(history.load_children, self.shared.store, self.shared.parent_id)
        return any(run.is_analysis and run.status == "ok" for run in runs)

    def _print_comparison(self, records: "list[RunRecord]", timed: bool) -> "list[ModelSelection]":
        """Assess the runs and print their table; return the recommended models of each family.

        Args:
            timed: whether to time the best models against each other first.
        """
        from resnet8ptq.report import loading, mlperf_tiny, terminal
        from resnet8ptq.report.families import all_records
        from resnet8ptq.report.selection import select
        from resnet8ptq.sweeps import final_timing

        store = self.shared.store
        folder = self.shared.folder
        if not records:
            return []
        try:
            families = loading.add_earlier_runs(store, loading.load_families(store, records))
        except Exception:  # an artifact is missing, but the metrics are there
            terminal.print_runs(loading.without_files(records, self.limits))
            raise
        with console.waiting("Comparing the runs"):
            chosen = select(families, self.limits)
        if timed:  # before the table, which shows these latencies
            timings = final_timing.time_finalists(chosen, folder)
            chosen = select(families, self.limits, timings)

        # A search has printed the result of each step
        shown = []
        for selected in chosen:
            family = selected.family
            if self.is_search:
                family = family.without_held_out()
            if family.cells:
                shown.append(family)
        if shown:
            terminal.print_runs(shown)
        runs = all_records(shown)
        if mlperf_tiny.is_suite(runs):
            mlperf_tiny.print_suite(runs)
        return chosen

    def _is_late(self) -> bool:
        """Return whether a search is late, so that its report is not drawn."""
        spent_s = time.monotonic() - self.command_begun_s
        return self.budget is not None and not self.budget.has_time_to_draw(spent_s)

    def _is_earlier(self, record: "RunRecord") -> bool:
        """Return whether a run had ended before this command, in any folder."""
        from resnet8ptq.tracking.journal import Journal

        if self.shared.folder not in Path(record.folder).parents:
            return True
        begun = time.time() - (time.monotonic() - self.command_begun_s)
        try:
            ended_ms = Journal.load(Path(record.folder)).end_ms
        except TrackingError:  # its folder was removed, and the store has the run
            return True
        return ended_ms is not None and ended_ms < 1000 * begun

    def _write_report(self, records: "list[RunRecord]", chosen: "list[ModelSelection]") -> None:
        """Write the report to the folder and the parent run, and log the final timings.

        A search that is late prints the command for its report instead.
        """
        from resnet8ptq.evaluation import paired_latency
        from resnet8ptq.report.pages import page
        from resnet8ptq.tracking.mlflow_store import upload

        store = self.shared.store
        parent_id = self.shared.parent_id
        folder = self.shared.folder
        if self._is_late():
            again = invocation.command("report", f"run_id={parent_id}", *store.words)
            print(
                f"The report would end after the time limit, and is not drawn; to draw it: {again}"
            )
        elif records or self._has_analyses():
            with console.waiting("Drawing the report"):
                page.write_report(store, parent_id, chosen, folder)
        if self.shared.resume:
            skipped = sum(self._is_earlier(record) for record in records)
            print(f"Skipped: {skipped} of {len(records)} runs had finished before")
        timings_file = folder / paired_latency.FILE
        if timings_file.exists():
            background.ask(upload.log_files, store, parent_id, [timings_file])


def _how_far(records: "Sequence[RunRecord]", jobs: int | None, typed: Sequence[str]) -> str:
    """Return the number of finished runs of an interrupted sweep, and the command to continue."""
    finished = str(sum(record.finished for record in records))
    if jobs is not None:
        finished += f" of {jobs}"
    kept = [word for word in typed if not word.lstrip("+").startswith("sweep.resume=")]
    again = invocation.command("run", *kept, "sweep.resume=true")
    return f"{finished} runs finished; continue: {again}"


def _collect(sweep: "SharedSweep") -> "list[RunRecord]":
    """Log the runs that are missing in the store; return the runs to compare."""
    from resnet8ptq.tracking import history
    from resnet8ptq.tracking.mlflow_store import sync
    from resnet8ptq.tracking.mlflow_store.store import check_answers

    check_answers(sweep.store.uri)
    # Also those whose processes ended with the sweep.
    done = sync.sync(sweep.store, sweep.folder, wait_s=10 if sweep.parallel else 0)
    if len(done.running) > 1:  # besides the sweep itself
        log.warning("%d jobs of the sweep are still running", len(done.running) - 1)
    return history.load_compared(sweep.store, sweep.parent_id)


def _end_parent(store: "Store", parent_id: str, status: str, folder: Path) -> str:
    """Close the sweep's run; return the error of an unavailable store, or an empty text."""
    from resnet8ptq.tracking.mlflow_store.store import is_away
    from resnet8ptq.tracking.run import end_parent

    try:
        end_parent(store, parent_id, status, folder)
    except Exception as error:
        if not is_away(error):
            raise
        return command.explain(error)
    return ""


def find_running_sweep() -> RunningSweep | None:
    """Return the sweep that the ongoing command line has begun; None in a worker."""
    begun = ongoing.find_ongoing()
    if begun is None:
        return None
    return begun.sweep


def open_running_sweep() -> "SharedSweep":
    """Return the sweep that the ongoing command line has begun, once it is open.

    Raises:
        Abort: it cannot be opened; otherwise Hydra would run the next job without a record.
    """
    begun = ongoing.find_ongoing()
    assert begun is not None and begun.sweep is not None
    try:
        return begun.sweep.shared
    except command.EXPECTED as error:
        begun.sweep = None  # nothing to close
        raise command.Abort(error) from None


class SweepCallback(Callback):
    """Hydra calls this before a run, or before the first job of a multirun."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse the launcher joblib, and passwords, which Hydra would write to a file."""
        with command.aborting(*command.EXPECTED):
            jobs.refuse_joblib(config.hydra.launcher)
            address.check(config.tracking.uri or "", written=True)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Start opening the store and the parent run; end the command on an error."""
        self.on_run_start(config)
        begun = ongoing.find_ongoing()
        assert begun is not None  # by `resnet8ptq.run`, which calls Hydra
        folder = Path(config.hydra.sweep.dir).absolute()
        with command.aborting(*command.EXPECTED):
            parallel = jobs.plan(config.hydra.launcher)
            begun.sweep = _start(config, folder, parallel, command_line=begun.words)
        if parallel:  # other processes read its file
            open_running_sweep()


def _start(
    config: DictConfig, folder: Path, parallel: "ParallelJobs | None", command_line: Sequence[str]
) -> RunningSweep:
    """Check the settings before the first job, and start opening the store."""
    from resnet8ptq.sweeps import identity, search
    from resnet8ptq.tracking.mlflow_store import sender
    from resnet8ptq.tracking.sweep_file import SharedSweep

    if config.analysis.name == "inspect":
        raise ConfigError("analysis.name: got 'inspect', expected one run: leave out -m")

    # The words of the command line
    tracking = OmegaConf.to_object(config.tracking)
    limits = OmegaConf.to_object(config.report)
    # For mypy: the schema says so.
    assert isinstance(tracking, TrackingConfig) and isinstance(limits, ReportConfig)
    overrides = list(config.hydra.overrides.task)
    typed = [words.parse(word) for word in overrides]
    swept = _find_swept(config.hydra.sweeper)
    varied = swept
    if is_search(config.hydra.sweeper):
        search.check(config.hydra.sweeper, typed)
        varied = search.find_varied()
    count = _count_jobs(config.hydra.sweeper, [*swept, *typed])
    # No log is set up yet. The imports that follow take a second, or several from a cold disk.
    console.say(console.stderr(), f"{_say_jobs(config.hydra.sweeper, count)}: {folder}")
    for line in words.find_idle(config, typed, varied):
        log.warning("%s", line)
    tags = {"overrides": " ".join(overrides), "sweep_key": identity.sweep_key(overrides)}
    if parallel:
        jobs.prepare_workers()
        if parallel.at_once > 1 and config.latency.enabled:
            log.warning("%d jobs at once: every job is timed while others run", parallel.at_once)

    # Open the store in the background
    folder.mkdir(parents=True, exist_ok=True)
    held = journal.lock(folder)
    if config.sweep.resume:
        begun = _continue(tracking, folder, tags)
    else:
        begun = background.put(_begin, tracking, folder, tags)
    background.prepare(sender.warm_up)
    if parallel is None:
        with console.waiting("Loading libraries"):
            from resnet8ptq.experiment import pipeline  # noqa: F401  # meanwhile

    def open_begun() -> SharedSweep:
        store, parent_id = background.result(begun)
        return SharedSweep(
            store=store,
            parent_id=parent_id,
            folder=folder,
            parallel=parallel,
            resume=config.sweep.resume,
            jobs=count,
            varied=_find_varied([*swept, *typed]),
        )

    running = RunningSweep(
        open=open_begun,
        parallel=parallel,
        limits=limits,
        lock=held,
        jobs=count,
        words=command_line,
    )
    if is_search(config.hydra.sweeper):
        return _as_search(running, config.hydra.sweeper, folder)
    return running


def _as_search(running: RunningSweep, sweeper: DictConfig, folder: Path) -> RunningSweep:
    """Return a sweep with the goal, the file and the time limit of a search."""
    from resnet8ptq.sweeps.budget import Budget
    from resnet8ptq.sweeps.delivery import Delivery

    limit_s = 60 * sweeper.minutes
    return replace(
        running,
        goal=sweeper.goal,
        delivery=Delivery(folder),
        budget=Budget(limit_s, loading_s=time.monotonic() - clock.begun_s()),
    )


def _find_varied(overrides: Sequence[Override]) -> tuple[str, ...]:
    """Return the keys with several values, which differ between the jobs."""
    varied = []
    for override in overrides:
        if override.is_sweep_override():
            varied.append(override.key_or_group)
    return tuple(varied)


def _say_jobs(sweeper: DictConfig, count: int | None) -> str:
    """Return the number of jobs as text; for a search, its goal and its time limit."""
    if is_search(sweeper):
        return f"goal={sweeper.goal}, at most {sweeper.minutes:g} minutes"
    return f"{count or 'unknown number of'} job{'s' * (count != 1)}"


def is_search(sweeper: Any) -> bool:
    """Return whether the jobs are steps of a search, which needs the records of earlier steps."""
    return str(sweeper.get("_target_", "")).endswith(".SearchSweeper")


def _find_swept(sweeper: DictConfig) -> list[Override]:
    params = sweeper.get("params") or {}
    return [words.parse(f"{key}={value}") for key, value in params.items()]


def _count_jobs(sweeper: DictConfig, overrides: Sequence[Override]) -> int | None:
    """Return the number of jobs; None if only Hydra knows it, such as for `glob(*)`.

    The last override of a key wins.
    """
    if is_search(sweeper):
        return None
    last = {override.key_or_group: override for override in overrides}
    count = 1
    for override in last.values():
        if override.is_sweep_override():
            try:
                count *= len(list(override.sweep_string_iterator()))
            except HydraException:
                return None
    return count


def _begin(tracking: TrackingConfig, folder: Path, tags: Mapping[str, str]) -> "tuple[Store, str]":
    """Open the store and create the sweep's run; return the store and the run's id."""
    from resnet8ptq.tracking.mlflow_store.store import in_one_line, open_store
    from resnet8ptq.tracking.run import start_parent

    store = open_store(tracking)
    name = f"sweep {folder.parent.name} {folder.name}"
    with in_one_line(store):
        return store, start_parent(store, name, folder, tags)


def _continue(
    tracking: TrackingConfig, folder: Path, tags: Mapping[str, str]
) -> "Future[tuple[Store, str]]":
    """Reopen the newest sweep with the same overrides, or start a new sweep."""
    from resnet8ptq.sweeps import resume
    from resnet8ptq.tracking.mlflow_store import sync
    from resnet8ptq.tracking.mlflow_store.store import in_one_line, open_store
    from resnet8ptq.tracking.run import restart_parent

    store = background.ask(open_store, tracking)
    with in_one_line(store):
        earlier = resume.find_sweep(store, tags["sweep_key"], own=folder)
    if earlier is None:
        log.warning("sweep.resume: no earlier sweep with these overrides, code and versions")
        return background.put(_begin, tracking, folder, tags)
    print(f"Resume: continuing {earlier.name}")  # no log is set up yet
    opened: Future[tuple[Store, str]] = Future()
    with in_one_line(store):
        sync.sync(store, Path(earlier.folder), wait_s=5)
        opened.set_result((store, restart_parent(store, earlier, folder)))
    return opened
