"""One job: alone, or in a sweep."""

import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from resnet8ptq.config import effect, words
from resnet8ptq.config.loading import parse_config
from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import background, command
from resnet8ptq.core.errors import ConfigError, PtqError
from resnet8ptq.core.registry import look_up

if TYPE_CHECKING:  # --help and --cfg answer without them
    from resnet8ptq.tracking.history import Record
    from resnet8ptq.tracking.store import Store

log = logging.getLogger(__name__)


def run_alone(cfg: DictConfig, folder: Path, overrides: Sequence[str]) -> "Record | None":
    """Run, and show the result beside its baseline; None for an inspection, which records none.

    Args:
        overrides: what was set on the command line.
    """
    _settle_choice(cfg, several=False)
    config = parse_config(cfg)  # before the store is opened: a typo leaves no run behind
    _check_machine(config)
    for line in effect.find_idle(cfg, [words.parse(word) for word in overrides]):
        log.warning("%s", line)
    if config.analysis.name == "inspect":
        check_names(config)
        from resnet8ptq.experiment.inspecting import run_inspection

        named = any(word.lstrip("+").startswith(("data=", "data.")) for word in overrides)
        run_inspection(config, data_given=named or config.data.name != "cifar10")
        return None
    if config.sweep.resume:
        raise ConfigError("sweep.resume: got true, takes a sweep: -m, or an experiment")
    from resnet8ptq.tracking import mirror
    from resnet8ptq.tracking.store import find_store, open_store

    _check_files(config)  # before there is a run that could fail
    opening = background.put(open_store, config.tracking)
    background.prepare(mirror.warm_up)
    check_names(config)  # meanwhile, as what follows
    from resnet8ptq.experiment import pipeline  # noqa: F401
    from resnet8ptq.report import comparison, table, verdicts

    tags = identify(cfg)
    # Whatever is wrong with a store that was there before, `background.wait` tells at the end.
    store = find_store(config.tracking) or background.result(opening)
    done = record(cfg, folder, store, tags=tags)
    if config.analysis.name is None:  # an analysis has printed its own table
        families = comparison.load(store, [done])
        table.print_table([done], judged=verdicts.in_words(families, config.report))
    table.print_places(folder, store)
    background.wait()
    return done


def run_in_sweep(cfg: DictConfig, folder: Path, settings: HydraConf) -> "Record":
    """Run as a child of the sweep's parent run; a wrong setting is recorded like any failure.

    Args:
        settings: Hydra's own: the sweep's folder, the job's number and overrides.
    """
    from resnet8ptq.sweep import callback, jobs, resume
    from resnet8ptq.tracking.sweep_file import Sweep

    begun = callback.find_current() or Sweep.load(Path(settings.sweep.dir))
    number = settings.job.num
    if begun.worker:
        jobs.enter(begun.worker)
    _settle_choice(cfg, begun.several)
    at_once = begun.worker.at_once if begun.worker else 1
    tags = {"job_number": str(number), "jobs_at_once": str(at_once)}
    tags |= {"job_overrides": shlex.join(settings.overrides.task), **identify(cfg)}
    sweep = begun if isinstance(begun, Sweep) else callback.open_current()
    try:
        again = bool(cfg.objectives)  # a search proposes some configurations more than once
        if finished := resume.find_finished(sweep, number, tags.get("identity"), again):
            log.info("%s: skipped, finished as run %s", folder.name, finished.run_id)
            return finished
        if sweep.worker and cfg.threads is None:
            cfg.threads = sweep.worker.threads
        earlier = resume.find_attempts(sweep, number)
        return record(cfg, folder, sweep.store, sweep.parent_id, tags, earlier)
    except Exception as error:
        log.error("%s: failed: %s", folder.name, command.one_line(error))
        if sweep.worker:
            raise jobs.to_picklable(error) from None
        raise


def _settle_choice(cfg: DictConfig, several: bool) -> None:
    """Choose by nothing where there is nothing to choose: one run costs no more for it."""
    if cfg.evaluate.choice == "auto" and not several:
        cfg.evaluate.choice = "none"


def _check_files(config: RunConfig) -> None:
    """Raise `PtqError` where network or data are missing or something else; a suite has its own."""
    if config.benchmark.name is None:
        from resnet8ptq.data import locate as data
        from resnet8ptq.models import locate as networks

        settled = data.settle(config.data, quiet=True)
        networks.locate(config.model, settled.name)


def _check_machine(config: RunConfig) -> None:
    """Raise `ConfigError` for more threads than this machine has CPUs."""
    words.check_threads("threads", config.threads)
    words.check_threads("latency.threads", config.latency.threads)


def check_names(config: RunConfig) -> None:
    """Raise `ConfigError` for a backend, data set, task or calibration that there is not."""
    from resnet8ptq.backends.registry import BACKENDS
    from resnet8ptq.calibration.methods import find_method
    from resnet8ptq.data.registry import SOURCES
    from resnet8ptq.tasks.registry import AUTO, TASKS

    look_up("backend.name", config.backend.name, BACKENDS)
    look_up("data.name", config.data.name, SOURCES)
    look_up("task.name", config.task.name, {AUTO: "", **TASKS})
    find_method(config.calib.name)


def identify(cfg: DictConfig) -> dict[str, str]:
    """Return the tag that identifies the run; empty where its settings or files are wrong.

    The run then fails, and records what is wrong with them.
    """
    from resnet8ptq.sweep import identity

    try:
        return {"identity": identity.find(parse_config(cfg))}
    except (PtqError, OSError):
        return {}


def record(
    cfg: DictConfig,
    folder: Path,
    store: "Store",
    parent_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    earlier: Sequence["Record"] = (),
) -> "Record":
    """Run inside an MLflow run, with `tags`, in the place of `earlier` ones; return its record."""
    from resnet8ptq.experiment.analyses import run_analysis
    from resnet8ptq.experiment.pipeline import run_experiment
    from resnet8ptq.tracking.run import replace_runs, start_run

    parts = (
        cfg.benchmark.name,
        Combination.of_config(cast(RunConfig, cfg)).name,
        cfg.analysis.name,
    )
    name = "-".join(filter(None, parts))
    log.info("%s: started", name)
    composed = OmegaConf.to_container(cfg, resolve=True)
    with start_run(store, name, composed, folder, parent_id, tags) as opened:
        replace_runs(store, earlier, opened)
        config = parse_config(cfg)
        _check_machine(config)
        experiment = run_experiment if config.analysis.name is None else run_analysis
        result = experiment(config, folder, opened)
        log.info("%s: %s", name, result.summary())  # before the run's log is uploaded
    return opened.record
