"""From a run to what runs elsewhere: the folder, its example, C, older runtimes, serving."""

import filecmp
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import requests
import yaml
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.tools import flatbuffer_utils as flatbuffer
from filelock import FileLock
from PIL import Image
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.shapes import drawing
from resnet8ptq.deploy import example, microcontroller, reproducing
from tests.helpers import mlflow_server
from tests.helpers.calling import QUICK, Called, call, call_beside, clean_environment
from tests.helpers.sharing import call_once

BACKENDS = {
    name: f"model{backend.suffixes[0]}"
    for name, backend in find_backends().items()
    if backend.serving and backend.is_installed
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Called:
    """A sweep of every backend that deploys a file of its own."""
    cells = (f"backend={','.join(BACKENDS)}", "calib.samples_per_class=20", "per_channel=true")
    return call_once(tmp_path_factory, "deployed", *QUICK, *cells)


@dataclass(frozen=True)
class Deployed:
    run_id: str
    folder: Path
    called: Called


@pytest.fixture(scope="module")
def deployed(runs: Called) -> dict[str, Deployed]:
    """The folder of each backend's run, written and registered once."""
    made = {}
    with FileLock(runs.folder / "deployed.lock"):
        for run in runs.children:
            name = run.data.params["backend"]
            folder, run_id = runs.folder / "out" / name, run.info.run_id
            words = (f"run_id={run_id}", f"folder={folder}", f"register={name}", "verify=false")
            made[name] = Deployed(run_id, folder, call_beside(runs.folder, "deploy", *words))
    return made


def deploy(runs: Called, *words: str) -> Called:
    return call_beside(runs.folder, "deploy", "verify=false", *words)


def run_id(runs: Called, backend: str) -> str:
    (result,) = [r.info.run_id for r in runs.children if r.data.params["backend"] == backend]
    return str(result)


def predictions(runs: Called, backend: str) -> np.ndarray:
    (run,) = [run for run in runs.children if run.data.params["backend"] == backend]
    with np.load(runs.artifacts(run)["predictions.npz"]) as arrays:
        return np.asarray(arrays["probabilities"])


def run_example(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-I", str(folder / "example.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "file"), BACKENDS.items())
def test_folder_computes_what_the_run_predicted(backend, file, runs, deployed):
    result = deployed[backend]
    assert result.called.code == 0, result.called.err
    assert "predictions equal to the run's on 500 of 500 samples" in result.called.out
    assert result.called.out.splitlines()[-1].endswith("example.py PICTURE")
    expected = predictions(runs, backend)
    with np.load(result.folder / "test_vectors.npz") as vectors:
        places = np.linspace(0, len(expected) - 1, 10).astype(int)
        np.testing.assert_allclose(vectors["output_0"], expected[places], atol=1e-6)
        assert vectors["samples"].dtype == np.uint8
    done = run_example(result.folder)
    assert done.returncode == 0, done.stderr
    code = (result.folder / "example.py").read_text()
    assert "resnet8ptq" not in code
    (run,) = [run for run in runs.children if run.info.run_id == result.run_id]
    assert filecmp.cmp(result.folder / file, runs.artifacts(run)[file], shallow=False)


