"""Runs one job, alone or in a sweep: resolves its settings, and opens its MLflow run."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.conf import HydraConf

from resnet8ptq.config import loading, words
from resnet8ptq.config.naming import name_run, name_varied
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import background, command, console, invocation
from resnet8ptq.core.descriptor import FILE
from resnet8ptq.core.errors import ConfigError, PtqError, UnsupportedError

if TYPE_CHECKING:  # --help and --cfg need none of these
    from resnet8ptq.experiment.settings import Settings, Unresolved
    from resnet8ptq.report.single_run import SingleRun
    from resnet8ptq.tracking.mlflow_store.store import Store
    from resnet8ptq.tracking.record import RunRecord

log = logging.getLogger(__name__)


def run_alone(asked: RunConfig, folder: Path, overrides: Sequence[str]) -> "SingleRun | None":
    """Run a single job; return its ended run, or None for an inspection, which records nothing.

    Args:
        asked: the settings, not checked yet.
        overrides: the settings of the command line.

    Raises:
        ConfigError: a setting is wrong, or needs a sweep.
        PtqError, OSError: a file is missing or damaged, or the store cannot be opened.
        Exception: see `run_recorded`.
    """
    loading.check_here(asked)  # before the store is opened, so that a typo leaves no run
    typed = [words.parse(word) for word in overrides]
    for line in words.find_idle(asked, typed):
        log.warning("%s", line)
    with console.waiting("Loading libraries"):
        from resnet8ptq import dispatch
        from resnet8ptq.experiment.settings import Unresolved, resolve, resolve_to_inspect
        from resnet8ptq.sweeps import identity
    if asked.analysis.name == "inspect":
        named = any(word.lstrip("+").startswith(("data=", "data.")) for word in overrides)
        dispatch.inspect(resolve_to_inspect(asked), named or asked.data.name != "cifar10")
        return None
    if asked.sweep.resume:
        raise ConfigError("sweep.resume: got true, expected a sweep: -m, or an experiment")

    # Read the inputs before anything is recorded
    from resnet8ptq.tracking.mlflow_store import sender
    from resnet8ptq.tracking.mlflow_store.store import find_store, open_store

    log.info("run: %s", folder)
    settings: Settings | Unresolved
    try:  # a wrong path, network or data set leaves no store and no run
        settings = resolve(asked, jobs=1)
    except UnsupportedError as reason:
        settings = Unresolved(asked, reason)
    else:
        _ = settings.data  # reads and keeps the data set, so that a damaged one fails here
    opening = background.put(open_store, asked.tracking)
    background.prepare(sender.warm_up)
    with console.waiting("Loading libraries"):
        from resnet8ptq.experiment import pipeline  # noqa: F401  # while the store opens
        from resnet8ptq.report.single_run import SingleRun

    tags = identity.tag(settings)
    # If `find_store` returns a store, `background.wait` reports the store's errors at the end.
    with console.waiting("Opening the MLflow store"):
        store = find_store(asked.tracking) or background.result(opening)
    background.name_store(store.words)
    return SingleRun(run_recorded(settings, folder, store, tags=tags), store, asked.report)


def run_in_sweep(asked: RunConfig, folder: Path, hydra: HydraConf) -> "RunRecord":
    """Run a job as a child of the sweep's parent run.

    A wrong setting is recorded as a failed run, and its error is raised.

    Args:
        asked: the settings, not checked yet.
        hydra: Hydra's settings: the sweep's folder, the job's number and overrides.

    Returns:
        The record of the run; or of a finished run that the job would repeat.
    """
    from resnet8ptq.sweeps import jobs, running
    from resnet8ptq.tracking.sweep_file import SharedSweep

    # The process that began the sweep has a `RunningSweep`, whose store may still be opening. A
    # worker has the `SharedSweep` of the sweep's file.
    begun = running.find_running_sweep() or SharedSweep.load(Path(hydra.sweep.dir))
    number = hydra.job.num
    threads = None
    at_once = 1
    if begun.parallel:
        jobs.enter(begun.parallel)
        threads = begun.parallel.threads
        at_once = begun.parallel.at_once
    with console.waiting("Loading libraries"):
        from resnet8ptq.experiment.settings import Unresolved, fill_threads, resolve
        from resnet8ptq.sweeps import identity, resume

    # A wrong setting becomes the result of the run
    settings: Settings | Unresolved
    try:
        loading.check_here(asked)
        settings = resolve(asked, begun.jobs, threads)
    except (PtqError, OSError) as error:
        settings = Unresolved(fill_threads(asked, threads), error)
    tags = {
        "job_number": str(number),
        "jobs_at_once": str(at_once),
        "job_overrides": invocation.shell(*hydra.overrides.task),
        **identity.tag(settings),  # reads the data and hashes the network
    }

    # From here on, the sweep's store must be open
    left_s = None
    if isinstance(begun, SharedSweep):
        sweep = begun
    else:
        left_s = begun.seconds_left(number)
        sweep = running.open_running_sweep()
    try:
        # A sweep over backend.path repeats the jobs of other backends, which do not read the path.
        repeated = asked.backend.name != FILE and asked.backend.path is not None
        finished = resume.find_finished(sweep, number, tags.get("identity"), repeated)
        if finished:
            log.info("%s: skipped, finished as run %s", folder.name, finished.run_id)
            return finished
        earlier = resume.find_attempts(sweep, number)
        _log_progress(number, begun.jobs, left_s)
        return run_recorded(
            settings,
            folder,
            sweep.store,
            parent_id=sweep.parent_id,
            tags=tags,
            earlier=earlier,
            varied=name_varied(hydra.overrides.task, sweep.varied),
        )
    except Exception as error:
        reason = command.explain(error)
        if not isinstance(begun, SharedSweep):
            reason = begun.shorten(reason, folder.name)
        log.error("%s: failed: %s", folder.name, reason)
        if sweep.parallel:
            raise jobs.to_picklable(error) from None
        raise


def _log_progress(number: int, jobs: int | None, left_s: float | None) -> None:
    if jobs is None or jobs < 2:
        return
    left = ""
    if left_s is not None:
        left = f", about {math.ceil(left_s / 10) * 10} s left"
    log.info("job %d of %d%s", number + 1, jobs, left)


def run_recorded(
    settings: "Settings | Unresolved",
    folder: Path,
    store: "Store",
    parent_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    earlier: Sequence["RunRecord"] = (),
    varied: str = "",
) -> "RunRecord":
    """Run the job inside an MLflow run with `tags`; return the record of the run.

    Args:
        parent_id: the id of the sweep's run; None for a single run.
        earlier: unfinished runs of the job, which this run replaces.
        varied: the result of `name_varied`; empty for a single run.

    Raises:
        PtqError, OSError: a setting or an input is wrong; the run is recorded as failed.
        Exception: the job fails, by any error; the run is recorded as failed.
        TrackingError: another run works in the folder; nothing is recorded.
    """
    from resnet8ptq import dispatch
    from resnet8ptq.evaluation.result import RunResult
    from resnet8ptq.experiment.settings import Unresolved
    from resnet8ptq.tracking.run import replace_runs, start_run

    name = name_run(settings.asked, varied)
    log.info("%s: started", name)
    with start_run(store, name, folder, parent_id, tags) as opened:
        replace_runs(store, earlier, opened)
        if isinstance(settings, Unresolved):
            opened.log_config(settings.asked)
            # The input is wrong, such as a missing file
            if not isinstance(settings.error, UnsupportedError):
                raise settings.error
            result = RunResult("unsupported", str(settings.error))
            opened.log_result(result)
        else:
            result = dispatch.run_or_analyse(settings, folder, opened)
        log.info("%s: %s", name, result.summary())  # logged before the run's log is uploaded
    if parent_id is None:
        opened.wait_for_id()  # a fast run may end before the store has named it
    return opened.record
