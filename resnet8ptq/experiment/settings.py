"""The settings of a run with every file located, made once from the requested ones."""

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.backends.registry import BACKENDS, make_quantizer
from resnet8ptq.calibration.methods import METHODS
from resnet8ptq.config.schema import (
    ArraysConfig,
    BackendConfig,
    DataConfig,
    PreprocessConfig,
    RunConfig,
    TfliteConfig,
)
from resnet8ptq.core import cache, memory
from resnet8ptq.core.errors import PtqError, SizesDifferError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.registry import look_up
from resnet8ptq.data import locate, registry
from resnet8ptq.data.sources import SOURCES
from resnet8ptq.experiment import mlperf_tiny
from resnet8ptq.models import model, network_path, summary
from resnet8ptq.models.sources.formats import format_name, is_tflites
from resnet8ptq.tasks.registry import AUTO, TASKS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The settings of a run, its files located.

    Attributes:
        config: the requested settings, with the paths of data and network.
        source: the network's file or folder; for a module, its weights.
    """

    config: RunConfig
    runtime: Runtime
    source: Path

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer for these settings."""
        return make_quantizer(self.config, self.runtime)

    def with_threads(self, threads: int) -> "Settings":
        """Return the settings with another number of threads."""
        runtime = replace(self.runtime, threads=threads, threads_fixed=True)
        return replace(self, config=replace(self.config, threads=threads), runtime=runtime)


def settle(asked: RunConfig) -> Settings:
    """Locate every file of the settings, and download the default files.

    Raises:
        PtqError: a file is missing, or a name is unknown.
    """
    config = settle_suite(asked)
    memory.set_limit(config.memory_gb)
    runtime = cache.runtime(config.cache_dir, config.threads, config.max_seconds)
    own_network = config.model.path is not None or config.model.module is not None
    config = replace(config, data=locate.settle(config.data, own_network))
    source = network_path.locate(config.model, config.data.name)
    model.check(config.model, source, runtime.cache_root)
    config = replace(config, data=settle_inputs(config, source, runtime.cache_root))
    preprocess = settle_size(config, source, runtime.cache_root)
    config = replace(config, preprocess=preprocess, backend=_settle_backend(config, source))
    if config.model.module is None:
        config = replace(config, model=replace(config.model, path=str(source)))
    return Settings(config, runtime, source)


def settle_suite(asked: RunConfig) -> RunConfig:
    """Return the settings with the files of `benchmark.name`, their names checked.

    Raises:
        ConfigError: a name is unknown.
        UnsupportedError: a file of the suite is missing.
    """
    check_names(asked)
    return mlperf_tiny.settle(asked)


def check_names(config: RunConfig) -> None:
    """Raise `ConfigError` for an unknown backend, data set, task, calibration or benchmark."""
    look_up("backend.name", config.backend.name, BACKENDS)
    look_up("data.name", config.data.name, SOURCES)
    look_up("task.name", config.task.name, {AUTO: "", **TASKS})
    look_up("calib.name", config.calib.name, METHODS)
    if config.benchmark.name is not None:
        look_up("benchmark.name", config.benchmark.name, mlperf_tiny.SUITE)


def settle_inputs(config: RunConfig, source: Path, cache_root: Path) -> DataConfig:
    """Return the data settings with the arrays that have the names of the network's inputs.

    One of them may be called `x` or `images`, which alone would name the only input. All other
    faults of the data and of the network are reported when they are loaded.

    Args:
        config: its data set is located.
        source: see `Settings`.
    """
    data = config.data
    if data.name != "arrays" or not isinstance(data, ArraysConfig) or data.inputs is not None:
        return data
    from resnet8ptq.data.sources import arrays  # of this source alone

    find_takes = partial(summary.find_input_names, source, config.model, cache_root)
    try:
        inputs = arrays.name_inputs(Path(str(data.root)), find_takes)
    except (PtqError, OSError):
        return data
    if inputs is None:
        return data
    log.info("data.inputs: got null; the network names its inputs: %s", inputs)
    return replace(data, inputs=inputs)


def settle_size(config: RunConfig, source: Path, cache_root: Path) -> PreprocessConfig:
    """Return the preprocessing with the size of pictures that the network fixes.

    The network's size is used if the pictures differ in size and `preprocess.size` is null. All
    other faults of the data are reported when it is loaded.

    Args:
        config: its data set is located.
        source: see `Settings`.
    """
    asked = config.preprocess
    if asked.size is not None or not SOURCES[config.data.name].decodes:
        return asked
    size = None
    try:
        registry.read(config.data, asked, cache_root, config.calib.images)
    except SizesDifferError:
        with suppress(PtqError):
            size = summary.find_picture_size(source, config.model, cache_root)
    except PtqError:
        return asked
    if size is None:
        return asked
    log.info(
        "preprocess.size: got null, and the pictures differ in size; the run uses the network's, "
        "%s, by preprocess.resize=%s",
        *(list(size), asked.resize),
    )
    return replace(asked, size=list(size))


def _settle_backend(config: RunConfig, source: Path) -> BackendConfig:
    """Return the backend's settings; for TFLite, with the converter for this network."""
    backend = config.backend
    if not backend.quantizes:
        return backend
    backend = replace(backend, path=None)  # it is of a sweep that has both
    if not isinstance(backend, TfliteConfig) or backend.flow is not None:
        return backend
    name = format_name(source, config.model.module is not None)
    # TensorFlow converts the whole file.
    by_tensorflow = is_tflites(name, config.dtype.name == "fp32") and not config.model.outputs
    return replace(backend, flow="convert" if by_tensorflow else "onnx2tf")
