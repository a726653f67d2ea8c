"""Hydra's basic sweeper, but each job is composed once. Hydra composes it twice: to check and run.

It replaces `hydra/sweeper=basic`, the default. A composition takes a tenth of a second, which is a
twentieth of a sweep of many small runs. A quarter of it is reading the same files again.
"""

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.types import HydraContext
from omegaconf import DictConfig

from hydra_plugins.resnet8ptq_launchers._base import JobsLauncher


@dataclass
class Sweeper(BasicSweeperConf):
    """The settings of Hydra's basic sweeper."""

    _target_: str = "hydra_plugins.resnet8ptq_launchers.sweeper.ComposingOnce"


ConfigStore.instance().store(group="hydra/sweeper", name="basic", node=Sweeper, provider="hydra")


@dataclass
class _Loader:
    """Hydra's config loader; it returns each config that is already composed once."""

    loader: Any
    composed: dict[tuple[str, ...], DictConfig]

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> Any:
        """Return the config of a job."""
        ready = self.composed.pop(tuple(sweep_overrides), None)
        return ready or self.loader.load_sweep_config(master_config, sweep_overrides)


@dataclass
class _ReadOnce:
    """Hydra's config repository; it reads each file once for all compositions."""

    repository: Any
    contents: dict[str, bytes] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ReadOnce":
        return _ReadOnce(copy.deepcopy(self.repository, memo), self.contents)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.repository, name)

    def load_config(self, config_path: str) -> Any:
        """Return a copy of a file's content, because Hydra changes it."""
        if config_path not in self.contents:
            self.contents[config_path] = pickle.dumps(self.repository.load_config(config_path))
        return pickle.loads(self.contents[config_path])  # five times as fast as OmegaConf's copies


class ComposingOnce(BasicSweeper):
    """Hydra's sweeper; it keeps the configs that it composes for a check, for the launcher."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Compose the jobs of a batch, so that a wrong setting ends the sweep before any job."""
        if not isinstance(self.launcher, BasicLauncher | JobsLauncher):
            return super().validate_batch_is_legal(batch)
        assert self.hydra_context is not None and self.config is not None
        loader: Any = self.hydra_context.config_loader
        repository = loader.repository
        loader.repository = _ReadOnce(repository)
        try:
            composed = {
                tuple(overrides): loader.load_sweep_config(self.config, list(overrides))
                for overrides in batch
            }
        finally:
            loader.repository = repository
        context: Any = HydraContext
        kept = _Loader(loader, composed)
        self.launcher.hydra_context = context(kept, self.hydra_context.callbacks)
