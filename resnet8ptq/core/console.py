"""Terminal output: log and progress bars on stderr, tables of results on stdout."""

import logging
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from logging import Logger, LogRecord
from typing import Any, TypeVar

from rich.box import SIMPLE
from rich.console import Console, ConsoleRenderable, JustifyMethod
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from resnet8ptq.core.text import show

T = TypeVar("T")

LINE_SECONDS = 15.0  # without a terminal: between two lines of progress
QUIET_SECONDS = 3.0  # without a terminal: a step without parts is named after this time


@cache
def stderr() -> Console:
    """Return the console shared by log and progress bars, so that neither overwrites the other."""
    return stdout(Console(stderr=True), 130)


def stdout(console: Console | None, width: int) -> Console:
    """Return `console`, or by default a console on stdout.

    Args:
        width: in characters, if stdout is not a terminal. In a pipe, rich would fold lines at 80.
    """
    console = console or Console(soft_wrap=False)
    if not console.is_terminal:
        console.width = width
    return console


@cache  # once a process, not once for each job of a sweep
def log_once(log: Logger, text: str, *values: object) -> None:
    """Log a text, unless this process has logged it before with the same values."""
    log.info(text, *values)


@cache
def warn_once(log: Logger, text: str, *values: object) -> None:
    """Warn, unless this process has warned before with the same values."""
    log.warning(text, *values)


def say(console: Console, text: object) -> None:
    """Print a line without folding it and without interpreting markup."""
    console.print(show(text), soft_wrap=True, markup=False, highlight=False)


def print_table(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    title: str = "",
    right: Collection[int] = (),
    whole: bool = True,
    styles: Sequence[str] = (),
    totals: int = 0,
    compact: bool = False,
) -> None:
    """Print a table of texts, which may be untrusted.

    Args:
        right: indices of the right-aligned columns.
        whole: whether right-aligned cells are never folded.
        styles: rich's style of each row; empty: no style.
        totals: number of last rows below a separating line.
        compact: no lines between columns, for a narrow terminal.
    """
    frame: dict[str, Any] = {"box": SIMPLE, "padding": 0, "collapse_padding": True}
    table = Table(
        title=Text(show(title)) if title else None, title_justify="left", **frame if compact else {}
    )
    for column, head in enumerate(heads):
        justify: JustifyMethod = "right" if column in right else "left"
        folded = not whole or justify == "left"
        table.add_column(
            Text(show(head)), justify=justify, no_wrap=not folded, overflow="fold", min_width=5
        )
    for index, row in enumerate(rows):
        if totals and index == len(rows) - totals:
            table.add_section()
        style = styles[index] if styles else None
        table.add_row(*(Text(show(cell)) for cell in row), style=style or None)
    console.print(table)


class LogHandler(RichHandler):
    """Log handler on the console `stderr`; `conf/hydra/job_logging` names it."""

    def __init__(self, level: int | str = "NOTSET") -> None:
        super().__init__(level, stderr(), show_path=False, log_time_format="%H:%M:%S")

    def render_message(self, record: LogRecord, message: str) -> ConsoleRenderable:
        """Replace control characters, which a message may quote from a file."""
        return super().render_message(record, show(message))

    def emit(self, record: LogRecord) -> None:
        """Write the record, and delay the next progress line by `LINE_SECONDS`."""
        super().emit(record)
        _spoken.at = time.monotonic()


class FileFormatter(logging.Formatter):
    """Formatter of a run's log file; `conf/hydra/job_logging` names it."""

    def format(self, record: LogRecord) -> str:
        """Replace control characters, and indent further lines, so that none looks like a record.

        A message may quote a name from a file.
        """
        return show(super().format(record)).replace("\n", "\n    ")


def track(batches: Iterable[T], label: str, unit: str = "batches") -> Iterator[T]:
    """Yield `batches` with a progress bar; without a terminal, with a line every 15 seconds.

    Workers of a parallel sweep have no terminal: see `sweep.jobs.prepare_workers`.
    """
    total = len(batches) if isinstance(batches, Sized) else None
    console = stderr()
    if not console.is_interactive:
        yield from _track_in_lines(batches, _Step(label, unit, total))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield from progress.track(batches, total=total, description=label)


@contextmanager
def waiting(label: str, draws_per_second: float = 10) -> Iterator[None]:
    """Show a spinner during a step that cannot report its progress.

    Without a terminal, name a step that takes longer than `QUIET_SECONDS` in a line, and again
    every `LINE_SECONDS`.
    """
    console = stderr()
    if not console.is_interactive:
        with _named_late(label):
            yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=draws_per_second
    ) as progress:
        progress.add_task(label, total=None)
        yield


def measuring(label: str) -> AbstractContextManager[None]:
    """Like `waiting`, for a measurement: draw seldom, because drawing would disturb it."""
    return waiting(label, 1 / 2.5)


@contextmanager
def _named_late(label: str) -> Iterator[None]:
    ended = threading.Event()
    threading.Thread(target=_name_until, args=(ended, label), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _name_until(ended: threading.Event, label: str) -> None:
    """Name a step that does not end, first after `QUIET_SECONDS`, then every `LINE_SECONDS`."""
    begin = time.monotonic()
    pause, since = QUIET_SECONDS, ""
    while not ended.wait(pause):
        _say(f"{label} ...{since}")
        pause = LINE_SECONDS
        since = f" {time.monotonic() - begin + pause:.0f} s"


@dataclass(eq=False)
class _Step:
    """The progress of a step."""

    label: str
    unit: str
    total: int | None
    done: int = 0
    begin: float = field(default_factory=lambda: time.monotonic())

    def __str__(self) -> str:
        if self.total is None or self.done == 0:
            return f"{self.label}: {self.done} {self.unit}"
        seconds = (time.monotonic() - self.begin) / self.done * (self.total - self.done)
        left = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        return f"{self.label}: {self.done} of {self.total} {self.unit}, {left} left"


@dataclass
class _Spoken:
    """The time of the last progress line, and the running steps, outermost first."""

    at: float = field(default_factory=lambda: time.monotonic())
    steps: list[_Step] = field(default_factory=list)


_spoken = _Spoken()


def _track_in_lines(batches: Iterable[T], step: _Step) -> Iterator[T]:
    _spoken.steps.append(step)
    try:
        for batch in batches:
            quiet_since = max(_spoken.at, _spoken.steps[0].begin)
            if time.monotonic() - quiet_since >= LINE_SECONDS:
                _say("; ".join(map(str, _spoken.steps)))
            yield batch
            step.done += 1
    finally:
        _spoken.steps.remove(step)


def _say(line: str) -> None:
    _spoken.at = time.monotonic()
    stderr().print(f"{time.strftime('%H:%M:%S')} {show(line)}", markup=False, highlight=False)


@contextmanager
def silenced() -> Iterator[None]:
    """Suppress warnings and log messages up to WARNING, such as a library's deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
