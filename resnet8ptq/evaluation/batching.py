"""Runs batches in parallel, and finds the fastest batch size and number of threads."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.core import background, cache, memory
from resnet8ptq.core.console import measuring
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split

log = logging.getLogger(__name__)

BATCH_SIZES = (16, 64)  # the sizes to try if `evaluate.batch_size` is not set
TRIAL_IMAGES = 512  # most samples of a measurement, unless four batches for each copy are more
TRIAL_SECONDS = 0.5  # time of each measurement, and until the last turn begins
TURNS = 5  # turns of each batching; the median counts, as disturbances slow single turns
# One batch on several threads must take less than this share of the time of several batches at
# once, because its threads wait for each other while another process, such as an upload, runs.
MARGIN = 0.8
WARM_UP = 2  # most batches, because torch compiles in its first two runs of a shape
ENOUGH_SECONDS = 0.1  # a slower batch fills the cores, so no larger batch is tried

Load = Callable[[int], Predictor]  # loads an artifact for a number of threads
T = TypeVar("T")


@dataclass(frozen=True)
class Batching:
    """Batch size and parallelism of an evaluation.

    Attributes:
        threads: the threads of one batch.
        at_once: the number of parallel batches, each on its own copy of the network. A small
            network does not use all cores with one batch.
    """

    batch_size: int
    threads: int
    at_once: int = 1


def run_all(
    copies: Sequence[Callable[[NDArray[np.float32]], T]], batches: Iterable[NDArray[np.float32]]
) -> Iterator[T]:
    """Yield the outputs of the batches, in order; each copy runs one batch at a time."""
    if len(copies) == 1:
        yield from map(copies[0], batches)
        return

    # A batch takes any copy that is idle
    idle: SimpleQueue[Callable[[NDArray[np.float32]], T]] = SimpleQueue()
    for copy in copies:
        idle.put(copy)

    def run(batch: NDArray[np.float32]) -> T:
        copy = idle.get()
        try:
            return copy(batch)
        finally:
            idle.put(copy)

    # Yield the oldest batch first, to keep the order
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(len(copies)) as pool:
        for batch in batches:
            if len(waiting) > len(copies):  # one batch ahead, so that no copy waits for input
                yield waiting.popleft().result()
            waiting.append(pool.submit(run, batch))
        while waiting:
            yield waiting.popleft().result()


def find_batching(
    load: Load, split: Split, batch_size: int | None, runtime: Runtime, about: cache.Key
) -> Batching:
    """Return the fastest of a few batchings that settings and memory allow, by a measurement.

    The cache keeps the result. Nothing is measured if only one batching is allowed, or if there are
    few samples and `batch_size` is None.

    Args:
        split: the samples, of which the measurement runs the first.
        batch_size: the requested batch size; None for the fastest. A fixed batch size of the
            network has precedence.
        about: the artifact's part of the cache key, such as network, framework and dtype.
    """
    # The network's batch size comes first, then that of the settings
    sizes = list(BATCH_SIZES)
    if split.at_once is not None:
        sizes = [split.at_once]
    elif batch_size:
        sizes = [batch_size]
    threads = runtime.threads
    most = split.within_memory or max(sizes) * threads

    # List the ways that fit into memory, as pairs of threads for a batch and batches at once
    ways = {(threads, 1)}
    if threads <= most:
        ways.add((1, threads))
    if not runtime.threads_fixed and threads > 2 and threads // 2 <= most:
        ways.add((1, threads // 2))
    widest = max(ways, key=_at_once)
    largest = most // _at_once(widest)
    sizes = sorted({min(size, largest) for size in sizes})
    if batch_size and sizes[0] < min(batch_size, split.at_once or batch_size):
        log.warning(
            "evaluate.batch_size: %d samples at once exceed the memory budget of %.1f GB; using %d",
            batch_size,
            memory.budget() / 1e9,
            sizes[0],
        )

    # Measure, unless there is no choice
    if len(sizes) == len(ways) == 1:
        return Batching(sizes[0], *widest)
    if batch_size is None and len(split) <= BATCH_SIZES[-1]:  # measuring would take longer
        return Batching(sizes[0], *min(ways, key=_at_once))

    # Keep the result by network, shape and choices
    key: cache.Key = {
        **about,
        "shape": str(split.input_shape or split.stored.dtype),
        "sizes": str(sizes),
        "ways": str(sorted(ways)),
        **cache.made_with(__name__),
    }

    def make(folder: Path) -> None:
        background.wait_until_idle()
        with measuring("Finding the fastest batch size"):
            best = _find_fastest(load, split, sizes, sorted(ways))
        (folder / "batching.json").write_text(json.dumps(astuple(best)))

    folder = cache.entry(runtime.cache_root, "paces", key, make)
    return Batching(*json.loads((folder / "batching.json").read_text()))


def _find_fastest(
    load: Load, split: Split, sizes: Sequence[int], ways: Sequence[tuple[int, int]]
) -> Batching:
    """Return the fastest batch size with its fastest way (threads of a batch, batches at once).

    One thread for a batch wins, unless several take less than the share `MARGIN` of its time.
    """
    # Find the fastest batch size, with the most batches at once
    widest = max(ways, key=_at_once)
    times: dict[Batching, float] = {}
    for size in sizes:
        batching = Batching(size, *widest)
        times[batching] = measure_pace(load, split, batching)
        if times[batching] * size > ENOUGH_SECONDS:
            break
    fastest = min(times, key=times.__getitem__)

    # Find the fastest way for that size, in turns; a slow network is not measured again
    paces = [Batching(fastest.batch_size, *way) for way in ways]
    if len(paces) == 1:
        return paces[0]
    begin = time.perf_counter()
    turns: list[list[float]] = []
    while not turns or (len(turns) < TURNS and time.perf_counter() - begin < TRIAL_SECONDS):
        turn = []
        for pace in paces:
            known = times.pop(pace, None)
            turn.append(known or measure_pace(load, split, pace))
        turns.append(turn)

    # One thread for a batch wins unless several are clearly faster, see `MARGIN`
    margins = np.ones(len(paces))
    for index, pace in enumerate(paces):
        if pace.threads == 1:
            margins[index] = MARGIN
    weighted = np.median(turns, axis=0) * margins
    return paces[int(weighted.argmin())]


def _at_once(way: tuple[int, int]) -> int:
    """Return the number of batches at once of a way (threads of a batch, batches at once)."""
    return way[1]


def measure_pace(load: Load, split: Split, batching: Batching) -> float:
    """Return the seconds per sample, measured on the first samples after a warm-up."""
    copies = [load(batching.threads).predict for _ in range(batching.at_once)]
    most = max(TRIAL_IMAGES, 4 * batching.at_once * batching.batch_size)
    first = split.take(np.arange(min(most, len(split))))
    batches = first.batches(batching.batch_size)

    # Warm each copy up; for a slow one, a batch is enough
    for copy in copies:
        begin = time.perf_counter()
        for batch in islice(batches, WARM_UP):
            copy(batch)
            if time.perf_counter() - begin > ENOUGH_SECONDS:
                break

    # Measure until the time or the samples end
    start = time.perf_counter()
    run = 0

    def for_a_while() -> Iterator[NDArray[np.float32]]:
        nonlocal run
        for batch in batches:
            if run and time.perf_counter() - start > TRIAL_SECONDS:
                return
            run += len(batch)
            yield batch

    for _ in run_all(copies, for_a_while()):
        pass
    return (time.perf_counter() - start) / run
