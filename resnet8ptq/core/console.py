"""What a person sees while it runs: one console on stderr, and progress bars on it.

stdout is left to results (the tables), so that they can be piped.
"""

from collections.abc import Iterable, Iterator, Sized
from functools import cache
from logging import LogRecord
from typing import TypeVar

from rich.console import Console, ConsoleRenderable
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from resnet8ptq.core.text import show

T = TypeVar("T")


@cache
def stderr() -> Console:
    """The console of both the log and the progress bars: neither overwrites the other."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 130  # a pipe or a file has no width; rich would fold lines at 80
    return console


def stdout(console: Console | None, width: int) -> Console:
    """Return the console of results: the one given, else stdout.

    Args:
        width: where there is no terminal. A pipe has none, and rich would fold columns at 80.
    """
    console = console or Console(soft_wrap=False)
    if not console.is_terminal:
        console.width = width
    return console


class LogHandler(RichHandler):
    """The log on that console; `conf/hydra/job_logging` names it."""

    def __init__(self, level: int | str = "NOTSET") -> None:
        super().__init__(level, stderr(), show_path=False, log_time_format="%H:%M:%S")

    def render_message(self, record: LogRecord, message: str) -> ConsoleRenderable:
        """Show what a message quotes from a file without the characters that steer a terminal."""
        return super().render_message(record, show(message))


def track(batches: Iterable[T], label: str, unit: str = "batches") -> Iterator[T]:
    """Yield `batches` with a progress bar, where there is a terminal to show it on.

    Not in the workers of a parallel sweep: see `sweep.jobs.prepare_workers`.
    """
    total = len(batches) if isinstance(batches, Sized) else None
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
        yield from progress.track(batches, total=total, description=label)
