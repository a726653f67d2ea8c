"""Runs one job, alone or in a sweep: locates its files, and opens its MLflow run."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from resnet8ptq.config import words
from resnet8ptq.config.loading import parse_config
from resnet8ptq.config.naming import Combination, name_varied
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import background, command, console, invocation
from resnet8ptq.core.descriptor import FILE
from resnet8ptq.core.errors import ConfigError, PtqError, UnsupportedError

if TYPE_CHECKING:  # --help and --cfg answer without them
    from resnet8ptq.experiment.settings import Settings
    from resnet8ptq.tracking.record import RunRecord
    from resnet8ptq.tracking.store import Store

log = logging.getLogger(__name__)


def run_alone(cfg: DictConfig, folder: Path, overrides: Sequence[str]) -> "RunRecord | None":
    """Run, and print the result and its baseline; return None for an inspection.

    `overrides` are the settings of the command line.
    """
    config = parse_config(cfg)  # before the store is opened: a typo leaves no run
    for line in words.find_idle(cfg, [words.parse(word) for word in overrides]):
        log.warning("%s", line)
    if config.analysis.name == "inspect":
        from resnet8ptq.experiment.inspection import run_inspection

        named = any(word.lstrip("+").startswith(("data=", "data.")) for word in overrides)
        run_inspection(config, data_given=named or config.data.name != "cifar10")
        return None
    if config.sweep.resume:
        raise ConfigError("sweep.resume: got true, expected a sweep: -m, or an experiment")
    from resnet8ptq.tracking import sender
    from resnet8ptq.tracking.store import find_store, open_store

    log.info("run: %s", folder)
    settings: Settings | Exception
    try:  # a wrong path, network or data set leaves no store and no run
        settings = _resolve(config, jobs=1)
    except UnsupportedError as reason:
        settings = reason
    else:
        _read_data(settings)
    opening = background.put(open_store, config.tracking)
    background.prepare(sender.warm_up)
    with console.waiting("Loading libraries"):
        from resnet8ptq.experiment import pipeline  # noqa: F401  # while the store opens
        from resnet8ptq.report import comparison, run_pages, terminal, verdicts
        from resnet8ptq.report.recommend import ModelSelection

    tags = identify(settings)
    # If `find_store` returns a store, `background.wait` reports its errors at the end.
    with console.waiting("Opening the MLflow store"):
        store = find_store(config.tracking) or background.result(opening)
    background.name_store(store.words)
    done = run_recorded(cfg, settings, folder, store, tags=tags)
    if config.analysis.name is None:  # an analysis has printed its own table
        families = comparison.count_looks(store, comparison.load(store, [done]))
        judged = [verdicts.judge(family, config.report) for family in families]
        terminal.print_runs(judged)
        run_pages.write(store, [ModelSelection(family) for family in judged])
    terminal.print_paths(folder, store)
    print(f"Run:    {done.run_id}")
    is_model = config.analysis.name is None and config.backend.quantizes
    if is_model and done.status == "ok" and not done.doubt:
        print(f"Deploy: {invocation.command('deploy', f'run_id={done.run_id}', *store.words)}")
    with console.waiting("Sending the run to MLflow"):
        background.wait()
    return done


def _read_data(settings: "Settings") -> None:
    """Read the data, which stay in this process for the run."""
    from resnet8ptq.data import registry

    config = settings.config
    root = settings.runtime.cache_root
    registry.read(config.data, config.preprocess, root, config.calib.images)


def run_in_sweep(cfg: DictConfig, folder: Path, settings: HydraConf) -> "RunRecord":
    """Run as a child of the sweep's parent run; a wrong setting is recorded as a failed run.

    Args:
        settings: Hydra's settings: the sweep's folder, the job's number and overrides.
    """
    from resnet8ptq.sweeps import callback, jobs, resume
    from resnet8ptq.tracking.sweep_file import Sweep

    begun = callback.find_current() or Sweep.load(Path(settings.sweep.dir))
    number = settings.job.num
    if begun.worker:
        jobs.enter(begun.worker)
    threads = begun.worker.threads if begun.worker else None
    settled: Settings | Exception
    try:
        settled = _resolve(parse_config(cfg), begun.jobs, threads)
    except (PtqError, OSError) as error:
        settled = error
    at_once = begun.worker.at_once if begun.worker else 1
    tags = {"job_number": str(number), "jobs_at_once": str(at_once)}
    tags |= {"job_overrides": invocation.shell(*settings.overrides.task), **identify(settled)}
    left_s = None if isinstance(begun, Sweep) else begun.seconds_left(number)
    sweep = begun if isinstance(begun, Sweep) else callback.open_current()
    try:
        # A sweep over backend.path repeats the jobs of other backends, which do not read it.
        repeated = bool(cfg.backend.name != FILE and cfg.backend.path)
        if finished := resume.find_finished(sweep, number, tags.get("identity"), repeated):
            log.info("%s: skipped, finished as run %s", folder.name, finished.run_id)
            return finished
        earlier = resume.find_attempts(sweep, number)
        _log_progress(number, begun.jobs, left_s)
        return run_recorded(
            cfg,
            settled,
            folder,
            sweep.store,
            sweep.parent_id,
            tags,
            earlier,
            threads,
            name_varied(settings.overrides.task, sweep.varied),
        )
    except Exception as error:
        reason = command.explain(error)
        if not isinstance(begun, Sweep):
            reason = begun.shorten(reason, folder.name)
        log.error("%s: failed: %s", folder.name, reason)
        if sweep.worker:
            raise jobs.to_picklable(error) from None
        raise


def _log_progress(number: int, jobs: int | None, left_s: float | None) -> None:
    left = "" if left_s is None else f", about {math.ceil(left_s / 10) * 10} s left"
    if jobs is not None and jobs > 1:
        log.info("job %d of %d%s", number + 1, jobs, left)


def _resolve(asked: RunConfig, jobs: int | None, threads: int | None = None) -> "Settings":
    """Return the settings with located files; see `fill_defaults`."""
    with console.waiting("Loading libraries"):
        from resnet8ptq.experiment.settings import resolve

    words.check_threads("threads", asked.threads)
    words.check_threads("latency.threads", asked.latency.threads)
    return resolve(asked, jobs, threads)


def identify(settings: "Settings | Exception") -> dict[str, str]:
    """Return the run's `identity` tag; empty if its settings or files are wrong.

    The run then fails, and records the error.
    """
    from resnet8ptq.sweeps import identity

    if isinstance(settings, Exception):
        return {}
    try:
        return {"identity": identity.find(settings)}
    except (PtqError, OSError):
        return {}


def run_recorded(
    cfg: DictConfig,
    settings: "Settings | Exception",
    folder: Path,
    store: "Store",
    parent_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    earlier: Sequence["RunRecord"] = (),
    threads: int | None = None,
    varied: str = "",
) -> "RunRecord":
    """Run the job inside an MLflow run with `tags`; the run replaces the `earlier` runs.

    Returns:
        The record of the run.

    Args:
        cfg: the composed config, which names the run and is logged if the run fails early.
        settings: the located settings; an error fails the run.
        threads: the default of `threads`, which a failed run logs too.
        varied: further settings in the run's name.
    """
    from resnet8ptq.evaluation.result import RunResult
    from resnet8ptq.experiment import running
    from resnet8ptq.tracking.run import replace_runs, start_run

    combination = Combination.of_config(cast(RunConfig, cfg)).name
    name = "-".join(filter(None, (cfg.benchmark.name, combination, cfg.analysis.name)))
    name = f"{name} {varied}".rstrip()
    log.info("%s: started", name)
    composed = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    if cfg.threads is None:
        composed = {**composed, "threads": threads}
    with start_run(store, name, composed, folder, parent_id, tags) as opened:
        replace_runs(store, earlier, opened)
        if isinstance(settings, UnsupportedError):  # such as a missing file
            result = RunResult("unsupported", str(settings))
            opened.log_composed()
            opened.log_result(result)
        elif isinstance(settings, Exception):
            raise settings
        else:
            result = running.run(settings, folder, opened)
        log.info("%s: %s", name, result.summary())  # before the run's log is uploaded
    return opened.record
