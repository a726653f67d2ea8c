"""What is left to a process beside: in order, waited for, and never silent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resnet8ptq.core import background
from resnet8ptq.core.errors import TrackingError


def write(path: Path, text: str) -> int:
    with path.open("a") as file:
        file.write(text)
    return os.getpid()


def fail(text: str) -> None:
    raise ValueError(text)


class OfTwoError(Exception):
    """As some libraries make them: pickled it has one argument."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


def fail_in_an_unreadable_way() -> None:
    raise OfTwoError("unreadable", "elsewhere")


def die() -> None:
    os._exit(1)


def test_without_a_process_calls_are_made_here(tmp_path):
    assert background.ask(write, tmp_path / "file", "1") == os.getpid()
    with pytest.raises(ValueError, match="at once"):
        background.put(fail, "at once")
    background.prepare(die)  # is for a process
    background.wait()


def test_calls_are_made_in_order_by_one_other_process(tmp_path):
    path = tmp_path / "file"
    with background.allowed():
        made = [background.put(write, path, str(number)) for number in range(20)]
        asked = background.ask(write, path, "end")
        assert path.read_text() == "".join(map(str, range(20))) + "end"
    assert {one.result() for one in made} == {asked} != {os.getpid()}


def test_the_end_of_the_block_waits(tmp_path):
    with background.allowed():
        background.put(write, tmp_path / "file", "done")
    assert (tmp_path / "file").read_text() == "done"


def test_errors_are_reported_once_and_stop_nothing(tmp_path):
    with background.allowed():
        for number in range(3):
            background.put(fail, f"error {number}")
        background.put(write, tmp_path / "file", "after")
        background.wait_until_idle()
        message = r"error 0 \(the first of 3 errors\); .*resnet8ptq sync"
        with pytest.raises(TrackingError, match=message):
            background.wait()
        background.wait()
        with pytest.raises(ValueError, match="asked"):
            background.ask(fail, "asked")
        with pytest.raises(TrackingError, match="OfTwoError: unreadable"):
            background.ask(fail_in_an_unreadable_way)
        background.wait()
    assert (tmp_path / "file").read_text() == "after"


def test_errors_that_nobody_waited_for_are_logged(caplog):
    with background.allowed():
        background.put(fail, "unheard")
    assert "unheard" in caplog.text


def test_a_process_that_dies_is_replaced_by_this_one(tmp_path, caplog):
    with background.allowed():
        background.put(die)
        background.wait_until_idle()
        assert background.ask(write, tmp_path / "file", "here") == os.getpid()
        assert "has died" in caplog.text
        with pytest.raises(TrackingError, match="drawing or uploading failed"):
            background.wait()


def test_interrupts_are_for_the_other_process(tmp_path):
    with background.allowed():
        pid = background.ask(os.getpid)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert background.ask(os.getpid) == pid


def test_it_ends_with_a_process_that_is_killed():
    code = (
        "import os; from resnet8ptq.core import background\n"
        "with background.allowed():\n"
        "    print(background.ask(os.getpid), flush=True); os.kill(os.getpid(), 9)"
    )
    # Reads until the last holder of the pipe has closed it, which is the process beside.
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGKILL
