"""Shared fixtures: the embedded set everywhere, the real files where CIFAR10_DIR names them."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from filelock import FileLock
from hydra import compose, initialize_config_dir
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Artifact, Quantizer
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.loading import parse_config, register_schemas
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache as work_cache
from resnet8ptq.core import machine
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data import locate
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.draw import draw_calibration
from resnet8ptq.evaluation.trial import Bench
from resnet8ptq.models import model

if TYPE_CHECKING:  # most tests do without MLflow
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from resnet8ptq.tracking.store import Store

REPO = Path(__file__).parents[1]
COMMAND = (sys.executable, str(REPO / "run.py"))
NO_REAL_FILES = {"CIFAR10_DIR": "", "RESNET8_H5": ""}

TESTED = 500  # images

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with many slow tests first, so that no process is left alone with one at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of the whole call of pytest; each of its processes has one below it."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


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
def one_converter() -> Iterator[None]:
    """TFLite conversions share a process: TensorFlow takes four seconds to start."""
    from resnet8ptq.backends.tflite import quantizer

    pools: list[ProcessPoolExecutor] = []

    def share(*args: Any, **kwargs: Any) -> nullcontext[ProcessPoolExecutor]:
        if not pools:
            pools.append(ProcessPoolExecutor(*args, **kwargs))
        return nullcontext(pools[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizer, "ProcessPoolExecutor", share)
        yield
    for pool in pools:
        pool.shutdown()


@pytest.fixture
def real_files() -> None:
    """Skip where the real CIFAR-10 and the real model are not named."""
    if not (os.environ.get("CIFAR10_DIR") and os.environ.get("RESNET8_H5")):
        pytest.skip("needs CIFAR10_DIR and RESNET8_H5")


@pytest.fixture(scope="session")
def shapes() -> Dataset:
    """The embedded data set."""
    return locate.load("shapes", None)


@pytest.fixture(scope="session")
def shapes_model(shapes: Dataset, cache_root: Path) -> model.Fp32Model:
    """The embedded set's network, converted and folded."""
    return model.load(make_config("data=shapes").model, shapes, cache_root)


def make_config(*overrides: str) -> RunConfig:
    """Compose conf/ with `overrides`, as run.py does."""
    register_schemas()
    with initialize_config_dir(str(REPO / "conf"), version_base="1.3"):
        return parse_config(compose("config", overrides=list(overrides)))


def runtime_of(config: RunConfig) -> Runtime:
    """Return what a run of these settings may use."""
    return work_cache.runtime(config.cache_dir, config.threads)


def quantizer_of(config: RunConfig) -> Quantizer:
    """Return the framework of these settings."""
    return make_quantizer(config, runtime_of(config))


def bench_of(config: RunConfig, fp32: model.Fp32Model) -> Bench:
    """Return the bench of a run of these settings."""
    return Bench(fp32.sha256, runtime_of(config), config.evaluate.batch_size)


THREADS = machine.threads(None)
Probabilities = NDArray[np.float32]


@dataclass(frozen=True)
class Cell:
    """A quantized model on disk, and how to read it."""

    config: RunConfig
    artifact: Artifact
    folder: Path
    data: Dataset

    def predict(self, batch_size: int = 256, images: int = TESTED) -> Probabilities:
        # As a fresh process would: nothing but the config and the file on disk.
        predictor = quantizer_of(self.config).load(self.artifact.path, THREADS)
        split = self.data.test.take(np.arange(images))
        return np.concatenate([predictor.predict(batch) for batch in split.batches(batch_size)])


Quantize = Callable[..., Cell]


@pytest.fixture(scope="session")
def quantize_anew(
    shapes: Dataset, shapes_model: model.Fp32Model, tmp_path_factory: pytest.TempPathFactory
) -> Quantize:
    """Quantize with 200 calibration images; the arguments are overrides of the config."""

    def run(*overrides: str) -> Cell:
        config = make_config("data=shapes", *overrides)
        folder = tmp_path_factory.mktemp("cell")
        split = draw_calibration(shapes, 20, config.seed).split
        return Cell(
            config, quantizer_of(config).quantize(shapes_model, split, folder), folder, shapes
        )

    return run


