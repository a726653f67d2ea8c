"""What a person sees while it runs: one console on stderr, and progress bars on it.

stdout is left to results (the tables), so that they can be piped.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


@cache
def stderr() -> Console:
    """The console of both the log and the progress bars: neither overwrites the other."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 130  # a pipe or a file has no width; rich would fold lines at 80
    return console


class LogHandler(RichHandler):
    """The log on that console; `conf/hydra/job_logging` names it."""

    def __init__(self, level: int | str = "NOTSET") -> None:
        super().__init__(level, stderr(), show_path=False, log_time_format="%H:%M:%S")


def track(batches: Iterable[T], label: str, unit: str = "batches") -> Iterator[T]:
    """Yield `batches` with a progress bar, where there is a terminal to show it on."""
    with bar(label, len(batches) if isinstance(batches, Sized) else None, unit) as advance:
        for batch in batches:
            yield batch
            advance(1)


@contextmanager
def bar(label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar during the block, where there is a terminal; yield what moves it on.

    None in the workers of a parallel sweep: see `jobs.prepare_workers`.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    console = stderr()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_interactive
    ) as progress:
        task = progress.add_task(label, total=total)
        yield lambda steps: progress.advance(task, steps)
