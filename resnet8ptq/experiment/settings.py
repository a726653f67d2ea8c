"""The settings of a run with every file located, made once from the requested ones."""

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.backends.registry import BACKENDS, make_quantizer
from resnet8ptq.calibration.methods import find_method
from resnet8ptq.config.schema import BackendConfig, PreprocessConfig, RunConfig, TfliteConfig
from resnet8ptq.core import cache, memory
from resnet8ptq.core.errors import PtqError, SizesDifferError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.registry import look_up
from resnet8ptq.data import locate, registry
from resnet8ptq.data.sources import SOURCES
from resnet8ptq.experiment import mlperf_tiny
from resnet8ptq.models import network_path, summary
from resnet8ptq.models.sources import format_name, is_tflites
from resnet8ptq.tasks.registry import AUTO, TASKS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The settings of a run, its files located.

    Attributes:
        config: the requested settings, with the paths of data and network.
        runtime: cache and threads.
    """

    config: RunConfig
    runtime: Runtime

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer for these settings."""
        return make_quantizer(self.config, self.runtime)

    def with_threads(self, threads: int) -> "Settings":
        """Return the settings with another number of threads."""
        return _on_this_machine(replace(self.config, threads=threads))


def settle(asked: RunConfig) -> Settings:
    """Locate every file of the settings, and download the default files.

    Raises:
        PtqError: a file is missing, or a name is unknown.
    """
    config = settle_data(settle_suite(asked))
    if config.backend.quantizes:  # the path is of a sweep that has both
        config = replace(config, backend=replace(config.backend, path=None))
    source = network_path.locate(config.model, config.data.name)
    if config.model.module is None:
        config = replace(config, model=replace(config.model, path=str(source)))
    return _on_this_machine(replace(config, backend=_with_converter(config, source)))


def _with_converter(config: RunConfig, source: Path) -> BackendConfig:
    """Return the backend's settings; for TFLite, with the converter for this network."""
    backend = config.backend
    if not isinstance(backend, TfliteConfig) or backend.flow is not None:
        return backend
    name = format_name(source, config.model.module is not None)
    # TensorFlow converts the whole file.
    by_tensorflow = is_tflites(name, config.dtype.name == "fp32") and not config.model.outputs
    return replace(backend, flow="convert" if by_tensorflow else "onnx2tf")


def settle_suite(asked: RunConfig) -> RunConfig:
    """Return the settings with the files of `benchmark.name`, their names checked.

    Raises:
        ConfigError: a name is unknown.
        UnsupportedError: a file of the suite is missing.
    """
    check_names(asked)
    return mlperf_tiny.settle(asked)


def settle_data(config: RunConfig) -> RunConfig:
    """Return the settings with the data set located and the size of its pictures.

    Raises:
        PtqError: the data set is missing.
    """
    config = replace(config, data=locate.settle(config.data))
    return replace(config, preprocess=_sized(config))


def check_names(config: RunConfig) -> None:
    """Raise `ConfigError` for an unknown backend, data set, task or calibration."""
    look_up("backend.name", config.backend.name, BACKENDS)
    look_up("data.name", config.data.name, SOURCES)
    look_up("task.name", config.task.name, {AUTO: "", **TASKS})
    find_method(config.calib.name)


def _on_this_machine(config: RunConfig) -> Settings:
    memory.set_limit(config.memory_gb)
    return Settings(config, cache.runtime(config.cache_dir, config.threads, config.max_seconds))


def _sized(config: RunConfig) -> PreprocessConfig:
    """Return the preprocessing with the size of pictures that the network fixes.

    The network's size is used if the pictures differ in size and `preprocess.size` is null. All
    other faults of the data are reported when it is loaded.
    """
    taken, cache_root = config.preprocess, cache.folder(config.cache_dir)
    if taken.size is not None or not SOURCES[config.data.name].decodes:
        return taken
    size = None
    try:
        registry.read(config.data, taken, cache_root, config.calib.images)
    except SizesDifferError:
        with suppress(PtqError):
            size = summary.find_picture_size(config.model, config.data.name, cache_root)
    except PtqError:
        return taken
    if size is None:
        return taken
    log.info(
        "preprocess.size: got null, and the pictures differ in size: takes the network's, %s, by "
        "preprocess.resize=%s",
        *(list(size), taken.resize),
    )
    return replace(taken, size=list(size))
