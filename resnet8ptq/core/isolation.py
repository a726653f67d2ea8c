"""Calls that read an untrusted file with TensorFlow or torch: each in a process of its own."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from resnet8ptq.core.errors import PtqError

MAX_SECONDS = 3600  # for each core

T = TypeVar("T")


def call(function: Callable[..., T], *args: object, crashed: PtqError) -> T:
    """Call a function in a process of its own.

    TensorFlow's memory and settings go when it ends, and a file that crashes the reader does not
    end the sweep.

    Raises:
        PtqError: `crashed`, where the process ended before the function did.
    """
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, context, limit) as pool:
            return pool.submit(function, *args).result()
    except BrokenProcessPool as error:
        raise crashed from error


def limit() -> None:
    """Limit this process to the machine's memory, and to one hour of each of its cores.

    A file may ask for more than it holds: a constant of 10**12 zeros, a loop without end.
    """
    import resource

    bytes_there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    seconds = MAX_SECONDS * (os.cpu_count() or 1)
    for kind, most in ((resource.RLIMIT_DATA, bytes_there), (resource.RLIMIT_CPU, seconds)):
        _, hard = resource.getrlimit(kind)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (soft, hard))
