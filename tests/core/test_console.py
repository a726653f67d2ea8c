"""Progress where there is no terminal."""

import io
import re
from collections.abc import Callable

from rich.console import Console

from resnet8ptq.core import console
from resnet8ptq.core.console import print_table


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys):
    now = 0.0

    def tick() -> float:
        return now

    monkeypatch.setattr(console.time, "monotonic", tick)
    monkeypatch.setattr(console, "_spoken", console._Spoken())
    for _ in console.track(range(4), "Quantizing", "layers"):
        for _ in console.track(range(10), "Evaluating [x]"):
            now += 2
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "Quantizing: 0 layers; Evaluating [x]: 8 of 10 batches, 0:04 left",
        "Quantizing: 1 of 4 layers, 1:36 left; Evaluating [x]: 6 of 10 batches, 0:08 left",
        "Quantizing: 2 of 4 layers, 0:48 left; Evaluating [x]: 4 of 10 batches, 0:12 left",
        "Quantizing: 3 of 4 layers, 0:21 left; Evaluating [x]: 2 of 10 batches, 0:16 left",
    ]
    assert not console._spoken.steps


def test_a_quick_step_leaves_no_line(monkeypatch, capsys):
    monkeypatch.setattr(console, "_spoken", console._Spoken())
    with console.waiting("Converting"):
        assert list(console.track([1, 2], "Running")) == [1, 2]
    assert capsys.readouterr().err == ""


class Now:
    """A thread that does all its work at its start."""

    def __init__(self, target: Callable[..., None], args: tuple[object, ...], daemon: bool) -> None:
        self.start = lambda: target(*args)


class Elapsed:
    """The end of a step that comes after two pauses."""

    def __init__(self) -> None:
        self._pauses = iter([False, False, True])

    def wait(self, _: float) -> bool:
        """Return whether the step has ended."""
        return next(self._pauses)

    def set(self) -> None:
        """Nothing waits any more."""


def test_a_long_step_without_parts_is_named_and_named_again(monkeypatch, capsys):
    monkeypatch.setattr(console.threading, "Thread", Now)
    monkeypatch.setattr(console.threading, "Event", Elapsed)
    with console.waiting("Converting"):
        pass
    first, second = capsys.readouterr().err.splitlines()
    assert first[9:] == "Converting ..."
    assert second[9:].startswith("Converting ... 15 s")


def test_an_abandoned_step_is_forgotten():
    steps = console.track(range(4), "Running")
    next(steps)
    steps.close()
    assert not console._spoken.steps


def test_a_table_keeps_numbers_whole_and_shows_texts_of_files_safely():
    out = io.StringIO()
    terminal = Console(file=out, width=40, color_system=None, force_terminal=True)
    rows = [("a [red]layer\x1b[2J with a long name", 12.345678), ("all", 1)]
    print_table(terminal, ("layer", "ms"), rows, title="[b]title", right=[1], totals=1)
    text = out.getvalue()
    assert "[b]title" in text and "12.345678" in text and "[red]" in text
    assert "\x1b" not in text
    lines = text.splitlines()
    (total,) = [index for index, line in enumerate(lines) if "all" in line]
    assert lines[total - 1].startswith("├")


def test_a_row_has_its_style():
    out = io.StringIO()
    terminal = Console(file=out, width=80, force_terminal=True, color_system="standard")
    print_table(terminal, ("run",), [("good",), ("bad",)], styles=["", "yellow"])
    good, bad = (line for line in out.getvalue().splitlines() if "good" in line or "bad" in line)
    assert "\x1b[33m" in bad and "\x1b[33m" not in good
