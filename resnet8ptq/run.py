"""The command `resnet8ptq run`: checks a command line, and lets Hydra run its job or jobs."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import version
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from resnet8ptq import job
from resnet8ptq.config import folders, help_page, loading, words
from resnet8ptq.core import background, command, importing, invocation
from resnet8ptq.experiment import path_words
from resnet8ptq.sweeps import ongoing, running
from resnet8ptq.tracking.mlflow_store import address, store

if TYPE_CHECKING:
    from resnet8ptq.tracking.record import RunRecord

NO_RUN = {"-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc"}
loading.register_schemas()
# Set this before torch is imported. By default, torch's threads wait for each other in a busy loop
# for a long time; with another program on the CPU, learned rounding then takes nearly twice the
# time.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@dataclass(frozen=True)
class CommandResult:
    """The outcome of a command line.

    Attributes:
        ending: the exit code, and the first error or interrupt, if any.
        record: the record of a single run that ended without an error; None without one.
        sweep_folder: the folder of a sweep that has begun; None without one.
    """

    ending: command.Ending
    record: "RunRecord | None" = None
    sweep_folder: Path | None = None


def execute(
    typed: Sequence[str],
    report: Callable[[Exception], int] = command.print_error,
    command_line: Sequence[str] | None = None,
) -> CommandResult:
    """Execute a command line of `resnet8ptq run`, and print its output.

    Errors and Ctrl-C are reported and returned, not raised.

    Args:
        typed: the words after `resnet8ptq run`.
        report: see `command.finish`.
        command_line: the words after `resnet8ptq`, which the command to continue repeats; by
            default `run` with the typed words.

    Raises:
        SystemExit: Hydra's parser refuses an option's value, or SIGTERM ends the command.
    """
    with ongoing.begin(command_line or ["run", *typed]) as begun:
        # `finish` also closes the sweep that Hydra's callback has begun, with table and report.
        ending = command.finish(partial(_call_hydra, typed), running.find_running_sweep, report)
        record = begun.run.record if begun.run else None
        folder = None
        if begun.sweep is not None:
            with suppress(*command.EXPECTED):  # the store cannot be opened, which `finish` reported
                folder = begun.sweep.shared.folder
        return CommandResult(ending, record, folder)


def _call_hydra(typed: Sequence[str]) -> None:
    """Check the command line, then let Hydra run the job or jobs; or print the help or version."""
    importing.allow(Path.cwd())
    conf = folders.find_conf()
    own = folders.find_own_conf(Path.cwd())
    address.check_words(typed)
    if "--version" in typed:
        return print(invocation.version())
    if not {"-h", "--help"}.isdisjoint(typed):
        words.check_and_arrange([word for word in typed if "=" in word], conf, own)
        return help_page.print_page(conf, typed, own)
    completed = path_words.complete(typed, conf, own)
    arranged = words.check_and_arrange(completed, conf, own)
    path_words.require_data(arranged, conf, own)
    if NO_RUN.isdisjoint(arranged):
        background.prepare(store.import_mlflow)
    # `hydra.main` would read the words from `sys.argv`, which a caller in Python has not set.
    version.setbase("1.3")
    parser = get_args_parser()
    _run_hydra(
        args=parser.parse_args(arranged),
        args_parser=parser,
        task_function=run_job,
        config_path=str(conf),
        config_name="config",
    )
    begun = ongoing.find_ongoing()
    if begun is not None and begun.run is not None:  # `finish` closes a sweep
        begun.run.close()


def run_job(cfg: DictConfig) -> Any:
    """Run one job, as Hydra's task function.

    Returns:
        In a sweep, a value for the sweeper: the record for the search of `experiment=auto`, and the
        loss for any other sweeper, such as Optuna's. Hydra's own sweeper ignores the value.
    """
    hydra = HydraConfig.get()
    importing.allow(Path(hydra.runtime.cwd))  # a launcher may start the job in another folder
    folder = Path(hydra.runtime.output_dir)
    if hydra.mode == RunMode.RUN:
        begun = ongoing.find_ongoing()
        assert begun is not None  # a single run has no worker processes
        with command.aborting(Exception):
            asked = loading.type_composed(cfg)
            begun.run = job.run_alone(asked, folder, hydra.overrides.task)
        return None
    record = job.run_in_sweep(loading.type_composed(cfg), folder, hydra)
    if running.is_search(hydra.sweeper):
        return record
    return record.loss


def start(typed: Sequence[str], command_line: Sequence[str] | None = None) -> int:
    """Execute a command line with a background process; return the exit code.

    Args:
        command_line: see `execute`.
    """
    with background.allowed():
        return execute(typed, command_line=command_line).ending.code
