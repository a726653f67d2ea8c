"""Hydra's callback, which begins a sweep before its jobs; `core.command.finish` closes the sweep.

The parent run is created before the run of the first job. Jobs in other processes read the id of
the parent run from a file in the sweep's folder. If the jobs run in this process, Hydra composes
them while MLflow is imported.
"""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from resnet8ptq.core import command
from resnet8ptq.sweeps import jobs, ongoing
from resnet8ptq.sweeps.running import open_running_sweep
from resnet8ptq.tracking.mlflow_store import address


class SweepCallback(Callback):
    """Hydra calls this before a run, or before the first job of a multirun."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse the launcher joblib, and a `tracking.uri` that is wrong or holds a password.

        Hydra would write the password to a file.
        """
        with command.aborting(*command.EXPECTED):
            jobs.refuse_joblib(config.hydra.launcher)
            address.check(config.tracking.uri or "", written=True)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Start opening the store and the parent run; end the command on an error."""
        from resnet8ptq.sweeps import opening  # Hydra imports this module for every job

        self.on_run_start(config)
        begun = ongoing.find_ongoing()
        assert begun is not None  # `resnet8ptq.run`, which calls Hydra, has set it
        folder = Path(config.hydra.sweep.dir).absolute()
        with command.aborting(*command.EXPECTED):
            parallel = jobs.plan(config.hydra.launcher)
            begun.sweep = opening.open_sweep(config, folder, parallel, command_line=begun.words)
        if parallel:  # other processes read the sweep's file
            open_running_sweep()