def test_card_says_what_was_measured(runs, deployed):
    text = (deployed["tflite"].folder / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    (run,) = [run for run in runs.children if run.data.params["backend"] == "tflite"]
    (result,) = head["model-index"][0]["results"]
    value = runs.result(run)["metrics"]["accuracy"]
    assert result["metrics"][0] == {"type": "accuracy", "name": "accuracy", "value": value}
    delta = result["metrics"][1]["value"]  # of two fractions, without their rounding error
    assert delta == round(delta, 6)
    assert {"license", "license_link", "datasets"} <= set(head)
    assert f"{value:.2%}" in text
    taken = re.search(r"\| input \| .* \| int8 \| ([\d.e-]+) \| (-?\d+) \|", text)
    assert taken is not None
    assert (float(taken[1]), int(taken[2])) == (1.0, -128)
    assert "models:/tflite@recommended" in text
    assert str(runs.folder) not in text


def test_example_fails_where_the_model_is_another(deployed, tmp_path):
    folder = Path(shutil.copytree(deployed["onnx"].folder, tmp_path / "copy"))
    proto = onnx.load(folder / "model.onnx")
    (weights, *_) = [item for item in proto.graph.initializer if len(item.dims) == 4]
    values = onnx.numpy_helper.to_array(weights)
    weights.CopyFrom(onnx.numpy_helper.from_array(-values, weights.name))
    onnx.save(proto, folder / "model.onnx")
    done = run_example(folder)
    assert done.returncode == 1
    assert "differs from test_vectors.npz" in done.stderr


@pytest.mark.slow
def test_example_names_the_class_of_a_picture(deployed, tmp_path):
    folder = deployed["onnx"].folder
    with np.load(folder / "test_vectors.npz") as vectors:
        picture, scores = vectors["samples"][0], vectors["output_0"][0]
    Image.fromarray(picture).save(tmp_path / "a.png")
    Image.fromarray(picture).resize((64, 48)).save(tmp_path / "b.png")
    done = run_example(folder, str(tmp_path / "a.png"), str(tmp_path / "b.png"))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'a.png'}: {drawing.CLASS_NAMES[scores.argmax()]} (")
    assert second.startswith(f"{tmp_path / 'b.png'}: ")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "tflite"])
def test_example_explains_itself(backend, deployed, tmp_path):
    folder = deployed[backend].folder
    helped = run_example(folder, "--help")
    assert (helped.returncode, "python example.py PICTURE" in helped.stdout) == (0, True)
    (tmp_path / "no.png").write_text("no picture")
    for name in ("no.png", "missing.png"):
        refused = run_example(folder, str(tmp_path / name))
        assert refused.returncode == 1
        assert f"{name}: cannot be read" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_what_does_not_pass_is_deployed_with_a_caution(runs, tmp_path):
    done = deploy(runs, "max_drop=0", "use=best", f"folder={tmp_path}/new")
    caution = next(line for line in done.out.splitlines() if line.startswith("CAUTION: verdict"))
    assert "undecided" in caution
    assert "**CAUTION: verdict" in (tmp_path / "new/README.md").read_text()
    named = deploy(runs, "max_drop=0", f"run_id={run_id(runs, 'onnx')}", f"folder={tmp_path}/named")
    assert "CAUTION: verdict on its loss: undecided" in named.out


@pytest.mark.slow
def test_what_is_void_is_not_deployed(shapes_model, tmp_path):
    """Pixels from 0 to 1 for a network that takes them raw, so that FP32 guesses.

    The network is converted already: TensorFlow would convert it again for these samples.
    """
    words = ("preprocess=unit", "backend=onnx", "seed=1,2", "held_out_images=60", *QUICK)
    words += (f"model.path={shapes_model.onnx_path}",)
    broken = call(tmp_path, "-m", "data=shapes", "calib.samples_per_class=5", *words)
    assert broken.code == 0, broken.err
    assert {row["limit"] for row in broken.table if row["status"] == "ok"} == {"void"}
    assert "No model is recommended. FP32 is not shown to be better than chance" in broken.out
    assert "Every verdict is void" in broken.artifacts(broken.parent)["report.md"].read_text()
    for words in ((f"run_id={broken.children[0].info.run_id}",), ("use=best",)):
        refused = deploy(broken, *words, f"folder={tmp_path}/new")
        assert refused.code == 2
        assert re.search("void: FP32 ACCURACY NEAR CHANCE", refused.errors[-1])
        assert "try nothing" not in refused.errors[-1]
        assert not (tmp_path / "new").exists()


