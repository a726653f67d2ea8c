"""Shared fixtures: the embedded set everywhere, the real files where CIFAR10_DIR names them."""

import gc
import hashlib
import os
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from resnet8ptq.backends.contract import Artifact
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache as work_cache
from resnet8ptq.core import console, files, isolation, machine
from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.core.errors import PtqError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.watch import LOOK_SECONDS
from resnet8ptq.data import locate, registry
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.evaluation import batching
from resnet8ptq.experiment.network_and_data import fit_data
from resnet8ptq.models import model
from resnet8ptq.precision.decisions import Decisions
from tests.helpers.calling import FAILS, QUICK, Called
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, evaluator_of, quantizer_of
from tests.helpers.originals import call_isolated, runtime_of_all_cores, start_isolated
from tests.helpers.quantized import TESTED, Cell, Quantize, Write
from tests.helpers.sharing import call_once, shared_folder
from tests.helpers.stores import new_store, without_waiting_for_the_disk

if TYPE_CHECKING:  # most tests do without MLflow
    from resnet8ptq.tracking.mlflow_store.store import Store

# Nothing here depends on how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

TIMED = (  # a run that is timed, if not for long
    *("data=shapes", "evaluate.split=held_out", f"held_out_images={TESTED}"),
    "report.columns=[all]",
    *("latency.repeats=20", "latency.batch_repeats=2", "calib.samples_per_class=20"),
)
LONG = {  # tests of many processes, and of every backend
    *("test_run", "test_launchers", "test_server", "test_sync", "test_browser"),
    *("test_kills", "test_deploy", "test_backends"),
}
SLOW = 50  # quick tests take as long as a slow one