@pytest.fixture(scope="session")
def quantize(quantize_anew: Quantize) -> Quantize:
    """The same, once for each set of overrides."""
    return cache(quantize_anew)


@dataclass(frozen=True)
class Called:
    """A finished `run.py`, and the folder it ran in."""

    folder: Path
    code: int
    out: str
    err: str

    @property
    def client(self) -> "MlflowClient":
        from resnet8ptq.tracking.store import mlflow

        return mlflow.MlflowClient(tracking_uri=f"sqlite:///{self.folder / 'mlruns' / 'mlflow.db'}")

    @property
    def runs(self) -> list["Run"]:
        """All runs of the store, the oldest first."""
        experiment = self.client.get_experiment_by_name("resnet8ptq")
        assert experiment is not None
        order = ["attributes.start_time ASC"]
        return list(self.client.search_runs([experiment.experiment_id], order_by=order))

    @property
    def parent(self) -> "Run":
        (found,) = [run for run in self.runs if "overrides" in run.data.tags]
        return found

    @property
    def children(self) -> list["Run"]:
        parent_id = self.parent.info.run_id
        return [r for r in self.runs if r.data.tags.get("mlflow.parentRunId") == parent_id]

    def artifacts(self, run: "Run") -> dict[str, Path]:
        root = Path(run.info.artifact_uri.removeprefix("file://"))
        return {path.name: path for path in root.iterdir()}

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]

    @property
    def table(self) -> list[dict[str, str]]:
        """The rows of the printed table."""
        rows = [
            [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
            for line in self.out.splitlines()
            if line.startswith(("│", "┃"))
        ]
        return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def clean_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with `changes`, and with no store but one named there."""
    dropped = ("MLFLOW_TRACKING_URI", "HYDRA_FULL_ERROR")  # set in this process by MLflow and cli
    inherited = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**inherited, **changes}


def call(folder: Path, *args: str, **env: str) -> Called:
    """Call `run.py` in `folder`, as a person would; runs/ and mlruns/ land there."""
    done = subprocess.run(
        [*COMMAND, *args],
        cwd=folder,
        env=clean_environment(**env),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Called(folder, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Called:
    """One real sweep for everything that only looks at it: two frameworks, one unsupported cell."""
    args = ("-m", "backend=onnx,torch", "dtype=int8,uint8", "data=shapes")
    shared = shared_folder(tmp_path_factory)
    folder, record = shared / "sweep", shared / "sweep.json"
    with FileLock(shared / "sweep.lock"):  # the first process that wants it makes it
        if not record.exists():
            folder.mkdir()
            done = call(folder, *args, **NO_REAL_FILES)
            record.write_text(json.dumps([done.code, done.out, done.err]))
    return Called(folder, *json.loads(record.read_text()))


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SQLite file of an empty store, to be copied: making one takes a second."""
    from resnet8ptq.config.schema import TrackingConfig
    from resnet8ptq.tracking.store import open_store

    root = tmp_path_factory.mktemp("mlruns")
    open_store(TrackingConfig(root=str(root)))
    return root / "mlflow.db"


@pytest.fixture
def own_store(database: Path, tmp_path: Path) -> "Store":
    """An empty store of the test's own, in `mlruns` below its folder."""
    from resnet8ptq.config.schema import TrackingConfig
    from resnet8ptq.tracking.store import open_store

    root = tmp_path / "mlruns"
    root.mkdir()
    shutil.copy(database, root)
    return open_store(TrackingConfig(root=str(root)))


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCli:
    """Call `run.py` in an empty folder, as a person would; runs/ and mlruns/ land there."""

    def run(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *args],
            cwd=tmp_path,
            env=clean_environment(**env),
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
