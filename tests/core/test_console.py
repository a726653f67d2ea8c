"""Progress where there is no terminal."""

import io
import logging

from rich.console import Console

from resnet8ptq.core import console
from resnet8ptq.core.console import print_table
from resnet8ptq.core.watch import Watch


def test_a_quick_step_leaves_no_line(capsys):
    with console.waiting("Converting"):
        assert list(console.track([1, 2], "Running")) == [1, 2]
    assert capsys.readouterr().err == ""


def test_running_steps_are_known_until_they_end_or_are_abandoned(monkeypatch):
    watch = Watch(lambda line: None)  # that of the process may have steps of failed tests
    monkeypatch.setattr(console, "_watch", watch)
    with console.waiting("Converting"):
        steps = console.track(range(4), "Running", "layers")
        next(steps)
        next(steps)
        assert [step.label for step in watch.steps] == ["Converting", "Running"]
        assert watch.steps[-1].describe().startswith("Running: 1 of 4 layers")
        steps.close()
    assert not watch.steps


def test_a_line_is_one_line_without_markup(capsys):
    console._say("Reading [red]a\x1b")
    assert capsys.readouterr().err[9:] == "Reading [red]a?\n"


def test_without_a_terminal_a_record_is_one_line(capsys):
    record = logging.LogRecord("here", logging.WARNING, "", 0, "long " * 60 + "\x1b", (), None)
    console.LogHandler().emit(record)
    [line] = capsys.readouterr().err.splitlines()
    assert line[9:].startswith("WARNING  long long")
    assert line.endswith("long ?")


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


def test_in_a_pipe_a_row_is_one_line(capsys):
    heads = [f"a long column {index}" for index in range(60)]
    print_table(console.stdout(None, 240), heads, [[*"12" * 30]] * 3)
    assert capsys.readouterr().out.count("│ 1 ") == 3 * 30


def test_a_row_has_its_style():
    out = io.StringIO()
    terminal = Console(file=out, width=80, force_terminal=True, color_system="standard")
    print_table(terminal, ("run",), [("good",), ("bad",)], styles=["", "yellow"])
    good, bad = (line for line in out.getvalue().splitlines() if "good" in line or "bad" in line)
    assert "\x1b[33m" in bad and "\x1b[33m" not in good


def test_a_pipe_is_no_terminal_also_with_forced_colours(capsys, monkeypatch):
    """Jupyter sets FORCE_COLOR: every frame of a spinner was a line of the notebook."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console.stderr.cache_clear()
    try:
        with console.waiting("Reading"):
            pass
        print_table(console.stdout(None, 80), ["a"], [["1"]])
        assert not console.stderr().is_interactive
    finally:
        console.stderr.cache_clear()
    written = capsys.readouterr()
    assert written.err == ""
    assert "\x1b" not in written.out
