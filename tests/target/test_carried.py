"""A target reached by hand answers as a connected one does: by the file of its answers."""

import json
import shlex
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from resnet8ptq.core.errors import ConfigError
from resnet8ptq.deploy import measured
from resnet8ptq.graph.session import open_runner
from resnet8ptq.target.carried import Carried, JobWriter
from tests.helpers import onnx_networks
from tests.helpers.configs import make_config

IMAGES = onnx_networks.IMAGES
NAMELESS = b'{"bytes": 0, "arrays": [], "request": {"run_id": "a"}}\n'


def timed(seconds, sha256="0", run_id="a"):
    """Return the answer to a time, as the program writes it."""
    request = {"do": "time", "run_id": run_id, "sha256": sha256, "key": "file onnxruntime 1"}
    fields = {"seconds": seconds, "bytes": 0, "arrays": [], "request": request}
    return json.dumps(fields).encode() + b"\n"


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    path = tmp_path_factory.mktemp("carried") / "network.onnx"
    onnx.save(onnx_networks.build(), path)
    return path


@pytest.fixture(scope="module")
def result(network):
    """The answers to a job: two batches, one of them again, and two times."""
    folder = network.parent / "measure"
    folder.mkdir()
    recorder = JobWriter(folder, shlex.quote(sys.executable), "the run", timeout_s=60)
    recorder.describe()
    file = recorder.load(network, "onnxruntime", threads=1)
    for batch in (IMAGES, IMAGES[:2], IMAGES):
        file.run(batch)
    for _ in range(2):
        file.time(IMAGES[:1])
    recorder.close()
    recorder._connection.close()
    words = [sys.executable, "-I", str(folder / "measure.py")]
    done = subprocess.run(words, capture_output=True, check=True, timeout=60)
    path = network.parent / "result"
    path.write_bytes(done.stdout)
    return path


def test_the_answers_are_those_of_a_connection(result, network):
    carried = Carried(result)
    assert carried.run_id == "the run"
    assert "onnxruntime" in carried.say("onnxruntime")
    file = carried.load(network, "onnxruntime", threads=4)
    for batch in (IMAGES[:2], IMAGES):
        [expected] = open_runner(str(network), 1)(batch)
        np.testing.assert_array_equal(file.run(batch)[0][0], expected)
    times = [file.time(IMAGES[:1]) for _ in range(2)]
    assert all(0 < seconds < 60 for seconds in times)
    with pytest.raises(ConfigError, match=r"^result: got .*lacks the answer to 'time'"):
        file.time(IMAGES[:1])  # each is one measurement


def test_the_cache_tells_two_results_of_a_machine_apart(result, tmp_path):
    other = tmp_path / "result"
    other.write_bytes(result.read_bytes() + timed(1.0, run_id="the run"))
    assert Carried(result).describe() == Carried(result).describe()
    assert Carried(other).describe() != Carried(result).describe()


def test_a_job_holds_equal_samples_once(result):
    job = result.parent / "measure" / "measure.job"
    assert job.read_bytes().count(IMAGES.tobytes()) == 1


def test_other_samples_and_other_files_are_refused(result, network, tmp_path):
    carried = Carried(result)
    with pytest.raises(ConfigError, match=r"^result: got .*lacks the answer to 'run'"):
        carried.load(network, "onnxruntime", threads=1).run(IMAGES + 1)
    (tmp_path / "other.onnx").write_bytes(network.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match=r"^result: got .*lacks the answer to 'load'"):
        carried.load(tmp_path / "other.onnx", "onnxruntime", threads=1)


OTHERS = (b"", b"text\n", b'{"bytes": 0}\n', b"[]\n", NAMELESS)
WRONG = (timed(0), timed(-1.0), timed(float("nan")), timed("1"), timed(1.0, sha256=["0"]))


@pytest.mark.parametrize("content", [*OTHERS, *WRONG, timed(1.0) + timed(1.0, run_id="b")])
def test_other_content_is_no_result(content, tmp_path):
    path = tmp_path / "result"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^result: got .*result, expected the output of"):
        Carried(path)


def test_a_result_that_was_cut_off_is_refused(result, tmp_path):
    path = tmp_path / "result"
    path.write_bytes(result.read_bytes()[:-200])
    with pytest.raises(ConfigError, match=r"^result: "):
        carried = Carried(path)
        carried.load(result.parent / "network.onnx", "onnxruntime", threads=1).time(IMAGES[:1])


def test_names_that_no_tag_holds_are_refused(result, tmp_path):
    path = tmp_path / "result"
    cpu = json.dumps(Carried(result).describe()["cpu"]).encode()
    path.write_bytes(
        result.read_bytes().replace(b'"cpu": ' + cpu, b'"cpu": "' + 9999 * b"x" + b'"')
    )
    with pytest.raises(ConfigError, match=r"^result: got .*result, expected the output of"):
        Carried(path)


def assert_refused(run, tmp_path, reason):
    """Neither a job is written for the run, nor is the result of one read."""
    for key, measure in (
        ("measure", lambda: measured.write_program(run, "", tmp_path / "measure")),
        ("result", lambda: measured._open(run, None)),
    ):
        with pytest.raises(ConfigError, match=f"^{key}: run a {reason}"):
            measure()
    assert not list(tmp_path.iterdir())


def test_a_run_on_a_provider_is_not_measured_on_the_cpu_by_hand(tmp_path):
    config = make_config("data=shapes", "backend.provider=CUDAExecutionProvider")
    run = SimpleNamespace(config=config, record=SimpleNamespace(run_id="a"))
    assert_refused(run, tmp_path, "has backend.provider=CUDA")


def test_a_run_that_stopped_early_gets_no_job_whose_result_would_be_refused(tmp_path):
    record = SimpleNamespace(run_id="a", stopped_early=True)
    run = SimpleNamespace(config=make_config("data=shapes"), record=record)
    assert_refused(run, tmp_path, "stopped at its verdict")


def test_a_result_replaces_the_metrics_of_the_previous_machine_alone():
    task = SimpleNamespace(metrics=lambda comparison: {"accuracy": 0.5})
    measurement = SimpleNamespace(task=task, comparison=None)
    logged = ("accuracy", "batch1/accuracy", "class/0", "choice/accuracy", "system/quantize_s")
    stale = measured._find_stale(logged, measurement)
    assert stale == {"accuracy", "batch1/accuracy", "class/0"}


def test_a_machine_whose_fp32_is_broken_replaces_no_result(monkeypatch):
    task = SimpleNamespace(doubt=lambda *asked: "near chance", metric=SimpleNamespace(title="mAP"))
    compared = SimpleNamespace(comparison=SimpleNamespace(baseline=None))
    monkeypatch.setattr(measured, "_run", lambda *asked: (compared, {}, {}))
    run = SimpleNamespace(config=make_config("data=shapes"))
    with pytest.raises(ConfigError, match=r"^result: FP32 MAP there near chance"):
        measured._measure(run, None, SimpleNamespace(task=task))


def test_a_command_without_a_result_says_what_it_takes():
    with pytest.raises(ConfigError, match=r"^result: missing, expected the output of"):
        measured.main([])
