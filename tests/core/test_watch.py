"""What the program says while it works: never a long silence."""

import itertools
import multiprocessing
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.core import watch
from resnet8ptq.core.watch import LINE_SECONDS, LOOK_SECONDS, QUIET_SECONDS, Watch


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of the steps; no thread looks at it."""
    clock = Clock()
    monkeypatch.setattr(watch, "_now", clock)
    monkeypatch.setattr(Watch, "start", lambda self: None)
    return clock


def run(seen: Watch, clock: Clock, seconds: float) -> None:
    """Let time pass; the thread looks when it wanted to."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(clock.now + min(seen.look(), LOOK_SECONDS), end)
    seen.look()


def test_a_step_is_named_and_its_parts_are_counted(clock):
    lines: list[str] = []
    seen = Watch(lines.append)
    with seen.step("Quantizing"), seen.step("Evaluating", "batches", 10) as step:
        run(seen, clock, 2.5)
        step.done = 4
        run(seen, clock, 2.5)
    run(seen, clock, 60)
    assert lines == [
        "Evaluating: 0 batches",
        "Evaluating: 4 of 10 batches, 0:07 left",
    ]


def test_outer_steps_are_reported_if_they_have_parts(clock):
    lines: list[str] = []
    seen = Watch(lines.append)
    trying, quantizing = seen.step("Trying", "changes", 3), seen.step("Quantizing")
    with trying as outer, quantizing, seen.step("Evaluating", "batches"):
        outer.done = 1
        run(seen, clock, 2.5)
    assert lines == ["Trying: 1 of 3 changes, 0:05 left; Evaluating: 0 batches"]


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        (["torch.some_part", "sympy.inner"], "torch"),  # which imports the other
        (["sympy.inner", "_onnx_part"], "libraries"),
    ],
)
def test_only_frameworks_that_are_being_imported_are_named(clock, monkeypatch, modules, named):
    lines: list[str] = []
    seen = Watch(lines.append)
    seen.between = "Working"
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    run(seen, clock, 2.5)
    run(seen, clock, 2.5)
    assert lines == [f"Loading {named} ... 2 s", "Working ... 5 s"]


def test_between_steps_a_command_works_and_a_server_says_nothing(clock):
    lines: list[str] = []
    seen = Watch(lines.append)
    run(seen, clock, 60)
    assert not lines
    seen.between = "Working"
    run(seen, clock, 3)
    assert lines[0].startswith("Working ... ")
    seen.between = ""
    run(seen, clock, 60)
    assert len(lines) == 1


def test_one_of_several_processes_speaks_seldom(clock):
    times: list[float] = []
    seen = Watch(lambda line: times.append(clock.now))
    seen.quiet_s = LINE_SECONDS
    with seen.step("Quantizing"):
        run(seen, clock, 40)
    assert times == [115.0, 130.0]


def test_without_a_command_the_silence_before_a_step_does_not_count(clock):
    lines: list[str] = []
    seen = Watch(lines.append)
    clock.now += 60
    with seen.step("Quantizing"):
        run(seen, clock, 2)
    assert not lines


def test_steps_that_are_drawn_are_not_written(clock):
    lines: list[str] = []
    seen = Watch(lines.append, draws=lambda: True)
    seen.between = "Working"
    with seen.step("Quantizing"):
        run(seen, clock, 60)
        assert not lines
    run(seen, clock, 3)
    assert lines


@given(st.lists(st.tuples(st.floats(0.0, 70.0), st.booleans(), st.booleans()), max_size=6))
def test_no_silence_is_long_and_a_long_step_says_less(parts):
    clock, times = Clock(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_now", clock)
        patch.setattr(Watch, "start", lambda self: None)
        seen = Watch(lambda line: times.append(clock.now))
        seen.between = "Working"
        times.append(clock.now)
        for seconds, named, heard in parts:
            if heard:
                seen.hear()
                times.append(clock.now)
            if named:
                with seen.step("Converting"):
                    run(seen, clock, seconds)
            else:
                run(seen, clock, min(seconds, 10))
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert max(gaps, default=0) <= QUIET_SECONDS + 1e-6
        with seen.step("Training"):
            run(seen, clock, 3600)
        assert times[-1] - times[-2] == pytest.approx(LINE_SECONDS)


def test_the_thread_writes():
    written = threading.Event()
    seen = Watch(lambda line: written.set())
    seen.between = "Working"
    seen._heard = seen._said = watch._now() - 60
    seen.start()
    seen.start()
    assert written.wait(10)
    seen.between = ""


def test_a_closed_pipe_ends_the_thread_and_nothing_else():
    def write(line: str) -> None:
        raise BrokenPipeError

    seen = Watch(write)
    seen.between = "Working"
    seen._heard = seen._said = watch._now() - 60
    seen.start()
    assert seen._thread is not None
    seen._thread.join(10)
    assert not seen._thread.is_alive()


def _steps_of_a_child(seen: Watch, answer: multiprocessing.SimpleQueue) -> None:
    with seen.step("Drawing"):
        answer.put(([step.label for step in seen.steps], seen._thread.is_alive(), seen.between))


def test_a_fork_starts_without_steps_and_with_a_thread_of_its_own():
    seen = Watch(lambda line: None)
    seen.between = "Working"
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    with seen.step("Converting"):
        child = context.Process(target=_steps_of_a_child, args=(seen, answer))
        child.start()
        assert answer.get() == (["Drawing"], True, "")
        child.join()
        assert [step.label for step in seen.steps] == ["Converting"]
