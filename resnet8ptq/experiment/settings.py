"""Decides the settings of a run: `resolve` from the files, `Settings.fit` from the loaded network.

Later steps only read the settings. If a step needs other values, such as for a trial, it makes a
copy with `Settings.vary`.
"""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.backends.file import reading
from resnet8ptq.backends.registry import BACKENDS, complete, make_quantizer
from resnet8ptq.calibration.methods import METHODS
from resnet8ptq.config import limits
from resnet8ptq.config.naming import name_network
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache, memory
from resnet8ptq.core.errors import PtqError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.registry import look_up
from resnet8ptq.data import locate, registry
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sources import SOURCES, array_names
from resnet8ptq.experiment import mlperf_tiny
from resnet8ptq.models import model
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.models.summary import NetworkFile
from resnet8ptq.target.target import Target, connect
from resnet8ptq.tasks.registry import AUTO, TASKS

log = logging.getLogger(__name__)

KNOWN_FORM = ("cifar10", "shapes")  # data sets with samples [32, 32, 3] of ten classes


@dataclass(frozen=True)
class Settings:
    """The settings of a run or an inspection.

    Attributes:
        asked: the requested settings.
        config: the decided settings; in a run, with the paths of the located files.
        runtime: the cache, the threads, the time limit and the device.
        network: the network's file, or for a module the file of its weights; in an inspection of
            another program's file, that file.
        no_data: the error because of which an inspection uses no data; empty without an error.
    """

    asked: RunConfig
    config: RunConfig
    runtime: Runtime
    network: NetworkFile
    no_data: str = ""

    @cached_property
    def quantizer(self) -> Quantizer:
        """The quantizer of `config.backend`, made once."""
        return make_quantizer(self.config, self.runtime)

    @cached_property
    def data(self) -> Dataset:
        """The data set, before it is arranged for the network.

        Raises:
            PtqError: see `registry.read`.
        """
        config = self.config
        calibrating = self.config.calib.images
        return registry.read(
            config.data, config.preprocess, self.runtime.cache_root, calibrating=calibrating
        )

    @cached_property
    def target(self) -> Target | None:
        """The machine that runs the files; None for this machine, see `find_target`."""
        return find_target(self.config)

    def fit(self, network: Fp32Model) -> "Settings":
        """Return the settings with the backend's defaults for this network, see `Quantizer.fit`.

        Raises:
            PtqError: see `Quantizer.fit`.
        """
        fitted = self.quantizer.fit(network)
        return self.vary(**fitted) if fitted else self

    def vary(self, config: RunConfig | None = None, /, **changes: Any) -> "Settings":
        """Return a copy with other values, but the same network file and runtime.

        Args:
            config: the settings to change; None for `self.config`.
            changes: new values, by attribute of `RunConfig`.
        """
        return replace(self, config=replace(config or self.config, **changes))


def find_target(config: RunConfig) -> Target | None:
    """Return the machine that runs the files, with the execution provider; None for this machine.

    Runs of a process with the same `target` and provider share the connection.
    """
    asked = config.target
    if asked.command is None:
        return None
    return connect(asked.command, asked.timeout_s, config.backend.provider)


@dataclass(frozen=True)
class Unresolved:
    """Refused settings and their error; the run only records both."""

    asked: RunConfig
    error: Exception


def resolve(asked: RunConfig, jobs: int | None = None, threads: int | None = None) -> Settings:
    """Return the settings of a run, before `Settings.fit`.

    The function locates the files, and downloads missing ones where it can. It reads the network's
    inputs if other settings depend on them. Settings that are decided already stay as they are, so
    the config of a finished run can be resolved again.

    Args:
        jobs, threads: see `fill_defaults`.

    Raises:
        ConfigError: a name is unknown, or a setting does not fit the files.
        UnsupportedError: a file of `benchmark.name` is missing and cannot be downloaded.
        PtqError: another file is missing, or the network's file is damaged or unsafe.
    """
    config, runtime = _begin(asked, jobs, threads)

    # Locate the files, and refuse a damaged or unsafe network before anything reads it
    data = locate.find_data(config.data, own_network=config.model.is_own)
    network = NetworkFile.find(config.model, data.name, runtime.cache_root)
    model.check_file(network.config, network.path, runtime.cache_root)

    # Decide the settings that depend on the network's inputs and format
    decided = replace(
        config,
        model=network.config,
        data=array_names.name_inputs(data, network.find_input_names),
        preprocess=registry.find_size(
            config.preprocess, data, runtime.cache_root, find_networks=network.find_picture_size
        ),
        backend=complete(
            config.backend,
            network.format,
            config.model.outputs,
            is_float=config.computes_in_float,
        ),
    )
    return Settings(asked, config=decided, runtime=runtime, network=network)


