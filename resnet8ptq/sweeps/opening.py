"""The beginning of a sweep: checks the settings, and opens the store and the parent run."""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from resnet8ptq.config import words
from resnet8ptq.config.schema import ReportConfig, TrackingConfig
from resnet8ptq.core import background, cache, clock, console, invocation
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.sweeps import identity, jobs, parent_run, resume, search
from resnet8ptq.sweeps.budget import Budget
from resnet8ptq.sweeps.delivery import Delivery
from resnet8ptq.sweeps.running import RunningSweep, is_search
from resnet8ptq.tracking import journal
from resnet8ptq.tracking.mlflow_store import sender, sync
from resnet8ptq.tracking.sweep_file import ParallelJobs, SharedSweep

if TYPE_CHECKING:
    from resnet8ptq.tracking.mlflow_store.store import Store

log = logging.getLogger(__name__)

_SET_CACHE = {"cache_dir", "experiment"}  # if one is swept, each job may have its own cache


def open_sweep(
    config: DictConfig, folder: Path, parallel: ParallelJobs | None, command_line: Sequence[str]
) -> RunningSweep:
    """Check the settings before the first job, start opening the store, and return the sweep.

    Raises:
        ConfigError: a setting is wrong, or needs a single run.
        TrackingError: another sweep works in the folder; or with `sweep.resume`, the earlier sweep
            is still running or the store does not answer.
    """
    if config.analysis.name == "inspect":
        raise ConfigError("analysis.name: got 'inspect', expected one run: leave out -m")

    # Check the words of the command line
    tracking = OmegaConf.to_object(config.tracking)
    limits = OmegaConf.to_object(config.report)
    # The schema guarantees these types; mypy needs the assertion.
    assert isinstance(tracking, TrackingConfig) and isinstance(limits, ReportConfig)
    overrides = list(config.hydra.overrides.task)
    typed = [words.parse(word) for word in overrides]
    swept = _find_swept(config.hydra.sweeper)
    _refuse_several_limits(_find_varied([*swept, *typed]))
    varied = swept
    if is_search(config.hydra.sweeper):
        search.check(config.hydra.sweeper, typed)
        varied = search.find_varied()
    is_here = parallel is None or jobs.run_here(config.hydra.launcher)
    if is_here and _SET_CACHE.isdisjoint(_find_varied([*swept, *typed])):
        cache.check_writable(config.cache_dir)
    count = _count_jobs(config.hydra.sweeper, [*swept, *typed])

    # Print, because no log is set up yet, and the next imports take a second, or several from a
    # cold disk.
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
        begun = background.put(parent_run.begin, tracking, folder, tags)
    background.prepare(sender.warm_up)
    if parallel is None:
        with console.waiting("Loading libraries"):
            from resnet8ptq.experiment import pipeline  # noqa: F401 # opened in parallel

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
    """Return a sweep with the goal, the delivery and the time limit of a search."""
    limit_s = 60 * sweeper.minutes
    return replace(
        running,
        goal=sweeper.goal,
        delivery=Delivery(folder),
        budget=Budget(limit_s, loading_s=time.monotonic() - clock.begun_s()),
    )


def _continue(
    tracking: TrackingConfig, folder: Path, tags: Mapping[str, str]
) -> "Future[tuple[Store, str]]":
    """Reopen the newest sweep with the same overrides, code and versions, or start a new one."""
    from resnet8ptq.tracking.mlflow_store.store import in_one_line, open_store
    from resnet8ptq.tracking.run import restart_parent

    store = background.ask(open_store, tracking)
    with in_one_line(store):
        earlier = resume.find_sweep(store, tags["sweep_key"], own=folder)
    if earlier is None:
        log.warning("sweep.resume: no earlier sweep with these overrides, code and versions")
        return background.put(parent_run.begin, tracking, folder, tags)

    # Send what the earlier command left, then open its run again
    print(f"Resume: continuing {earlier.name}")  # no log is set up yet
    opened: Future[tuple[Store, str]] = Future()
    with in_one_line(store):
        sync.sync(store, Path(earlier.folder), wait_s=5)
        opened.set_result((store, restart_parent(store, earlier, folder)))
    return opened


def _find_varied(overrides: Sequence[Override]) -> tuple[str, ...]:
    """Return the keys with several values, which differ between the jobs."""
    varied = []
    for override in overrides:
        if override.is_sweep_override():
            varied.append(override.key_or_group)
    return tuple(varied)


def _refuse_several_limits(varied: Sequence[str]) -> None:
    """Raise `ConfigError` if a setting of `report` varies, because a sweep has one report."""
    for key in varied:
        if key.startswith("report."):
            again = invocation.command("report", f"{key.removeprefix('report.')}=VALUE")
            raise ConfigError(
                f"{key}: got several values, expected one for all runs of a sweep; to judge a "
                f"finished sweep by another limit: {again}"
            )


def _say_jobs(sweeper: DictConfig, count: int | None) -> str:
    """Return the number of jobs as text; for a search, its goal and its time limit."""
    if is_search(sweeper):
        plural = "s" * (sweeper.minutes != 1)
        return f"goal={sweeper.goal}, at most {sweeper.minutes:g} minute{plural}"
    return f"{count or 'unknown number of'} job{'s' * (count != 1)}"


def _find_swept(sweeper: DictConfig) -> list[Override]:
    params = sweeper.get("params") or {}
    return [words.parse(f"{key}={value}") for key, value in params.items()]


def _count_jobs(sweeper: DictConfig, overrides: Sequence[Override]) -> int | None:
    """Return the number of jobs of Hydra's own sweeper.

    Returns None for a search, and if only Hydra knows the number, as for `glob(*)`. Of several
    overrides of a key, only the last has an effect.
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
