"""A file runs on the asked execution provider, or the run says why not; never on another one."""

import importlib.metadata
import json
import os
import shlex
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest

from resnet8ptq.core import machine
from resnet8ptq.core.errors import ConfigError, UnsupportedError
from resnet8ptq.evaluation.evaluator import Quantized
from resnet8ptq.experiment.measurement import find_execution
from resnet8ptq.target.measure import describe
from resnet8ptq.target.target import Target
from tests.helpers.configs import make_config
from tests.helpers.factories import evaluator_of, quantizer_of

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
CUDA_PACKAGE = "onnxruntime-gpu"
AZURE = "AzureExecutionProvider"  # pip's onnxruntime has it; it runs no node of a usual network
REASON = "libcublas.so.12: cannot open shared object file"


class OtherKernels:
    """A session of a provider whose kernels add 1 to each output, and leave softmax to the CPU."""

    providers = (CUDA, CPU)
    real = onnxruntime.InferenceSession

    def __init__(self, model, options, providers, **others):
        self.asked = providers
        self.session = self.real(model, options, providers=[CPU], **others)
        self.get_inputs = self.session.get_inputs

    def get_providers(self):
        return [*self.providers] if CUDA in self.asked else [CPU]

    def run(self, names, feeds):
        added = CUDA in self.asked
        return [values + np.float32(added) for values in self.session.run(names, feeds)]

    def end_profiling(self):
        path = Path(self.session.end_profiling())
        events = json.loads(path.read_text())
        for event in events:
            if event["name"].endswith("_kernel_time") and "Softmax" not in event["args"]["op_name"]:
                event["args"]["provider"] = CUDA
        path.write_text(json.dumps(events))
        return str(path)


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr(onnxruntime, "InferenceSession", OtherKernels)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])


def on(provider, *words):
    return make_config("data=shapes", f"backend.provider={provider}", *words)


def test_a_wrong_name_lists_the_providers_of_this_build():
    with pytest.raises(ConfigError, match=r"^backend\.provider: got 'GPU', expected .*CPUExec"):
        on("GPU")


def test_a_missing_provider_is_unsupported_with_its_package():
    with pytest.raises(UnsupportedError, match="pip install onnxruntime-gpu") as caught:
        quantizer_of(on(CUDA)).resolve()
    assert CUDA in str(caught.value) and CPU in str(caught.value)


@pytest.mark.skipif(AZURE not in onnxruntime.get_available_providers(), reason="another build")
def test_a_provider_that_runs_no_node_is_unsupported(quantize, shapes, shapes_model):
    cell = quantize("backend=onnx")
    evaluator = evaluator_of(on(AZURE), shapes_model)
    with pytest.raises(UnsupportedError, match=f"{AZURE}.* runs no node of the file"):
        execution_of(evaluator, cell, shapes)


def test_the_package_of_a_provider_gives_onnxruntime_its_version(monkeypatch):
    def version(package):
        if package != CUDA_PACKAGE:
            raise PackageNotFoundError(package)
        return "1.99.0"

    monkeypatch.setattr(machine, "version", version)
    monkeypatch.setattr(machine, "packages_distributions", lambda: {"onnxruntime": [CUDA_PACKAGE]})
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert machine.versions.__wrapped__()["version.onnxruntime"] == "1.99.0"
    assert describe()["versions"] == {"onnxruntime": "1.99.0"}


def test_a_provider_that_does_not_start_is_unsupported_with_its_reason(
    with_cuda, quantize, monkeypatch
):
    path = quantize("backend=onnx").artifact.path

    def open_without_cuda(*asked, **others):
        os.write(2, f"2026-11-28 08:00:00 [E:onnxruntime:Default, a.cc:1 B] {REASON}\n".encode())
        session = OtherKernels(*asked, **others)
        session.providers = [CPU]
        return session

    monkeypatch.setattr(onnxruntime, "InferenceSession", open_without_cuda)
    with pytest.raises(UnsupportedError) as caught:
        quantizer_of(on(CUDA)).load(path, 1)
    assert str(caught.value) == f"backend.provider: {CUDA} does not start: {REASON}"


