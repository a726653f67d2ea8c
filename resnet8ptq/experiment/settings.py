"""`resolve` decides the settings of a run once: the only module that changes a setting."""

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.backends.file import reading
from resnet8ptq.backends.registry import BACKENDS, make_quantizer
from resnet8ptq.calibration.methods import METHODS
from resnet8ptq.config import limits
from resnet8ptq.config.naming import name_network
from resnet8ptq.config.schema import (
    ArraysConfig,
    BackendConfig,
    DataConfig,
    ModelConfig,
    PreprocessConfig,
    RunConfig,
)
from resnet8ptq.core import cache, memory
from resnet8ptq.core.errors import PtqError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.registry import look_up
from resnet8ptq.data import locate, registry
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sources import SOURCES
from resnet8ptq.experiment import mlperf_tiny
from resnet8ptq.models import model, network_path, summary
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.target.target import Target, connect
from resnet8ptq.tasks.registry import AUTO, TASKS

log = logging.getLogger(__name__)

KNOWN_FORM = ("cifar10", "shapes")  # data whose samples are [32, 32, 3], of ten classes


@dataclass(frozen=True)
class Settings:
    """The settings of a run, with every file located.

    Attributes:
        asked: the requested settings.
        config: the decided settings, with the paths of data and network.
        source: the network's file or folder; for a module, its weights; of an inspected file of
            another program, that file.
        no_data: why an inspection has no data; else empty.
    """

    asked: RunConfig
    config: RunConfig
    runtime: Runtime
    source: Path
    no_data: str = ""

    @cached_property
    def quantizer(self) -> Quantizer:
        """The quantizer for these settings."""
        return make_quantizer(self.config, self.runtime)

    def read_data(self) -> Dataset:
        """Return the data set, without the network's form of samples; it is read once.

        Raises:
            PtqError: a file is missing or damaged, or the settings do not fit the data.
        """
        config, calibrating = self.config, self.config.calib.images
        return registry.read(config.data, config.preprocess, self.runtime.cache_root, calibrating)

    @cached_property
    def target(self) -> Target | None:
        """The machine that runs the files; None: this one. All runs of a process share it."""
        asked = self.config.target
        return None if asked.command is None else connect(asked.command, asked.timeout_s)

    def fit(self, network: Fp32Model) -> "Settings":
        """Return the settings with the backend's own defaults for this network.

        Raises:
            UnsupportedError: the framework cannot quantize this network with these settings.
        """
        fitted = self.quantizer.fit(network)
        return self.vary(**fitted) if fitted else self

    def vary(self, config: RunConfig | None = None, /, **changes: Any) -> "Settings":
        """Return the settings of a trial: other values, the same files and threads."""
        return replace(self, config=replace(config or self.config, **changes))


def resolve(asked: RunConfig, jobs: int | None = None, threads: int | None = None) -> Settings:
    """Decide every setting: locate each file, and download the default files.

    Decided settings stay as they are, so the config of a finished run can be resolved again.

    Args:
        jobs, threads: see `fill_defaults`.

    Raises:
        ConfigError: a name is unknown.
        UnsupportedError: a file of the benchmark is missing.
        PtqError: another file is missing.
    """
    config = resolve_names(asked, jobs, threads)
    data = locate.settle(config.data, own_network=_has_own_network(config.model))
    source = network_path.locate(config.model, data.name)
    return _fit_to_network(Settings(asked, replace(config, data=data), _start(config), source))


def resolve_to_inspect(asked: RunConfig) -> Settings:
    """Decide the settings of an inspection, which needs a network, or a quantized file, alone.

    The embedded data and CIFAR-10 have samples of known form, and are neither found nor downloaded.

    Returns:
        The settings; with `no_data` if the data cannot be located.

    Raises:
        PtqError: the network or the file is missing, or a name is unknown.
    """
    config = resolve_names(asked)
    if not config.backend.quantizes:
        return Settings(asked, config, _start(config), reading.find_path(config.backend))
    settings = Settings(
        asked, config, _start(config), network_path.locate(config.model, config.data.name)
    )
    if config.data.name in KNOWN_FORM and config.data.root is None:
        return settings
    try:
        data = locate.settle(config.data, own_network=_has_own_network(config.model))
        return _fit_to_network(settings.vary(data=data))
    except PtqError as error:
        return replace(settings, no_data=str(error))


def _start(config: RunConfig) -> Runtime:
    """Return cache, threads and time limit; set the memory limit of this process."""
    memory.set_limit(config.memory_gb)
    return cache.runtime(config.cache_dir, config.threads, config.max_seconds)


def _has_own_network(config: ModelConfig) -> bool:
    return config.path is not None or config.module is not None


