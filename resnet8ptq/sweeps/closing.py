"""The end of a sweep: compares, times and reports the runs, and closes the parent run."""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from resnet8ptq.config.words import key_of
from resnet8ptq.core import background, console, invocation
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.text import one_line
from resnet8ptq.evaluation import paired_latency
from resnet8ptq.report import loading, mlperf_tiny, terminal
from resnet8ptq.report.families import Family, all_records
from resnet8ptq.report.pages import page, run_pages
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.report.selection import select
from resnet8ptq.sweeps import final_timing, parent_run, winner
from resnet8ptq.sweeps.running import RunningSweep
from resnet8ptq.tracking import history
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import sync, upload
from resnet8ptq.tracking.record import RunRecord

log = logging.getLogger(__name__)


def close(running: RunningSweep, status: str) -> int:
    """Print the comparison, write it to the folder and the parent run, and close that run.

    Args:
        status: the status of the sweep's end: `ok`, `failed` or `killed`.

    Returns:
        The exit code: 1 if the sweep failed or was killed, if an upload failed, or, unless it is
        a search, if a job failed. Otherwise 0, or the exit code of `winner.announce` for a search.

    Raises:
        TrackingError: the store is unavailable (the runs are in the sweep's folder), or the
            report failed (the sweep's run is closed).
        KeyboardInterrupt: the report was interrupted; the message names the command for it.
    """
    store = running.shared.store
    parent_id = running.shared.parent_id
    folder = running.shared.folder
    records: list[RunRecord] = []
    chosen: list[ModelSelection] = []
    failure: BaseException | None = None
    code: int | None = None  # the exit code of a search

    # Wait for the last uploads
    try:
        with console.waiting("Sending the runs to MLflow"):
            background.wait()
    except TrackingError as error:
        log.error("%s", error)
        if status == "ok":
            status = "failed"

    # Compare the runs, and write the report
    try:
        records += background.ask(parent_run.collect, running.shared)
        is_timed = status != "killed" and not running.is_search
        chosen = _print_comparison(running, records, timed=is_timed)
        code = _announce(running, chosen, status)  # the report may take long
        _write_report(running, records, chosen)
    except (Exception, KeyboardInterrupt) as error:  # raised after the sweep is closed
        failure = error

    # Close the sweep's run
    if status == "killed":
        done = records or sync.load_records(folder)
        print(_how_far(done, running.jobs, running.words), file=sys.stderr)
    # A job may fail without Hydra's knowledge, because another package's sweeper may continue.
    has_failed = any(record.status == "failed" for record in records)
    if status == "ok" and not running.is_search and has_failed:
        status = "failed"
    away = background.ask(parent_run.end, store, parent_id, status, folder)
    if away:
        done = sync.load_records(folder)
        terminal.print_families(loading.without_files(done, running.limits))
        if code is None:
            _announce(running, chosen, status)
        raise TrackingError(
            f"the tracking store does not answer ({away[:200]}); the runs are kept in "
            f"{folder}; try `{invocation.command('sync', f'folder={folder}', *store.words)}` "
            "when it is back"
        )

    # Print the paths, then the answer
    if records:
        terminal.print_paths(folder, store)
        if not running.is_search:
            terminal.print_answers(chosen)
    if code is None:
        code = _announce(running, chosen, status)
    if failure is not None:
        again = invocation.command("report", f"run_id={parent_id}", *store.words)
        if isinstance(failure, KeyboardInterrupt):
            raise KeyboardInterrupt(f"the report was not written; try `{again}`")
        raise TrackingError(
            f"the report could not be made ({one_line(failure)}); try `{again}`"
        ) from failure
    if running.goal and status == "ok":
        return code
    return int(status != "ok")