@pytest.fixture(autouse=True)
def _skip_a_backend_that_is_not_installed(request: pytest.FixtureRequest) -> None:
    """Skip what a test does with the backend of an extra that is not installed."""
    callspec = getattr(request.node, "callspec", None)
    name = callspec.params.get("backend") if callspec is not None else None
    backend = find_backends().get(name) if isinstance(name, str) else None
    if backend is not None and not backend.is_installed:
        pytest.skip(f"needs the extra {backend.extra}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that no process is left alone with one at the end."""
    cost: Counter[Path] = Counter()
    for item in items:
        cost[item.path] += SLOW if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: (item.path.stem not in LONG, -cost[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: some tests wait for others, such as Ray, Slurm and servers."""
    return machine.threads(None) + 1


def pytest_collection_finish() -> None:
    """Leave what is imported out of every search for garbage, and search as often as run.py."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def activated() -> Iterator[None]:
    """PATH has the interpreter's folder first, as in an activated environment."""
    folder = str(Path(sys.executable).absolute().parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", folder, prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for all tests of all processes: a network is converted once, not once a test."""
    root = shared_folder(tmp_path_factory) / "cache"
    root.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESNET8PTQ_CACHE", str(root))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield root


@pytest.fixture(autouse=True)
def forget_searches() -> Iterator[None]:
    """Let each test look for CIFAR-10 anew."""
    locate._find_cifar10.cache_clear()
    yield
    locate._find_cifar10.cache_clear()


@pytest.fixture(autouse=True)
def forget_store() -> Iterator[None]:
    """MLflow names the store in use in the environment; no later test is to log there."""
    yield
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Stores of tests need not outlive the machine."""
    with without_waiting_for_the_disk():
        yield


@pytest.fixture(scope="session", autouse=True)
def no_line_for_a_silence() -> Iterator[None]:
    """The watch prints nothing in this process: the speed of the machine decides when it does.

    Other processes print as for a user, and `test_watch` has its own clock.
    """
    with mock.patch.object(console._watch, "look", lambda: LOOK_SECONDS):
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The frameworks take one thread here: the other cores have tests of their own.

    Two that share a core wait for each other: torch then takes three times the CPU's time. And
    there is one batch size, so that no network is run to find the fastest: see `test_batching`.
    """

    def runtime(folder: str | None, threads: int | None, **others: Any) -> Runtime:
        of_all_cores = runtime_of_all_cores(folder, threads, **others)
        return replace(of_all_cores, threads=threads or THREADS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_cache, "runtime", runtime)
        patch.setattr(batching, "BATCH_SIZES", batching.BATCH_SIZES[-1:])
        yield


@pytest.fixture(scope="session", autouse=True)
def one_converter() -> Iterator[None]:
    """Conversions share a process: TensorFlow takes four seconds to start, torch three."""
    kept = ExitStack()
    processes: dict[bool, Connection] = {}

    @contextmanager
    def share(network: bool = False) -> Iterator[Connection]:
        if network not in processes:
            processes[network] = kept.enter_context(start_isolated(network))
        try:
            yield processes[network]
        except BaseException:  # it may have died, or be about to answer
            del processes[network]
            raise

    with kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "start", share)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_tflite_file(cache_root: Path) -> Iterator[None]:
    """TensorFlow converts a network with the same samples and settings to TFLite once.

    It takes two seconds, and the package keeps no such file. `quantize_anew` converts again.
    """

    def call(function: Callable[..., Any], *args: Any, crashed: PtqError, **more: Any) -> Any:
        if function.__module__ != CONVERTER or args[0].is_dir():
            return call_isolated(function, *args, crashed=crashed, **more)
        source, samples, *settings = args

        def make(folder: Path) -> None:
            content = call_isolated(function, *args, crashed=crashed)
            (folder / "model.tflite").write_bytes(content)

        fed = f"{samples.digest} {samples.layout}" if samples else ""
        key = {"network": files.sha256(source), "samples": fed, "settings": str(settings)}
        return (work_cache.entry(cache_root, "tflite", key, make) / "model.tflite").read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "call", call)
        yield


CONVERTER = "resnet8ptq.backends.tflite.converter"


@pytest.fixture
def real_files() -> None:
    """Skip where the real CIFAR-10 and the real model are not named."""
    if not (os.environ.get("CIFAR10_DIR") and os.environ.get("RESNET8_H5")):
        pytest.skip("needs CIFAR10_DIR and RESNET8_H5")


@pytest.fixture
def shared() -> Path:
    """The folder of real networks and data; skip where SHARED_DATA does not name it."""
    if "SHARED_DATA" not in os.environ:
        pytest.skip("needs SHARED_DATA")
    return Path(os.environ["SHARED_DATA"])


@pytest.fixture(scope="session")
def shapes() -> Dataset:
    """The embedded data set."""
    return registry.load("shapes", None)


@pytest.fixture(scope="session")
def shapes_model(shapes: Dataset, cache_root: Path) -> model.Fp32Model:
    """The embedded set's network, converted and folded."""
    return model.load_network(make_config("data=shapes").model, shapes, cache_root)


@pytest.fixture(scope="session")
def fitted(shapes: Dataset, shapes_model: model.Fp32Model) -> Dataset:
    """The embedded set, fitted to the network as in a run, with its batch limit."""
    return fit_data(shapes, shapes_model)


@pytest.fixture(scope="session")
def write(fitted: Dataset, shapes_model: model.Fp32Model) -> Write:
    """Quantize with 200 calibration samples."""

    def quantize(config: RunConfig, folder: Path) -> Artifact:
        split = draw_calibration(fitted, 20, config.seed).split
        evaluator = evaluator_of(config, shapes_model)  # it keeps FP32 files, as for runs
        return evaluator.quantize(shapes_model, Decisions.of(config), split, folder).artifact

    return quantize


@pytest.fixture(scope="session")
def quantize(
    write: Write,
    fitted: Dataset,
    shapes_model: model.Fp32Model,
    tmp_path_factory: pytest.TempPathFactory,
) -> Quantize:
    """Quantize with these overrides, once for all processes of the tests."""
    home = shared_folder(tmp_path_factory) / "cells"
    home.mkdir(exist_ok=True)

    @cache
    def run(*overrides: str) -> Cell:
        config = make_config("data=shapes", *overrides)
        if config.backend.name == "file" and config.backend.path is None:
            made = run("backend=onnx", "dtype=int8").artifact.path
            config = replace(config, backend=replace(config.backend, path=str(made)))
            config = replace(config, **quantizer_of(config).fit(shapes_model))
        folder = home / hashlib.sha256(repr(config).encode()).hexdigest()[:20]
        kept = folder.with_suffix(".pickle")
        with FileLock(folder.with_suffix(".lock")):
            if not kept.exists():
                folder.mkdir(exist_ok=True)
                kept.write_bytes(pickle.dumps(write(config, folder)))
        return Cell(config, pickle.loads(kept.read_bytes()), folder, fitted)

    return run


@pytest.fixture
def quantize_anew(
    write: Write, fitted: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Quantize:
    """The same, each time anew."""
    monkeypatch.setattr(isolation, "call", call_isolated)

    def run(*overrides: str) -> Cell:
        config = make_config("data=shapes", *overrides)
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return Cell(config, write(config, folder), folder, fitted)

    return run


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Called:
    """One real sweep for everything that only looks at it: two frameworks, one unsupported cell."""
    cells = ("backend=onnx,torch", "dtype=int8,uint8")
    return call_once(tmp_path_factory, "sweep", *cells, *TIMED, drawn=True)


@pytest.fixture(scope="session")
def failing_sweep(tmp_path_factory: pytest.TempPathFactory) -> Called:
    """A sweep of one job that succeeds and one that fails."""
    return call_once(tmp_path_factory, "failing", *QUICK, *FAILS)


@pytest.fixture
def own_store(tmp_path: Path) -> "Store":
    """An empty store of the test's own, in `mlruns` below its folder."""
    return new_store(tmp_path / "mlruns")
