"""The process that untrusted files are read in: what it reaches, takes, and when it ends."""

import os
import resource
import select
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from resnet8ptq.core import confinement, isolation
from resnet8ptq.core.errors import ConfigError, ModelError, PtqError
from resnet8ptq.core.isolation import call, start

CRASHED = ModelError("crashed")
WAIT = 60  # seconds, for what takes none


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that other tests share."""
    monkeypatch.setattr(isolation, "start", start)


def connect(port: int) -> str:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=WAIT).close()
    except OSError as error:
        return str(error)
    return "connected"


def can_cut() -> bool:
    code = "from resnet8ptq.core import confinement; print(confinement.cut_network())"
    words = [sys.executable, "-c", code]
    return not subprocess.run(words, capture_output=True, text=True, timeout=WAIT).stdout.strip()


@pytest.mark.parametrize("network", [False, True])
def test_it_reaches_no_server(network):
    """Not even one of this machine, while this process does; a user's own code may download."""
    if not can_cut():
        pytest.skip("this system makes no network namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connect(port) == "connected"
        server.accept()[0].close()
        outcome = call(connect, port, crashed=CRASHED, network=network)
        assert (outcome == "connected") == network
        server.setblocking(False)
        if not network:
            with pytest.raises(BlockingIOError):  # and nobody asked
                server.accept()


def test_what_the_system_cannot_cut_is_warned_of_once(caplog, monkeypatch):
    isolation._warn.cache_clear()
    for _ in range(2):
        isolation._warn("Operation not permitted")
    assert len(caplog.records) == 1
    assert "Operation not permitted" in caplog.text


def describe() -> tuple[int, int, list[str], list[int]]:
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_CPU)]
    return os.getuid(), os.getppid(), sys.argv[1:], limits


def test_it_is_this_users_child_with_less_memory_than_is_free():
    user, parent, words, (memory, seconds) = call(describe, crashed=CRASHED)
    assert (user, parent, words) == (os.getuid(), os.getpid(), [])
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory < everything
    assert seconds <= confinement.MAX_SECONDS * (os.cpu_count() or 1)


def write_in(folder: Path) -> list[bool]:
    """Return whether a child can write inside the folder and beside it."""
    script = "touch $0/inside; touch $0/../beside; echo > /dev/null"
    command = ["sh", "-c", script, str(folder)]
    limit = partial(confinement.write_only_to, folder)
    subprocess.run(command, stderr=subprocess.DEVNULL, preexec_fn=limit, check=True)
    return [(folder / "inside").exists(), (folder / "../beside").exists()]


def test_it_writes_to_one_folder_only(tmp_path):
    if not confinement.limits_writes():
        pytest.skip("the kernel has no Landlock")
    folder = tmp_path / "own"
    folder.mkdir()
    assert call(write_in, folder, crashed=CRASHED) == [True, False]


def take(size: int) -> int:
    return len(bytearray(size))


def test_it_cannot_take_more():
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(MemoryError):
        call(take, everything, crashed=CRASHED)


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [ConfigError("key: wrong"), ZeroDivisionError("zero")])
def test_its_errors_come_back(error):
    with pytest.raises(type(error), match=str(error)) as caught:
        call(fail, error, crashed=CRASHED)
    if not isinstance(error, PtqError):
        assert "in fail" in caught.value.__notes__[0]


def test_a_crash_is_the_error_of_the_caller():
    with pytest.raises(ModelError, match="crashed"):
        call(os.abort, crashed=CRASHED)


def test_an_endless_call_is_the_error_of_the_caller():
    with pytest.raises(ModelError, match="crashed"):
        call(signal.pause, crashed=CRASHED, seconds=0.1)


def make_temporary() -> str:
    import tempfile

    return tempfile.mkdtemp()


def test_its_temporary_files_go_with_it():
    assert not Path(call(make_temporary, crashed=CRASHED)).exists()


CALLER = """
import sys
from resnet8ptq.core import isolation
from resnet8ptq.core.errors import ModelError
from tests.helpers.held_pipe import hold

isolation.call(hold, sys.argv[1], crashed=ModelError("crashed"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_it_dies_with_its_parent(tmp_path):
    """Killed, the parent cannot tell it, and a conversion does not look at its pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        subprocess.Popen([sys.executable, "-c", CALLER, str(pipe)], env=paths) as caller,
        pipe.open("rb", buffering=0) as reader,
    ):
        assert reader.read(4) == b"here"
        caller.send_signal(signal.SIGKILL)
        ended, _, _ = select.select([reader], [], [], WAIT)
        assert ended, "it lives on"
        assert reader.read(1) == b""


def test_it_does_not_start_without_its_parent():
    code = "from resnet8ptq.core import confinement; confinement.die_with(1); print('lives')"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT)
    assert (done.returncode, done.stdout) == (1, "")


class HoldingError(Exception):
    """As TensorFlow's errors hold their operator."""

    def __init__(self) -> None:
        super().__init__("what went wrong")
        self.held = lambda: None  # cannot be pickled


def fail_with_it() -> None:
    raise HoldingError


def test_an_error_that_cannot_be_pickled_comes_back_as_its_text():
    with pytest.raises(RuntimeError, match="HoldingError: what went wrong"):
        call(fail_with_it, crashed=CRASHED)
