"""The batch size and the number of threads that an evaluation is fastest with."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.core import cache
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split

BATCH_SIZES = (16, 32, 64, 128)  # tried where `evaluate.batch_size` is not set
TRIAL_IMAGES = 256
TRIAL_SECONDS = 1.0  # for each; a batch that takes longer is the largest that is tried

Load = Callable[[int], Predictor]  # an artifact, to run on so many threads


@dataclass(frozen=True)
class Pace:
    """How an evaluation is run."""

    batch_size: int
    threads: int


def find_pace(
    load: Load, split: Split, batch_size: int | None, runtime: Runtime, about: cache.Key
) -> Pace:
    """Return batch size and threads: as set, or as a short measurement has found them fastest.

    What is measured is kept in the cache.

    Args:
        load: loads the artifact.
        split: its first images are run.
        batch_size: as set; None: the fastest.
        runtime: threads, as set or at most.
        about: what the measurement is kept under: network, framework, dtype.
    """
    sizes = [batch_size] if batch_size else list(BATCH_SIZES)
    if split.at_once is not None:
        sizes = [split.at_once]
    threads, fewer = runtime.threads, 0 if runtime.threads_fixed else runtime.threads // 2
    if len(sizes) == 1 and not fewer:
        return Pace(sizes[0], threads)
    key: cache.Key = {
        **about,
        "image_shape": str(split.input_shape),
        "sizes": str(sizes),
        "threads": f"{threads}, {fewer}",
        **cache.made_with("evaluation"),
    }

    def make(folder: Path) -> None:
        times: dict[Pace, float] = {}
        for pace in (Pace(size, threads) for size in sizes):
            times[pace] = _time(load, split, pace)
            if times[pace] * pace.batch_size > TRIAL_SECONDS:
                break
        best = min(times, key=lambda pace: times[pace])
        if fewer:
            pace = Pace(best.batch_size, fewer)
            times[pace] = _time(load, split, pace)
            best = min(times, key=lambda pace: times[pace])
        (folder / "pace.json").write_text(json.dumps([best.batch_size, best.threads]))

    folder = cache.entry(runtime.cache_root, "paces", key, make)
    return Pace(*json.loads((folder / "pace.json").read_text()))


def _time(load: Load, split: Split, pace: Pace) -> float:
    """Return the seconds for each of the first images: the best of three turns, as it warms up."""
    predictor = load(pace.threads)
    images = split.take(np.arange(min(TRIAL_IMAGES, len(split))))
    batches = list(images.batches(pace.batch_size))
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < 3 and (not found or time.perf_counter() - begin < TRIAL_SECONDS):
        start, run = time.perf_counter(), 0
        for batch in batches:
            predictor.predict(batch)
            run += len(batch)
            if time.perf_counter() - start > TRIAL_SECONDS:
                break
        found.append((time.perf_counter() - start) / run)
    return min(found)
