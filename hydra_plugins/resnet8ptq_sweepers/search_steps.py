"""The sweeper of `experiment=auto`: runs the steps of the search with the launcher."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.default_element import GroupDefault
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, flag_override

from resnet8ptq.config import words


class SearchSweeper(Sweeper):
    """Runs the steps of the search by Hydra's launcher, and returns their records to the search."""

    config: DictConfig
    hydra_context: HydraContext
    launcher: Launcher

    def __init__(self, goal: str, minutes: float) -> None:
        self.goal = goal
        self.minutes = minutes
        self.jobs = 0  # launched so far

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store Hydra's context and config, and make the launcher."""
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Search with these settings of the user, as typed words."""
        # Hydra imports this module at each start, for --help too.
        from resnet8ptq.config.loading import parse_config
        from resnet8ptq.config.schema import RunConfig
        from resnet8ptq.core import machine
        from resnet8ptq.exploration.search.searching import Asked, Step, find_fixed
        from resnet8ptq.sweeps import search
        from resnet8ptq.sweeps.running import find_running_sweep

        OmegaConf.save(self.config, Path(self.config.hydra.sweep.dir) / "multirun.yaml")

        # Settings of the user's experiment count as typed, so that each job and the winner has them
        typed = {override.key_or_group: override for override in map(words.parse, arguments)}
        of_experiment: list[str] = []
        if "experiment" in typed:
            repository = self.hydra_context.config_loader.repository  # type: ignore[attr-defined]
            of_experiment = read_experiment(repository, str(typed["experiment"].value()))
        for word in of_experiment:
            override = words.parse(word)
            if override.key_or_group not in typed:
                arguments = [*arguments, word]
                typed[override.key_or_group] = override
        search.check(self.config.hydra.sweeper, [*typed.values()])

        # Each step names its backend, and shares all other settings
        backends = words.values(typed["backend"]) if "backend" in typed else ["onnx"]
        shared = [word for word in arguments if words.parse(word).key_or_group != "backend"]
        running = find_running_sweep()
        assert running is not None and running.delivery is not None  # started by the callback
        assert running.budget is not None

        def compose(overrides: Sequence[str]) -> RunConfig:
            loader = self.hydra_context.config_loader
            composed = loader.load_sweep_config(self.config, [*shared, *overrides])
            with flag_override(composed, ["readonly", "struct"], False):
                del composed["hydra"]  # as for a job
            return parse_config(composed)

        def launch(steps: Sequence[Step], limits: search.TimeLimits) -> list[Any]:
            limit = [] if "max_seconds" in typed else [f"max_seconds={limits.soft_s:.0f}"]
            batch = [[*shared, *step.overrides, *limit] for step in steps]
            # An alarm interrupts only jobs in this process
            seconds = None if running.parallel else limits.hard_s
            return self._launch(batch, seconds)

        def check(step: Step) -> None:
            search.check_step(compose(step.overrides), [*typed.values()], asked.untuned)

        # Read the network in this process, unless other processes run the jobs
        fixed = find_fixed(typed.values())
        asked = Asked(self.goal, tuple(backends), 0.0, fixed, machine.sums_exactly())
        if running.parallel is None:  # other machines may hold the network and the data
            asked = search.read_network(asked, compose([f"backend={backends[0]}"]), running)
        at_once = running.parallel.at_once if running.parallel else 1
        searched = search.SettingsSearch(
            asked=asked,
            launch=launch,
            allowed=running.limits,
            budget=running.budget,
            at_once=at_once,
            check=check,
            delivery=running.delivery,
            begun_s=running.command_begun_s,
            # A resumed sweep skips finished jobs, which log nothing
            logs_here=running.parallel is None and not self.config.sweep.resume,
        )
        searched.run()

    def _launch(self, batch: list[list[str]], seconds: float | None) -> list[Any]:
        """Run jobs; return the record or the error of each, whatever a job raises.

        Only Ctrl-C and other requests to end the program are raised.

        Args:
            seconds: the time limit of the whole batch; None for no limit.
        """
        from resnet8ptq.core.alarm import time_limit
        from resnet8ptq.core.command import Abort

        self.validate_batch_is_legal(batch)
        try:
            with time_limit(seconds):
                results = self.launcher.launch(batch, initial_job_idx=self.jobs)
        except (Abort, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # also a panic of a library in Rust
            # An error outside the jobs, such as the end of the time, is the result of each job
            failure = error if isinstance(error, Exception) else RuntimeError(str(error))
            return [failure] * len(batch)
        finally:
            self.jobs += len(batch)
        return [_outcome(result) for result in results]


def read_experiment(repository: Any, name: str) -> list[str]:
    """Return the settings of a user's file that builds on `experiment=auto`, as words.

    The list is empty for `auto` itself, and for a missing file.

    Args:
        repository: Hydra's, which reads the files of `conf/`.
        name: the option of `experiment`.
    """
    from resnet8ptq.api.keywords import to_words
    from resnet8ptq.config.schema import find_fields

    loaded = repository.load_config(f"experiment/{name}")
    if name == "auto" or loaded is None:
        return []
    settings: dict[str, Any] = {}
    for chosen in loaded.defaults_list or ():
        if isinstance(chosen, GroupDefault) and chosen.is_override():
            settings[str(chosen.group).lstrip("/")] = chosen.value
    _add_leaves(settings, OmegaConf.to_container(loaded.config))
    known = {key: value for key, value in settings.items() if find_fields(key)}
    return to_words(known)


def _add_leaves(settings: dict[str, Any], values: Any, prefix: str = "") -> None:
    """Add the values of nested dicts to `settings`, by their full keys."""
    for name, value in values.items():
        if isinstance(value, dict):
            _add_leaves(settings, value, f"{prefix}{name}.")
        else:
            settings[f"{prefix}{name}"] = value


def _outcome(result: JobReturn) -> Any:
    """Return the record of a job, or its error."""
    value = result._return_value
    if result.status == JobStatus.COMPLETED or isinstance(value, Exception):
        return value
    return RuntimeError("the job left no result")
