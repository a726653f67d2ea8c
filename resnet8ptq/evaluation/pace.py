"""The batch size and the number of threads that an evaluation is fastest with."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache, machine
from resnet8ptq.data.dataset import Split

BATCH_SIZES = (16, 32, 64, 128)  # tried where `evaluate.batch_size` is not set
TRIAL_IMAGES = 256
DYNAMIC_BATCH_SIZE = 256


def find_pace(config: RunConfig, path: Path, split: Split) -> tuple[int, int]:
    """Return batch size and threads: as set, or as a short measurement has found them fastest.

    What is measured is kept in the cache for all runs of that network, framework and dtype on that
    CPU. Dynamic quantization depends on the batch, whose size is then no matter of speed.
    """
    threads, size = machine.threads(config.threads), config.evaluate.batch_size
    if size is None and config.method == "dynamic":
        size = DYNAMIC_BATCH_SIZE
    sizes = [size] if size else list(BATCH_SIZES)
    fewer = threads // 2 if config.threads is None else 0
    if len(sizes) == 1 and not fewer:
        return sizes[0], threads
    key: cache.Key = {
        **{name: json.dumps(asdict(getattr(config, name)), sort_keys=True) for name in _PACE_OF},
        "method": config.method,
        "format": config.format or "",
        "image_shape": str(split.images.shape[1:]),
        "sizes": str(sizes),
        "threads": f"{threads}, {fewer}",
        **cache.made_with("evaluation"),
    }

    def make(folder: Path) -> None:
        times = {(size, threads): _time(config, path, split, size, threads) for size in sizes}
        best = min(times, key=lambda pace: times[pace])
        if fewer:
            pace = best[0], fewer
            times[pace] = _time(config, path, split, *pace)
            best = min(times, key=lambda pace: times[pace])
        (folder / "pace.json").write_text(json.dumps(best))

    folder = cache.entry(cache.folder(config.cache_dir), "paces", key, make)
    batch_size, threads = json.loads((folder / "pace.json").read_text())
    return batch_size, threads


_PACE_OF = ("backend", "dtype", "model", "data")


def _load(config: RunConfig, path: Path, threads: int) -> Predictor:
    return BACKENDS[config.backend.name](replace(config, threads=threads)).load(path)


def _time(config: RunConfig, path: Path, split: Split, batch_size: int, threads: int) -> float:
    """Return the seconds for each of the first images: the best of three turns, as it warms up."""
    predictor = _load(config, path, threads)
    images = split.take(np.arange(min(TRIAL_IMAGES, len(split))))
    batches = list(images.batches(batch_size))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for batch in batches:
            predictor.predict(batch)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / len(images)
