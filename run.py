"""Quantize, evaluate and track one configuration, or with -m a sweep of them; see --help."""

import logging
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from resnet8ptq import cli, search
from resnet8ptq.config import parse_config, register_schemas

if TYPE_CHECKING:  # --help and --cfg answer without them
    from resnet8ptq.results import RunResult
    from resnet8ptq.tracking import Store

log = logging.getLogger(__name__)

register_schemas()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(cfg: DictConfig) -> float | list[float] | None:
    """Run one job; return what sweepers want to know of it."""
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    if job.mode == RunMode.MULTIRUN:
        result = run_in_sweep(cfg, folder, Path(job.sweep.dir))
    else:
        with cli.exit_on_error():
            result = run_alone(cfg, folder)
    return search.to_return_value(result, cfg.objectives)


def run_alone(cfg: DictConfig, folder: Path) -> "RunResult":
    """Run, and show the result beside its baseline."""
    from resnet8ptq import table, tracking

    config = parse_config(cfg)  # before the store is opened: a typo leaves no run behind
    store = tracking.open_store(config.tracking)
    result, run_id = record(cfg, folder, store)
    if config.analysis.name is None:  # an analysis has printed its own table
        table.print_table([tracking.load_run(store, run_id)])
    table.print_places(folder, store)
    return result


def run_in_sweep(cfg: DictConfig, folder: Path, sweep_folder: Path) -> "RunResult":
    """Run as a child of the sweep's parent run; a wrong setting is on record like any failure."""
    from resnet8ptq import jobs
    from resnet8ptq.sweep import Sweep

    sweep = Sweep.load(sweep_folder)
    hydra_config = HydraConfig.get()
    tags = {
        "job_number": str(hydra_config.job.num),
        "jobs_at_once": str(sweep.jobs),
        "job_overrides": shlex.join(hydra_config.overrides.task),
    }
    if sweep.jobs > 1:
        jobs.enter_worker()
        cfg.threads = jobs.share_threads(cfg.threads, sweep.jobs)
    try:
        return record(cfg, folder, sweep.store, sweep.parent_id, tags)[0]
    except Exception as error:
        log.error("%s: failed: %s", folder.name, cli.one_line(error))
        if sweep.jobs > 1:
            raise jobs.to_picklable(error) from None
        raise


def record(
    cfg: DictConfig,
    folder: Path,
    store: "Store",
    parent_id: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> tuple["RunResult", str]:
    """Run inside an MLflow run, with `tags`; return the result and that run's id."""
    from resnet8ptq import tracking
    from resnet8ptq.pipeline import run_experiment
    from resnet8ptq.sensitivity import run_analysis

    granularity = "per_channel" if cfg.per_channel else "per_tensor"
    backend = "torch_pt2e" if cfg.backend.get("flow") == "pt2e" else cfg.backend.name
    calibration = cfg.calib.name if cfg.method == "static" else cfg.method
    name = "-".join([backend, cfg.dtype.name, calibration, granularity])
    if cfg.analysis.name is not None:
        name += f"-{cfg.analysis.name}"
    log.info("%s: started", name)
    composed = OmegaConf.to_container(cfg, resolve=True)
    with tracking.start_run(store, name, composed, folder, parent_id, tags) as mlflow_run:
        config = parse_config(cfg)
        experiment = run_experiment if config.analysis.name is None else run_analysis
        result = experiment(config, folder, mlflow_run)
        log.info("%s: %s", name, result.summary())  # before the run's log is uploaded
    return result, mlflow_run.run_id


if __name__ == "__main__":
    sys.exit(cli.main(run))