def test_bad_input_is_one_line(runs, failing_sweep, tmp_path):
    onnx_run = run_id(runs, "onnx")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    known = f"run_id={onnx_run}"
    cases = [
        (("run_id=0123",), "run_id: got '0123', expected the id of a run"),
        (("sweep=0123",), "sweep: got '0123', expected the id of a run"),
        ((f"run_id={runs.parent.info.run_id}",), "is a sweep; try sweep="),
        (("use=quickest",), "use: got 'quickest', for which .* recommends no run; try .*best"),
        ((known, f"folder={tmp_path / 'full'}"), "folder: got .*not empty"),
        (
            (known, "target.onnxruntime=0.9"),
            r"target.onnxruntime: got '0.9', expected .*such as 1\.10 \| ",
        ),
        ((known, "target.onnxruntime=1.20", "target.format=ort"), "expected one of the two"),
        ((known, "target.format=tensorrt"), "target.format: got 'tensorrt', expected ort"),
        ((known, "target.tensorrt=1"), "tensorrt"),
        ((known, "use=smallest"), "use: has no effect with run_id="),
        ((known, "register=a/b"), "register: got 'a/b', expected letters"),
        (
            (f"run_id={run_id(runs, 'torch')}", "target.format=ort"),
            "expected a file of ONNX Runtime",
        ),
    ]
    for words, message in cases:
        done = deploy(
            runs, *words, *(() if "folder=" in str(words) else (f"folder={tmp_path}/new",))
        )
        assert (done.code, len(done.err.strip().splitlines())) == (2, 1), done.err
        assert re.search(message, done.err), done.err
    (failed,) = [r.info.run_id for r in failing_sweep.children if r.data.tags["status"] == "failed"]
    done = deploy(failing_sweep, f"run_id={failed}")
    assert (done.code, done.errors) == (
        2,
        [f"error: run_id: run {failed} is failed; expected one that is ok"],
    )
    (good,) = [r.info.run_id for r in failing_sweep.children if r.data.tags["status"] == "ok"]
    failing_sweep.client.delete_run(good)
    try:
        done = deploy(failing_sweep, f"run_id={good}")
    finally:
        failing_sweep.client.restore_run(good)
    assert done.code == 2 and "was deleted" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_sweep_and_use_find_the_recommended_run(runs, tmp_path):
    done = deploy(runs, "use=best_onnx", f"folder={tmp_path / 'out'}")
    assert done.code == 0, done.err
    assert run_id(runs, "onnx") in (tmp_path / "out" / "README.md").read_text()
    report = runs.artifacts(runs.parent)["report.md"].read_text()
    assert f"python -m resnet8ptq deploy run_id={run_id(runs, 'onnx')}" in report


def test_artifact_that_is_not_the_measured_one_is_refused(runs, tmp_path, monkeypatch):
    (run,) = [run for run in runs.children if run.data.params["backend"] == "onnx"]
    path = runs.artifacts(run)["model.onnx"]
    content = path.read_bytes()
    try:
        path.write_bytes(content + b"\0")
        done = deploy(runs, f"run_id={run.info.run_id}", f"folder={tmp_path / 'out'}")
    finally:
        path.write_bytes(content)
    assert done.code == 1 and "is not the file that was measured" in done.err
    assert not list(tmp_path.iterdir())


def test_deploy_that_fails_leaves_nothing(runs, tmp_path, monkeypatch):
    code = "raise SystemExit('it does not work')"
    monkeypatch.setattr(example, "render_example", lambda *_, **__: code)
    monkeypatch.setattr(
        example, "verify", lambda folder, _: example.run_example(sys.executable, folder)
    )
    words = (f"run_id={run_id(runs, 'onnx')}", f"folder={tmp_path / 'out'}")
    done = call_beside(runs.folder, "deploy", *words)
    assert done.code == 1 and "example.py fails (it does not work)" in done.err
    assert not list(tmp_path.iterdir())


