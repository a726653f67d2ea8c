"""Terminal output: log and progress bars on stderr, tables of results on stdout."""

import logging
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from logging import Logger, LogRecord
from typing import TextIO, TypeVar

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
from resnet8ptq.core.watch import LINE_SECONDS, Watch

T = TypeVar("T")
_UNBOUNDED = 100_000  # characters of a line in a pipe


@cache
def stderr() -> Console:
    """Return the console shared by log and progress bars, so that neither overwrites the other."""
    return stdout(Console(stderr=True, force_terminal=_force(sys.stderr)), 130)


def stdout(console: Console | None, width: int) -> Console:
    """Return `console`, or by default a console on stdout.

    Args:
        width: in characters, used unless the console is a terminal. In a pipe, rich would fold
            lines at 80.
    """
    console = console or Console(soft_wrap=False, force_terminal=_force(sys.stdout))
    if not console.is_terminal:
        console.width = width
    return console


def _force(stream: TextIO) -> bool | None:
    """Return rich's `force_terminal`: False for a pipe or a file, even if FORCE_COLOR is set.

    Jupyter and some CI jobs set FORCE_COLOR. rich would then treat a pipe as a terminal, and print
    each frame of a spinner as a line.
    """
    try:
        return None if stream.isatty() else False
    except ValueError:  # the stream is closed
        return False


@cache  # warns once in a process, not once for each job of a sweep
def log_once(log: Logger, text: str, *values: object) -> None:
    """Log a text, unless this process has logged it before with the same values."""
    log.info(text, *values)


@cache
def warn_once(log: Logger, text: str, *values: object) -> None:
    """Log a warning, unless this process has logged it before with the same values."""
    log.warning(text, *values)


def say(console: Console, text: object) -> None:
    """Print a line without folding it and without interpreting markup."""
    console.print(show(text), soft_wrap=True, markup=False, highlight=False)
    _watch.hear()


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
        whole: whether right-aligned cells stay in one line, which a narrow terminal cuts off.
        styles: rich's style of each row; empty for no style.
        totals: number of last rows below a separating line.
        compact: whether to omit the lines between columns, for a narrow terminal.
    """
    heading = Text(show(title)) if title else None
    table = Table(title=heading, title_justify="left")
    if compact:
        table.box = SIMPLE
        table.padding = (0, 0, 0, 0)
        table.collapse_padding = True

    # Numbers are aligned to the right, and not folded
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
        cells = [Text(show(cell)) for cell in row]
        table.add_row(*cells, style=style or None)

    # In a pipe, a row is one line
    if not console.is_terminal:
        unbounded = console.options.update(max_width=_UNBOUNDED)
        console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)
    _watch.hear()


class LogHandler(RichHandler):
    """Log handler on the console `stderr`; `conf/hydra/job_logging` names it."""

    def __init__(self, level: int | str = "NOTSET") -> None:
        super().__init__(level, stderr(), show_path=False, log_time_format="%H:%M:%S")

    def render_message(self, record: LogRecord, message: str) -> ConsoleRenderable:
        """Replace control characters, which a message may quote from a file."""
        return super().render_message(record, show(message))

    def emit(self, record: LogRecord) -> None:
        """Write a record, unfolded if stderr is no terminal; delay the next line of `watch`."""
        if stderr().is_terminal:
            super().emit(record)
        else:
            _say(f"{record.levelname:8} {self.format(record)}")
        _watch.hear()


class FileFormatter(logging.Formatter):
    """Formatter of a run's log file; `conf/hydra/job_logging` names it."""

    def format(self, record: LogRecord) -> str:
        """Replace control characters, and indent further lines, so that none looks like a record.

        A message may quote a name from a file.
        """
        return show(super().format(record)).replace("\n", "\n    ")


def track(batches: Iterable[T], label: str, unit: str = "batches") -> Iterator[T]:
    """Yield `batches` with a progress bar; without a terminal, with lines (see `watch`).

    Use it for each loop that may take more than a second, so that no command is silent for long.

        for batch in track(split.batches(250), "Evaluating"):
            outputs.append(run(batch))

    Workers of a parallel sweep draw no bars, see `sweeps.jobs.prepare_workers`.
    """
    total = len(batches) if isinstance(batches, Sized) else None
    console = stderr()
    with _watch.step(label, unit, total) as step:
        if not console.is_interactive:
            for batch in batches:
                yield batch
                step.done += 1
            return

        # rich counts the batches itself
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
    """Show a spinner during a step that cannot report its progress; without a terminal, lines."""
    console = stderr()
    with _watch.step(label):
        if not console.is_interactive:
            yield
            return
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(
            *columns, console=console, transient=True, refresh_per_second=draws_per_second
        ) as progress:
            progress.add_task(label, total=None)
            yield


def measuring(label: str) -> AbstractContextManager[None]:
    """Show a spinner during a measurement; it draws seldom, so as not to disturb the measurement.

    See `waiting`.
    """
    return waiting(label, 1 / 2.5)


def never_silent(between: str = "Working") -> None:
    """Start to print the current step whenever nothing was printed for a while.

    Args:
        between: the label between the steps of `waiting` and `track`, unless modules are imported
            there; empty for no line.
    """
    _watch.between = between
    _watch.start()


def speak_seldom() -> None:
    """Write progress only every `LINE_SECONDS`, because parallel processes write lines too."""
    _watch.quiet_s = LINE_SECONDS


def _say(line: str) -> None:
    text = f"{time.strftime('%H:%M:%S')} {show(line)}"
    if stderr().is_terminal:
        stderr().print(text, markup=False, highlight=False)
    else:  # if the pipe closes, rich would end this thread silently
        sys.stderr.write(f"{text}\n")  # written in one call, because `print` may interleave threads
        sys.stderr.flush()


_watch = Watch(_say, draws=lambda: stderr().is_interactive)


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