def _print_comparison(
    running: RunningSweep, records: list[RunRecord], timed: bool
) -> list[ModelSelection]:
    """Assess the runs and print their table; return the models of each family to choose from.

    Args:
        timed: whether to time the best models against each other first.
    """
    store = running.shared.store
    folder = running.shared.folder
    if not records:
        return []
    try:
        families = loading.add_earlier_runs(store, loading.load_families(store, records))
    except Exception:  # an artifact is missing, but not the metrics
        terminal.print_families(loading.without_files(records, running.limits))
        raise
    with console.waiting("Comparing the runs"):
        chosen = select(families, running.limits)
    if timed:  # time them before the table, which shows these latencies
        timings = final_timing.time_finalists(chosen, folder)
        chosen = select(families, running.limits, timings)

    # Print only what a search has not printed after each step
    shown = []
    for selected in chosen:
        family = selected.family
        if running.is_search:
            family = family.without_held_out()
        if family.cells and not _is_logged(running, family):
            shown.append(family)
    if shown:
        terminal.print_families(shown)
    runs = all_records(shown)
    if mlperf_tiny.is_suite(runs):
        mlperf_tiny.print_suite(runs)
    return chosen


def _is_logged(running: RunningSweep, family: Family) -> bool:
    """Return whether the log has a whole family: each run failed with a logged reason."""
    for record in family.records:
        if record.status != "failed" or record.reason not in running.failures:
            return False
    return True


def _announce(running: RunningSweep, chosen: list[ModelSelection], status: str) -> int:
    """Print the winner of a search, also after an error or Ctrl-C; return its exit code.

    The code is 0 for any other sweep, and for a search that failed before it measured a model.
    """
    if running.goal is None or running.delivery is None:
        return 0
    if status == "failed" and running.delivery.record is None:
        return 0  # the error says why there is no model
    return winner.announce(chosen, running.delivery, running.goal)


def _write_report(
    running: RunningSweep, records: list[RunRecord], chosen: list[ModelSelection]
) -> None:
    """Write the report to the folder and the parent run, and log the final timings.

    For a search that is late, no report is drawn. The function then logs the verdicts, and prints
    the command that draws the report.
    """
    store = running.shared.store
    parent_id = running.shared.parent_id
    folder = running.shared.folder
    if _is_late(running):
        again = invocation.command("report", f"run_id={parent_id}", *store.words)
        print(f"The report would end after the time limit, and is not drawn; to draw it: {again}")
        run_pages.log_answers(store, parent_id, chosen)
    elif records or _has_analyses(running):
        with console.waiting("Drawing the report"):
            page.write_report(store, parent_id, chosen, folder)

    # Name the runs that were not repeated, and keep the final timings
    if running.shared.resume:
        skipped = sum(_is_earlier(running, record) for record in records)
        print(f"Skipped: {skipped} of {len(records)} runs had finished before")
    timings_file = folder / paired_latency.FILE
    if timings_file.exists():
        background.ask(upload.log_files, store, parent_id, [timings_file])


def _is_late(running: RunningSweep) -> bool:
    """Return whether a search is late, so that its report is not drawn."""
    spent_s = time.monotonic() - running.command_begun_s
    return running.budget is not None and not running.budget.has_time_to_draw(spent_s)


def _has_analyses(running: RunningSweep) -> bool:
    """Return whether an analysis of the sweep has a result, which the report shows."""
    runs = background.ask(history.load_children, running.shared.store, running.shared.parent_id)
    return any(run.is_analysis and run.status == "ok" for run in runs)


def _is_earlier(running: RunningSweep, record: RunRecord) -> bool:
    """Return whether a run ended before this command; a run outside the sweep's folder did."""
    if running.shared.folder not in Path(record.folder).parents:
        return True
    begun = time.time() - (time.monotonic() - running.command_begun_s)
    try:
        ended_ms = Journal.load(Path(record.folder)).end_ms
    except TrackingError:  # the folder was removed, but the store has the run
        return True
    return ended_ms is not None and ended_ms < 1000 * begun


def _how_far(records: Sequence[RunRecord], jobs: int | None, typed: Sequence[str]) -> str:
    """Return the number of finished runs of an interrupted sweep, and the command to continue.

    Args:
        typed: the command and its words, such as `ship goal=best`.
    """
    count = sum(record.finished for record in records)
    finished = f"{count} run{'s' * (count != 1)}"
    if jobs is not None:
        finished = f"{count} of {jobs} runs"
    name, *settings = typed
    kept = [word for word in settings if key_of(word) != "sweep.resume"]
    again = invocation.command(name, *kept, "sweep.resume=true")
    return f"{finished} finished; continue: {again}"