def test_data_that_are_gone_leave_the_kept_sample(runs, tmp_path, monkeypatch):
    def gone(*_: object) -> None:
        raise ConfigError("data.root: got /gone (not there)")

    monkeypatch.setattr(reproducing, "resolve", gone)
    done = deploy(runs, f"run_id={run_id(runs, 'onnx')}", f"folder={tmp_path / 'out'}")
    assert done.code == 0, done.err
    assert "which are missing (data.root: got /gone (not there))" in done.out
    with np.load(tmp_path / "out" / "test_vectors.npz") as vectors:
        np.testing.assert_allclose(vectors["output_0"], predictions(runs, "onnx")[:1], atol=1e-6)
    assert run_example(tmp_path / "out").returncode == 0


@pytest.mark.skipif(
    not os.environ.get("DEPLOY_VERIFY"), reason="DEPLOY_VERIFY=1: installs packages"
)
def test_example_runs_in_a_fresh_environment(runs, tmp_path):
    for number, words in enumerate([(), ("target.onnxruntime=1.17",)]):
        folder = tmp_path / str(number)
        words = (f"run_id={run_id(runs, 'onnx')}", f"folder={folder}", *words)
        done = call_beside(runs.folder, "deploy", *words)
        assert done.code == 0, done.err
        card = (folder / "README.md").read_text()
        assert "10 samples, largest difference" in card
        assert ("500 samples, largest difference" in card) == (number == 1)


# Microcontrollers


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_c_array_is_the_file(deployed, tmp_path):
    folder = deployed["tflite"].folder
    (tmp_path / "dump.cc").write_text(
        '#include <cstdint>\n#include <cstdio>\n#include "model.h"\n#include "test_vector.h"\n'
        "int main() {\n"
        "  if (reinterpret_cast<std::uintptr_t>(kModel) % 16) return 2;\n"
        "  fwrite(kModel, 1, kModelLength, stdout);\n"
        "  fwrite(kTestInput, 1, sizeof kTestInput, stdout);\n"
        "  fwrite(kTestOutput0, 1, sizeof kTestOutput0, stdout);\n}\n"
    )
    sources = [str(tmp_path / "dump.cc"), str(folder / "microcontroller" / "model.cc")]
    include, out = f"-I{folder / 'microcontroller'}", str(tmp_path / "dump")
    subprocess.run(
        ["c++", "-std=c++11", "-Wall", "-Werror", include, "-o", out, *sources], check=True
    )
    dumped = subprocess.run([out], capture_output=True, check=True).stdout
    with np.load(folder / "test_vectors.npz") as vectors:
        assert vectors["raw_inputs"].dtype == vectors["raw_output_0"].dtype == np.int8
        values = vectors["raw_inputs"][0].tobytes() + vectors["raw_output_0"][0].tobytes()
    assert dumped == (folder / "model.tflite").read_bytes() + values


def test_resolver_has_the_models_operators(deployed):
    text = (deployed["tflite"].folder / "microcontroller" / "resolver.h").read_text()
    names = re.findall(r"resolver\.(Add\w+)\(\)", text)
    assert f"MicroMutableOpResolver<{len(names)}>" in text
    assert {"AddConv2D", "AddAdd", "AddFullyConnected", "AddSoftmax"} <= set(names)
    assert all("add_op" not in name.lower() for name in names) and len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("CUMSUM", "AddCumSum"),
        ("L2_POOL_2D", "AddL2Pool2D"),
        ("UNIDIRECTIONAL_SEQUENCE_LSTM", "AddUnidirectionalSequenceLSTM"),
    ],
)
def test_calls_are_spelled_as_in_tflite_micro(name, call):
    code = getattr(schema.BuiltinOperator, name)
    graph = SimpleNamespace(operators=[SimpleNamespace(opcodeIndex=0)])
    operator = schema.OperatorCodeT(deprecatedBuiltinCode=min(code, 127), builtinCode=code)
    model = SimpleNamespace(subgraphs=[graph], operatorCodes=[operator])
    assert microcontroller.list_operators(model) == [call]


