"""Files run by another interpreter are run there, timed there, and give the same outputs."""

import shlex
import stat
import sys
from functools import partial
from unittest import mock

import numpy as np
import onnx
import pytest

from resnet8ptq.config import words
from resnet8ptq.core import background
from resnet8ptq.core.errors import ConfigError, UnsupportedError
from resnet8ptq.graph.session import open_runner
from resnet8ptq.target.connection import Connection, ConnectionLostError
from resnet8ptq.target.target import Target
from tests.helpers import onnx_networks
from tests.helpers.calling import QUICK, call_beside, handed_over_here

PYTHON = shlex.quote(sys.executable)


@pytest.fixture
def target():
    """This machine, as another one."""
    opened = Target(PYTHON, timeout_s=60)
    yield opened
    if opened._connection is not None:
        opened._connection.close()


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "network.onnx"
    onnx.save(onnx_networks.build(), path)
    return path


def test_a_file_gives_the_same_outputs_there(target, network):
    images = onnx_networks.IMAGES
    outputs, seconds = target.load(network, "onnxruntime", threads=1).run(images)
    expected = open_runner(str(network), 1)(images)
    assert np.array_equal(outputs[0], expected[0])
    assert 0 < seconds < 60


def test_the_machine_is_described(target):
    assert target.cores >= 1
    assert "onnxruntime" in target.say("onnxruntime")
    assert target.describe()["machine"]


def test_a_lost_connection_is_opened_again_with_its_files(target, network, caplog):
    file = target.load(network, "onnxruntime", threads=1)
    before, _ = file.run(onnx_networks.IMAGES)
    target._connection._process.kill()
    after, _ = file.run(onnx_networks.IMAGES)
    assert np.array_equal(before[0], after[0])
    assert "connecting again" in caplog.text


def test_a_connection_cut_within_an_answer_is_opened_again(tmp_path, network, caplog):
    cut = tmp_path / "cut"
    cut.write_text(
        f'#!/bin/sh\nif [ -e {tmp_path}/again ]; then exec {PYTHON} "$@"; fi\n'
        f'touch {tmp_path}/again\n{PYTHON} "$@" | (dd bs=1 count=300 2>/dev/null; kill $$)\n'
    )
    cut.chmod(cut.stat().st_mode | stat.S_IXUSR)
    images = onnx_networks.IMAGES
    opened = Target(str(cut), timeout_s=60)
    outputs, _ = opened.load(network, "onnxruntime", threads=1).run(images)
    assert np.array_equal(outputs[0], open_runner(str(network), 1)(images)[0])
    assert " ended; " in caplog.text and "connecting again" in caplog.text
    opened._connection.close()


def test_a_network_that_fails_there_is_unsupported(target, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"no network")
    with pytest.raises(UnsupportedError, match=r"^target\.command: on the target, "):
        target.load(tmp_path / "broken.onnx", "onnxruntime", threads=1)
    with pytest.raises(UnsupportedError, match="expected a backend that runs in onnxruntime"):
        target.load(tmp_path / "broken.onnx", "executorch", threads=1)


@pytest.mark.parametrize(
    ("command", "timeout_s", "words"),
    [
        (f"{PYTHON} -S -E", 60, "pip install numpy"),
        (f"{PYTHON} -c 'print(1)'", 60, "answered with other text"),
        (f'{PYTHON} -c \'print("{{\\"bytes\\": 0}}")\'', 60, "answered with other text"),
        (f"{PYTHON} -c 'import sys; sys.exit(\"no route to host\")'", 60, "no route to host"),
        (f"{PYTHON} -c 'import sys; sys.stdin.read()'", 0.5, "target.timeout_s"),
    ],
)
def test_a_target_that_cannot_answer_is_named_with_its_last_line(command, timeout_s, words):
    with pytest.raises(ConnectionLostError) as caught:
        Connection(command, timeout_s).ask({"do": "describe"})
    assert str(caught.value).startswith("target.command: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_target_that_ended_before_it_was_asked_is_named_with_its_text():
    with pytest.raises(ConnectionLostError, match="answered with other text"):
        connection = Connection(f"{PYTHON} -c 'print(1)'", 60)
        connection._process.wait()
        connection.ask({"do": "describe"})


def test_unknown_command_is_wrong_input():
    with pytest.raises(ConfigError, match=r"^target\.command: got .*no_such_program"):
        Target("no_such_program python3", timeout_s=60).describe()


@pytest.mark.parametrize("command", ["", "ssh 'pi@board"])
def test_a_command_without_words_is_wrong_input(command):
    with pytest.raises(ConfigError, match=r"target.command: got .*, expected a command"):
        Target(command, timeout_s=60).describe()


def test_ssh_gets_words_for_the_shell_behind_it(tmp_path, network):
    fake = tmp_path / "ssh"
    fake.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    opened = Target(f"{fake} board {PYTHON}", timeout_s=60)
    assert opened.cores >= 1
    opened._connection.close()


def test_what_libraries_print_is_no_answer(tmp_path, network):
    (tmp_path / "onnxruntime.py").write_text("print('noise')\nraise ImportError('not for you')")
    opened = Target(f"env PYTHONPATH={tmp_path} {PYTHON}", timeout_s=60)
    with pytest.raises(UnsupportedError, match="not for you"):
        opened.load(network, "onnxruntime", threads=1)
    opened._connection.close()


def test_a_stranger_s_target_is_not_repeated():
    assert not words.is_plain("target.command=anything")


@pytest.mark.slow
def test_a_run_is_measured_on_the_target(tmp_path):
    with mock.patch.object(background, "allowed", handed_over_here):
        call = partial(call_beside, tmp_path, "run", *QUICK, "dtype=u8s8")
        done = call(f"target.command={PYTHON}")
    assert done.code == 0, done.err
    assert "measured on" in done.out
