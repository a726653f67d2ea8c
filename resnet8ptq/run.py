"""Quantize, evaluate and track one configuration, or with -m a sweep of them; see --help."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from resnet8ptq import job
from resnet8ptq.config import folders, loading, words
from resnet8ptq.core import background, command, importing
from resnet8ptq.sweep import callback
from resnet8ptq.sweep.objectives import to_return_value
from resnet8ptq.tracking import address, store

ASKS = {"-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc"}
loading.register_schemas()


def run(cfg: DictConfig) -> float | list[float] | None:
    """Run one job; return what sweepers want to know of it."""
    settings = HydraConfig.get()
    importing.allow(Path(settings.runtime.cwd))  # a launcher may start the job in another folder
    folder = Path(settings.runtime.output_dir)
    if settings.mode == RunMode.RUN:
        with command.exit_on_error():
            done = job.run_alone(cfg, folder, settings.overrides.task)
    else:
        done = job.run_in_sweep(cfg, folder, settings)
    return None if done is None else to_return_value(done, cfg.objectives)


def start() -> None:
    """Check the words of the command line, and run."""
    conf, current = folders.find_conf(), Path.cwd()
    importing.allow(current)
    address.check_words(sys.argv[1:])
    sys.argv[1:] = words.arrange(sys.argv[1:], conf, folders.find_own_conf(current))
    if ASKS.isdisjoint(sys.argv):
        background.prepare(store.import_mlflow)
    hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(run)()


def main() -> int:
    """Answer the command line, which has the words of Hydra; return the exit code."""
    with background.allowed():
        return command.main(start, callback.find_current)