def test_vectors_of_64_bit_integers_are_written():
    """A Keras network may take tokens as int64."""
    values = np.array([[1, 2**40]], np.int64)
    assert microcontroller._array(values) == ("long long", 2, f"    1, {2**40}")


def test_vectors_of_booleans_are_numbers_in_c():
    assert microcontroller._array(np.array([[True, False]])) == ("bool", 2, "    1, 0")


def tensor(size: int, kind: int = 9) -> SimpleNamespace:
    return SimpleNamespace(shape=[1, size], type=kind)  # 9: INT8


def test_arena_is_bounded_by_what_lives_at_once():
    def operator(inputs: list[int], outputs: list[int]) -> SimpleNamespace:
        return SimpleNamespace(inputs=inputs, outputs=outputs)

    # 0 -> 1 -> 2; 2 + 0 -> 3: the input lives until the addition. 4 holds constants.
    graph = SimpleNamespace(
        inputs=[0],
        outputs=[3],
        tensors=[tensor(64), tensor(160), tensor(64), tensor(64), tensor(10_000)],
        operators=[operator([0, 4], [1]), operator([1, 4], [2]), operator([2, 0], [3])],
    )
    assert microcontroller.least_arena(SimpleNamespace(subgraphs=[graph])) == 64 + 160 + 64
    graph.operators[2].inputs = [2]  # now it does not
    assert microcontroller.least_arena(SimpleNamespace(subgraphs=[graph])) == 64 + 160


@pytest.mark.parametrize(("integer", "expected"), [("null", 9), ("true", 9), ("false", 0)])
def test_integer_io_of_tflite(quantize, integer, expected):
    cell = quantize("backend=tflite", f"backend.integer_io={integer}")
    model = flatbuffer.convert_bytearray_to_object(bytearray(cell.artifact.path.read_bytes()))
    graph = model.subgraphs[0]
    assert {graph.tensors[i].type for i in (*graph.inputs, *graph.outputs)} == {expected}
    names = microcontroller.list_operators(model)
    assert ({"AddQuantize", "AddDequantize"} <= set(names)) == (expected == 0)


@pytest.mark.parametrize("words", [("target.format=ort",), ("target.onnxruntime=1.17",)])
def test_target_computes_the_same(runs, words, tmp_path):
    folder = tmp_path / "out"
    done = deploy(runs, f"run_id={run_id(runs, 'onnx')}", f"folder={folder}", *words)
    assert done.code == 0, done.err
    assert (folder / "model.ort").exists() == ("ort" in words[0].partition("=")[2])
    assert run_example(folder).returncode == 0
    if "1.17" in words[0]:
        needs = (folder / "requirements.txt").read_text().splitlines()
        assert needs[:2] == ["onnxruntime~=1.17.0", "numpy<2"]


# Serving


@pytest.fixture(scope="module")
def servers(runs: Called, deployed: dict[str, Deployed]) -> Iterator[dict[str, str]]:
    """Serve the registered model of every backend as its card says; yield their addresses."""
    store = f"sqlite:///{runs.folder / 'mlruns' / 'mlflow.db'}"
    environment = clean_environment(MLFLOW_TRACKING_URI=store)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    addresses = {}
    with ExitStack() as stack:
        for name in deployed:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            card = (deployed[name].folder / "README.md").read_text()
            (words,) = re.findall(r"^    mlflow models serve (.*) -p 5001$", card, re.MULTILINE)
            command = ["models", "serve", *words.replace('"', "").split(), "-p", str(port)]
            log = runs.folder / f"serve_{name}.log"
            server = mlflow_server.start(command, Path.cwd(), log, environment)
            stack.callback(server.join)
            stack.callback(server.terminate)
            addresses[name] = f"http://127.0.0.1:{port}"
        session = stack.enter_context(requests.Session())
        patient = Retry(total=150, backoff_factor=0.2, backoff_max=2)  # refused until it listens
        session.mount("http://127.0.0.1", HTTPAdapter(max_retries=patient))
        for address in addresses.values():
            assert session.get(f"{address}/ping").ok
        yield addresses


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_served_model_predicts_what_the_run_did(backend, runs, servers, deployed):
    with np.load(deployed[backend].folder / "test_vectors.npz") as vectors:
        samples, expected = vectors["samples"], vectors["output_0"]
    for values in (samples.tolist(), samples.astype(float).tolist()):  # integers, and floats
        answer = requests.post(
            f"{servers[backend]}/invocations", json={"inputs": values}, timeout=60
        )
        assert answer.ok, answer.text
        (result,) = answer.json()["predictions"].values()
        np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_registered_model_is_whole(backend, runs, deployed):
    version = runs.client.get_model_version_by_alias(backend, "recommended")
    assert version.run_id == deployed[backend].run_id
    home = Path(str(version.source).removeprefix("file://"))
    described = yaml.safe_load((home / "MLmodel").read_text())
    assert described["signature"] and (home / "input_example.json").exists()
    pinned = (home / "requirements.txt").read_text().split()
    assert all("==" in item and "+" not in item for item in pinned)
    assert any(item.startswith(f"{find_backends()[backend].runtime}==") for item in pinned)


