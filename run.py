"""Quantizes, evaluates and tracks one configuration, or a sweep of them with -m; see --help."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from resnet8ptq import job
from resnet8ptq.config import help_page, loading, words
from resnet8ptq.core import background, command
from resnet8ptq.sweep import callback
from resnet8ptq.sweep.objectives import to_return_value
from resnet8ptq.tracking import address, store

NO_RUN = {"-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc"}
CONF = Path(__file__).parent / "conf"
loading.register_schemas()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(cfg: DictConfig) -> float | list[float] | None:
    """Run one job; return the values that a search optimizes."""
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    if settings.mode == RunMode.RUN:
        with command.exit_on_error():
            record = job.run_alone(cfg, folder, settings.overrides.task)
    else:
        record = job.run_in_sweep(cfg, folder, settings)
    return None if record is None else to_return_value(record, cfg.objectives)


def start() -> None:
    """Check the words of the command line, then run."""
    address.check_words(sys.argv[1:])
    sys.argv[1:] = words.arrange(sys.argv[1:], CONF)
    if not {"-h", "--help"}.isdisjoint(sys.argv):
        return help_page.print_page(CONF, sys.argv[1:])
    if NO_RUN.isdisjoint(sys.argv):
        background.prepare(store.import_mlflow)
    run()


if __name__ == "__main__":
    with background.allowed():
        code = command.main(start, callback.find_current)
    sys.exit(code)