def resolve_to_inspect(asked: RunConfig) -> Settings:
    """Return the settings of an inspection, which needs only the network or a quantized file.

    The embedded data, and CIFAR-10 without `data.root`, are neither located nor downloaded, because
    the form of their samples is known. For a quantized file, only the data of `benchmark.name`
    are located.

    Returns:
        The settings; `no_data` is the error of `resolve` if that failed, such as for missing data.

    Raises:
        PtqError: the network or a file of `benchmark.name` is missing, `backend.path` is null with
            `backend=file`, or a name is unknown.
    """
    no_data = ""
    is_known = asked.data.name in KNOWN_FORM and asked.data.root is None
    if asked.backend.quantizes and not is_known:
        try:
            return resolve(asked)
        except PtqError as error:
            no_data = str(error)
    config, runtime = _begin(asked)
    if config.backend.quantizes:
        network = NetworkFile.find(config.model, config.data.name, runtime.cache_root)
    else:
        path = reading.find_path(config.backend)
        network = NetworkFile(path, config.model, runtime.cache_root)
    return Settings(asked, config, runtime, network=network, no_data=no_data)


def _begin(
    asked: RunConfig, jobs: int | None = None, threads: int | None = None
) -> tuple[RunConfig, Runtime]:
    """Return the settings with defaults and the files of `benchmark.name`, and the runtime.

    The function also sets the memory limit of this process.
    """
    check_names(asked)
    config = fill_defaults(asked, jobs, threads)

    # The benchmark's files take the place of paths that are not named
    named = mlperf_tiny.Paths(config.data.root, config.model.path, config.backend.path)
    paths = mlperf_tiny.find_files(config.benchmark, named, quantizes=config.backend.quantizes)
    config = replace(
        config,
        data=replace(config.data, root=paths.data),
        model=replace(config.model, path=paths.network),
        backend=replace(config.backend, path=paths.quantized),
    )

    # From here on, this process keeps to the limits of the run
    memory.set_limit(config.memory_gb)
    runtime = cache.runtime(
        config.cache_dir, config.threads, seconds=config.max_seconds, device=config.device
    )
    return config, runtime


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
    """Return the settings with the defaults that depend on other settings or on the job.

    With `evaluate.choice=auto`, a single run draws selection samples only to report on them. A
    sequential test is corrected for the number of jobs.

    Args:
        jobs: number of jobs of the sweep, 1 for a single run; None if it is unknown.
        threads: see `fill_threads`.
    """
    asked = fill_threads(asked, threads)

    # The number of jobs decides
    evaluate = asked.evaluate
    if evaluate.choice == "auto" and evaluate.split != "choice" and jobs == 1:
        evaluate = replace(evaluate, choice="none")
    if evaluate.stop == "decided" and evaluate.models is None:
        evaluate = replace(evaluate, models=jobs)

    # Other settings decide
    tail = asked.float_tail
    boxes = ("detection", "keypoints", "instance_segmentation")
    if tail is None and (asked.task.name in boxes or asked.data.name == "coco"):
        tail = True  # the tail of a detector decodes and joins boxes
    preprocess = asked.preprocess
    mean = list(map(float, limits.listed(preprocess.mean)))
    std = list(map(float, limits.listed(preprocess.std)))
    name = asked.model.name or name_network(asked.model)
    return replace(
        asked,
        model=replace(asked.model, name=name),
        preprocess=replace(preprocess, mean=mean, std=std),
        float_tail=tail,
        evaluate=evaluate,
    )


def fill_threads(asked: RunConfig, threads: int | None) -> RunConfig:
    """Return the settings, with `threads` in place of a null setting `threads`.

    Args:
        threads: the threads of this job; None for a single run, and if the jobs run in the process
            of the command.
    """
    return replace(asked, threads=threads) if asked.threads is None else asked
