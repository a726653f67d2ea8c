"""Quantizes, evaluates and tracks one configuration, or a sweep of them with -m; see --help."""

import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from resnet8ptq import job
from resnet8ptq.config import folders, help_page, loading, words
from resnet8ptq.core import background, command, importing
from resnet8ptq.sweep import callback
from resnet8ptq.tracking import address, store

NO_RUN = {"-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc"}
loading.register_schemas()


def run(cfg: DictConfig) -> Any:
    """Run one job; return its loss for a sweeper, or its record for the ladder."""
    settings = HydraConfig.get()
    importing.allow(Path(settings.runtime.cwd))  # a launcher may start the job in another folder
    folder = Path(settings.runtime.output_dir)
    if settings.mode == RunMode.RUN:
        with command.exit_on_error():
            record = job.run_alone(cfg, folder, settings.overrides.task)
    else:
        record = job.run_in_sweep(cfg, folder, settings)
    if record is None or callback.is_ladder(settings.sweeper):
        return record
    return record.drop


def start() -> None:
    """Check the command line, then run."""
    importing.allow(Path.cwd())
    conf, own = folders.find_conf(), folders.find_own_conf(Path.cwd())
    address.check_words(sys.argv[1:])
    sys.argv[1:] = words.arrange(sys.argv[1:], conf, own)
    if not {"-h", "--help"}.isdisjoint(sys.argv):
        return help_page.print_page(conf, sys.argv[1:], own)
    if NO_RUN.isdisjoint(sys.argv):
        background.prepare(store.import_mlflow)
    hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(run)()


def main() -> int:
    """Run the command line, which has Hydra's words; return the exit code."""
    with background.allowed():
        return command.main(start, callback.find_current)