def test_a_file_on_one_provider_is_not_served_as_that_of_another(
    with_cuda, quantize, shapes, shapes_model
):
    path = quantize("backend=onnx").artifact.path
    samples = shapes.test.take(np.arange(20))
    on_cpu = evaluator_of(on(CPU, "evaluate.batch_size=20"), shapes_model)
    on_cuda = evaluator_of(on(CUDA, "evaluate.batch_size=20"), shapes_model)
    for measure in (
        lambda evaluator: evaluator.run(path, samples).outputs.values[0],
        lambda evaluator: evaluator.baseline(samples).outputs.values[0],
    ):
        here = measure(on_cpu)
        np.testing.assert_allclose(measure(on_cuda), here + 1, atol=1e-6)
        np.testing.assert_array_equal(measure(on_cpu), here)


def test_the_nodes_of_each_provider_are_counted(with_cuda, quantize, shapes, shapes_model):
    cell = quantize("backend=onnx", "dtype=u8s8")
    params = execution_of(evaluator_of(on(CUDA, "dtype=u8s8"), shapes_model), cell, shapes)
    assert params["execution"] == "integer"
    assert params["provider_nodes"].startswith(CUDA)
    assert params["provider_nodes"].endswith(f"{CPU} 1 (QLinearSoftmax 1)")


@pytest.mark.parametrize("provider", [CPU, CUDA])
def test_only_a_provider_compiles_layers(provider, quantize, shapes, shapes_model):
    """Kernels such as the CPU's of a dynamic LSTM have no name of a layer either."""
    cell = quantize("backend=onnx", "dtype=u8s8")
    file = SimpleNamespace(find_nodes=lambda batch: {provider: {"DynamicQuantizeLSTM": 1}})
    target = SimpleNamespace(provider=provider, load=lambda *asked: file)
    evaluator = replace(evaluator_of(on(CPU, "dtype=u8s8"), shapes_model), target=target)
    compiled = execution_of(evaluator, cell, shapes)["execution"] == "compiled by the provider"
    assert compiled == (provider != CPU)


def test_kernels_that_compute_something_else_are_found(with_cuda, quantize, shapes, shapes_model):
    cell = quantize("backend=onnx", "dtype=u8s8")
    quantizer = quantizer_of(on(CUDA, "dtype=u8s8"))
    params = quantizer.verify(cell.artifact, shapes_model, shapes.train)
    assert float(params["kernels_sqnr_db"]) < 10


def execution_of(evaluator, cell, data):
    quantized = Quantized(cell.artifact, cell.artifact.size_bytes, 0.0)
    resolved = quantizer_of(cell.config).resolve()
    return find_execution(evaluator, resolved, quantized, data.test)


STUB = """
import numpy
__version__ = "1.99"
class SessionOptions: pass
class Value:
    name = "pixels"
class InferenceSession:
    def __init__(self, model, options, providers, **others): self.providers = providers
    def get_inputs(self): return [Value]
    def get_providers(self): return [*self.providers, "CPUExecutionProvider"]
    def run(self, names, feeds): return [feeds["pixels"] + len(self.providers[0])]
def get_available_providers(): return ["CUDAExecutionProvider", "CPUExecutionProvider"]
"""


def test_a_target_runs_its_own_provider(tmp_path):
    (tmp_path / "onnxruntime.py").write_text(STUB)
    (tmp_path / "network.onnx").write_bytes(b"the stub reads nothing")
    python = f"env PYTHONPATH={shlex.quote(str(tmp_path))} {shlex.quote(sys.executable)}"
    batch = np.zeros((2, 3), np.float32)
    described = []
    for provider in (CUDA, CPU):
        target = Target(python, 60, provider)
        [output], _ = target.load(tmp_path / "network.onnx", "onnxruntime", 1).run(batch)
        assert (output == len(provider)).all()
        described.append(target.describe())
        target._connection.close()
    assert described[0] != described[1]  # the cache tells them apart
    without = Target(python, 60, "QNNExecutionProvider")
    with pytest.raises(UnsupportedError, match=r"on the target, QNNExec.*onnxruntime-qnn"):
        without.describe()
    without._connection.close()


def test_a_run_for_a_target_computes_on_the_cpu_here():
    config = on(CUDA, "target.command=python3")
    assert quantizer_of(config).provider == CPU
    quantizer_of(config).resolve()
