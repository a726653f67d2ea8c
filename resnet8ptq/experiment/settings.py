"""Settings with nothing left to find: made once from the settings that were asked for."""

from dataclasses import dataclass, replace

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data import locate as data
from resnet8ptq.experiment import mlperf_tiny
from resnet8ptq.models import locate as networks


@dataclass(frozen=True)
class Settings:
    """The settings of a run, its files located.

    Attributes:
        config: as asked for, with the paths of data and network.
        runtime: cache and threads.
    """

    config: RunConfig
    runtime: Runtime

    @property
    def quantizer(self) -> Quantizer:
        """The framework, set up for these settings."""
        return make_quantizer(self.config, self.runtime)

    def with_threads(self, threads: int) -> "Settings":
        """Return the settings on another number of threads."""
        return _on_this_machine(replace(self.config, threads=threads))


def settle(asked: RunConfig) -> Settings:
    """Find every file that the settings name or imply, downloading the defaults.

    Raises:
        PtqError: a file is missing; the line names the key.
    """
    config = mlperf_tiny.settle(asked)
    config = replace(config, data=data.settle(config.data))
    source = networks.locate(config.model, config.data.name)
    if config.model.module is None:
        config = replace(config, model=replace(config.model, path=str(source)))
    return _on_this_machine(config)


def _on_this_machine(config: RunConfig) -> Settings:
    return Settings(config, cache.runtime(config.cache_dir, config.threads))