# ONNX Runtime of a machine whose integer kernels give the probability of another class.
WRONG_KERNELS = """
import importlib, sys
from pathlib import Path
import numpy
sys.path.remove(str(Path(__file__).parent))
del sys.modules["onnxruntime"]
real = importlib.import_module("onnxruntime")
class Session(real.InferenceSession):
    def __init__(self, model, *asked, **others):
        self.rolled = int(b"QuantizeLinear" in model or b"QLinear" in model)
        super().__init__(model, *asked, **others)
    def run(self, *asked):
        return [numpy.roll(values, self.rolled, -1) for values in super().run(*asked)]
real.InferenceSession = Session
"""


@pytest.mark.slow
def test_a_measurement_carried_by_hand_replaces_the_run_s_result(runs, tmp_path):
    folder = tmp_path / "out"
    words = (f"run_id={run_id(runs, 'onnx')}", f"folder={folder}", "measure=true")
    assert deploy(runs, *words).code == 0
    (tmp_path / "onnxruntime.py").write_text(WRONG_KERNELS)
    wrong = measure_by_hand(runs, folder / "measure", tmp_path)
    assert wrong.data.metrics["accuracy"] < 0.5
    assert wrong.data.tags["verdict"].startswith("fail")
    assert "target/sqnr_db" in runs.result(wrong)["metrics"]

    (tmp_path / "onnxruntime.py").unlink()
    there = measure_by_hand(runs, folder / "measure", tmp_path)
    metrics = there.data.metrics
    assert metrics["accuracy"] == metrics["target/here_accuracy"]
    assert metrics["target/here_accuracy"] == wrong.data.metrics["target/here_accuracy"]
    assert "target/sqnr_db" not in runs.result(there)["metrics"]  # of the measurement before
    assert metrics["latency_ms"] > 0
    assert "onnxruntime" in there.data.tags["target/machine"]

    result = tmp_path / "result"
    shapes = re.compile(rb"\[(\d+), 10\]")  # of probabilities
    halved = shapes.sub(lambda shape: b"[%d, 5]" % (2 * int(shape[1])), result.read_bytes())
    result.write_bytes(halved)
    ended = call_beside(runs.folder, "measured", str(result))
    assert ended.code == 2 and "error: result: got" in ended.err and "Traceback" not in ended.err


def measure_by_hand(runs, job: Path, site: Path) -> Any:
    command = ["env", f"PYTHONPATH={site}", sys.executable, str(job / "measure.py")]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    (site / "result").write_bytes(done.stdout)
    ended = call_beside(runs.folder, "measured", str(site / "result"))
    assert ended.code == 0, ended.err
    [run] = [one for one in ended.children if one.info.run_id == run_id(runs, "onnx")]
    assert "measured on" in ended.out and run.data.tags["verdict"] in ended.out
    return run
