"""Times a store under load: many processes log runs at once, through `resnet8ptq.tracking`.

    python -m studies.tracking_load SERVER DATABASE

SERVER is the address of MLflow's server (docs/server.md) on the empty PostgreSQL DATABASE; its runs
are compared with those of an SQLite file.

A run logs as much as a real one (params, metrics, data sets, six files); nothing is quantized.
"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from sqlalchemy import create_engine, text

from benchmarks.setting import REPO
from resnet8ptq.config.loading import parse_config, register_schemas
from resnet8ptq.config.schema import RunConfig, TrackingConfig
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.evaluation.latency import ModelLatency, Timings
from resnet8ptq.evaluation.result import Measurement, RunResult
from resnet8ptq.tasks import classification
from resnet8ptq.tasks.classification import ClassScores
from resnet8ptq.tasks.scoring.metric import Metrics
from resnet8ptq.tracking.mlflow_store.store import Store, open_store
from resnet8ptq.tracking.run import start_parent, start_run

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FILES = {  # name -> bytes, as large as those of a run on CIFAR-10
    **{"model.bin": 100_000, "predictions.npz": 200_000, "confusion.png": 50_000},
    **{"config.yaml": 2_000, "result.json": 3_000, "ranges.json": 4_000},
}
PROCESSES = (1, 8)
RUNS = 48  # of all processes
ROUNDS = 2

_barrier: Any = None


@contextmanager
def start_processes(number: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool whose processes begin each round of `number` tasks at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "mlflow", "git"])  # imported once, not in each
    barrier = context.Barrier(number)
    with ProcessPoolExecutor(number, context, _enter, (barrier,)) as pool:
        yield pool


def _enter(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def open_at_once(config: TrackingConfig) -> Store:
    """Open a store at the same moment as every other process of the pool."""
    _meet()
    return open_store(config)


def log_at_once(task: tuple[Store, str, Path, range]) -> tuple[float, float]:
    """Log runs while every other process of the pool does; return start and end, in seconds."""
    make_config(), make_result()
    _meet()
    began = time.time()
    for number in task[3]:
        log_run(*task[:3], number)
    return began, time.time()


def _meet() -> None:
    try:
        _barrier.wait(timeout=120)
    except BrokenBarrierError:
        raise RuntimeError("another process of the pool did not start") from None


def log_run(store: Store, parent_id: str | None, folder: Path, number: int) -> str:
    """Log run `number` as `run.py` logs its own; return its id."""
    own = folder / f"{number}"
    own.mkdir(parents=True)
    content = np.random.default_rng(number)
    for name, size in FILES.items():
        (own / name).write_bytes(content.bytes(size))
    images = Split(np.zeros((100, 2, 2, 3), np.uint8), np.arange(100) % 10, "made up")
    data = Dataset("made up", CLASSES, images, images)
    tags = {"job_number": str(number)}
    with start_run(store, f"run {number}", own, parent_id, tags) as run:
        run.log_config(make_config())
        run.log_params({"model_sha256": "0" * 64})
        run.log_datasets(data, CalibrationSet(images, np.arange(100)), CLASSES)
        run.log_step(0, {"number": number})
        run.log_result(make_result())
        return run.run_id


@cache
def make_config() -> RunConfig:
    """Return the config of a run without overrides."""
    register_schemas()
    with initialize_config_dir(str(REPO / "conf"), version_base="1.3"):
        return parse_config(compose("config"))


@cache
def make_result() -> RunResult:
    """Return a result with every figure of a static quantization."""
    content = np.random.default_rng(0)
    labels = np.arange(1000) % 10
    model, baseline = (
        ClassScores(content.dirichlet(np.ones(10), 1000).astype(np.float32), labels)
        for _ in range(2)
    )
    timings = Timings(content.random(50), content.random(50))
    task = classification.build(CLASSES)
    metrics: Metrics = {
        "baseline/size_bytes": 320_000,
        "counts/quantized_layers": 11,
        "system/quantize_s": 1.0,
        "system/evaluate_s": 1.0,
        "system/evaluate_batch_size": 256,
        "system/evaluate_threads": 1,
        "peak_memory_bytes": 500_000_000,
        **ModelLatency(timings, timings).to_metrics(),
    }
    measurement = Measurement(task, task.compare(model, baseline), 100_000, metrics)
    return RunResult("ok", measurement=measurement, resolved={"weight_dtype": "int8"})


def measure(config: TrackingConfig, processes: int, runs: int, folder: Path) -> float:
    """Return the runs logged in a minute by `processes` processes, `runs` in all."""
    with start_processes(processes) as pool:
        store, *_ = pool.map(open_at_once, [config] * processes)
        folder.mkdir()
        parent_id = start_parent(store, "load", folder, {})
        share = runs // processes
        tasks = [
            (store, parent_id, folder, range(first, first + share))
            for first in range(0, share * processes, share)
        ]
        times = list(pool.map(log_at_once, tasks))
    seconds = max(ended for _, ended in times) - min(began for began, _ in times)
    return 60 * share * processes / seconds


def main() -> None:
    """Measure both stores in turn, and the size of a run in PostgreSQL."""
    address, database = sys.argv[1:]
    engine = create_engine(database)
    with tempfile.TemporaryDirectory(prefix="load-") as scratch:
        configs = {
            "server": TrackingConfig(uri=address),
            "sqlite": TrackingConfig(root=f"{scratch}/mlruns"),
        }
        measure(configs["server"], 1, 1, Path(scratch) / "warm-up")
        before = _count(engine)
        logged = 0
        for repeat in range(ROUNDS):
            for processes in PROCESSES:
                for name, config in configs.items():
                    folder = Path(scratch) / f"{name}-{processes}-{repeat}"
                    rate = measure(config, processes, RUNS, folder)
                    print(f"{name}, {processes} processes: {rate:.0f} runs a minute", flush=True)
                    logged += RUNS if name == "server" else 0
        rows, size = (after - start for after, start in zip(_count(engine), before, strict=True))
        print(f"PostgreSQL: {rows / logged:.0f} rows and {size / logged:.0f} bytes a run")


def _count(engine: Any) -> tuple[int, int]:
    """Return rows of all tables, and bytes of the database."""
    with engine.connect() as connection:
        names = connection.execute(
            text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        ).scalars()
        rows = sum(
            connection.execute(text(f'SELECT count(*) FROM "{name}"')).scalar() for name in names
        )
        size = connection.execute(text("SELECT pg_database_size(current_database())")).scalar()
    return rows, size


if __name__ == "__main__":
    main()