def _fit_to_network(settings: Settings) -> Settings:
    """Return the settings with the values that follow from the network's file."""
    config, source, cache_root = settings.config, settings.source, settings.runtime.cache_root
    network = config.model if config.model.module else replace(config.model, path=str(source))
    model.check(network, source, cache_root)
    return settings.vary(
        model=network,
        data=_name_inputs(config.data, network, source, cache_root),
        preprocess=_find_size(config, source, cache_root),
        backend=_resolve_backend(config, source),
    )


def resolve_names(
    asked: RunConfig, jobs: int | None = None, threads: int | None = None
) -> RunConfig:
    """Return the settings with dependent defaults and the files of `benchmark.name`.

    Args:
        jobs, threads: see `fill_defaults`.

    Raises:
        ConfigError: a name is unknown.
        UnsupportedError: a file of the benchmark is missing.
    """
    check_names(asked)
    return mlperf_tiny.settle(fill_defaults(asked, jobs, threads))


def check_names(config: RunConfig) -> None:
    """Raise `ConfigError` for an unknown backend, data set, task, calibration or benchmark."""
    look_up("backend.name", config.backend.name, BACKENDS)
    look_up("data.name", config.data.name, SOURCES)
    look_up("task.name", config.task.name, {AUTO: "", **TASKS})
    look_up("calib.name", config.calib.name, METHODS)
    if config.benchmark.name is not None:
        look_up("benchmark.name", config.benchmark.name, mlperf_tiny.SUITE)


def fill_defaults(
    asked: RunConfig, jobs: int | None = None, threads: int | None = None
) -> RunConfig:
    """Return the settings with the defaults that depend on others or on the job.

    A single run needs no selection samples, because there is nothing to choose. A sequential test
    is corrected for the number of jobs.

    Args:
        jobs: number of jobs of the sweep, 1 for a single run; None if only Hydra knows it.
        threads: the default of `threads`, if other jobs run at the same time.
    """
    evaluate, preprocess, tail = asked.evaluate, asked.preprocess, asked.float_tail
    if evaluate.choice == "auto" and evaluate.split != "choice" and jobs == 1:
        evaluate = replace(evaluate, choice="none")
    if evaluate.stop == "decided" and evaluate.models is None:
        evaluate = replace(evaluate, models=jobs)
    if tail is None:  # the tail of a detector decodes and joins boxes
        tail = asked.task.name == "detection" or asked.data.name == "coco"
    mean, std = (
        [float(number) for number in limits.listed(numbers)]
        for numbers in (preprocess.mean, preprocess.std)
    )
    name = asked.model.name or name_network(asked.model, asked.data.name)
    return replace(
        asked,
        model=replace(asked.model, name=name),
        preprocess=replace(preprocess, mean=mean, std=std),
        float_tail=tail,
        evaluate=evaluate,
        threads=threads if asked.threads is None else asked.threads,
    )


def _name_inputs(
    data: DataConfig, network: ModelConfig, source: Path, cache_root: Path
) -> DataConfig:
    """Return the data settings with the arrays that have the names of the network's inputs.

    One of them may be called `x` or `images`, which alone would name the only input. All other
    faults of the data and of the network are reported when they are loaded.
    """
    inputs = None
    if data.name != "arrays" or not isinstance(data, ArraysConfig) or data.inputs is not None:
        return data
    from resnet8ptq.data.sources import arrays  # of this source alone

    with suppress(PtqError, OSError):
        find_takes = partial(summary.find_input_names, source, network, cache_root)
        inputs = arrays.name_inputs(Path(str(data.root)), find_takes)
    if inputs is None:
        return data
    log.info("data.inputs: got null; the network names its inputs: %s", inputs)
    return replace(data, inputs=inputs)


def _find_size(config: RunConfig, source: Path, cache_root: Path) -> PreprocessConfig:
    """Return the preprocessing with the size of pictures that the network fixes.

    The network's size is used if the pictures differ in size and `preprocess.size` is null. All
    other faults of the data are reported when it is loaded.
    """
    asked, size = config.preprocess, None
    if asked.size is not None:
        return asked
    with suppress(PtqError, OSError):
        if registry.differ_in_size(config.data, cache_root):
            size = summary.find_picture_size(source, config.model, cache_root)
    if size is None:
        return asked
    log.info(
        "preprocess.size: got null, and the pictures differ in size; the run uses the network's, "
        "%s, by preprocess.resize=%s",
        *(list(size), asked.resize),
    )
    return replace(asked, size=list(size))


def _resolve_backend(config: RunConfig, source: Path) -> BackendConfig:
    """Return the backend's settings, with its own defaults for this network."""
    backend = config.backend
    if not backend.quantizes:
        return backend
    backend = replace(backend, path=None)  # it is of a sweep that has both
    settle = backend.descriptor.settle
    settled: BackendConfig = resolve_name(settle)(backend, config, source) if settle else backend
    return settled
