"""One contract for every backend; then what is special to each."""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import make_config
from numpy.typing import NDArray

from resnet8ptq import environment
from resnet8ptq.backends import BACKENDS
from resnet8ptq.config import DTYPES, RunConfig
from resnet8ptq.data import Dataset, draw_calibration
from resnet8ptq.errors import QuantizationError, UnsupportedError
from resnet8ptq.interfaces import Artifact
from resnet8ptq.model import Fp32Model

# What the table of dtypes promises: (weights, activations), or None where it is unsupported.
DTYPE_TABLE = {
    ("onnx", "fp32"): ("float32", "float32"),
    ("onnx", "int8"): ("int8", "int8"),
    ("onnx", "uint8"): ("uint8", "uint8"),
    ("onnx", "u8s8"): ("int8", "uint8"),
    ("torch", "fp32"): ("float32", "float32"),
    ("torch", "int8"): ("int8", "uint8"),
    ("torch", "uint8"): None,
    ("torch", "u8s8"): ("int8", "uint8"),
    ("tflite", "fp32"): ("float32", "float32"),
    ("tflite", "int8"): ("int8", "int8"),
    ("tflite", "uint8"): None,
    ("tflite", "u8s8"): None,
}
CELLS = [(backend, dtype) for backend in BACKENDS for dtype in DTYPES]
SUPPORTED = [cell for cell in CELLS if DTYPE_TABLE.get(cell)]
QUANTIZED = [cell for cell in SUPPORTED if cell[1] != "fp32"]
CALIBRATED = [backend for backend in BACKENDS if backend != "tflite"]  # it calibrates by itself
WEIGHT_LAYERS = 10  # ResNet8: nine convolutions, one dense layer
TESTED = 1000  # images

Probabilities = NDArray[np.float32]


@dataclass(frozen=True)
class Cell:
    """A quantized model on disk, and how to read it."""

    config: RunConfig
    artifact: Artifact
    folder: Path
    data: Dataset

    def predict(self, batch_size: int = 256, images: int = TESTED) -> Probabilities:
        # As a fresh process would: nothing but the config and the file on disk.
        predictor = BACKENDS[self.config.backend.name](self.config).load(self.artifact.path)
        split = self.data.test.take(np.arange(images))
        return np.concatenate([predictor.predict(batch) for batch in split.batches(batch_size)])


Quantize = Callable[..., Cell]


@pytest.fixture(scope="module")
def quantize_anew(
    shapes: Dataset, shapes_model: Fp32Model, tmp_path_factory: pytest.TempPathFactory
) -> Quantize:
    """Quantize with 200 calibration images; the arguments are overrides of the config."""

    def run(*overrides: str) -> Cell:
        config = make_config("data=shapes", *overrides)
        folder = tmp_path_factory.mktemp("cell")
        split = draw_calibration(shapes, 20, config.seed).split
        quantizer = BACKENDS[config.backend.name](config)
        return Cell(config, quantizer.quantize(shapes_model, split, folder), folder, shapes)

    return run


@pytest.fixture(scope="module")
def quantize(quantize_anew: Quantize) -> Quantize:
    """The same, once for each set of overrides."""
    return cache(quantize_anew)


@pytest.fixture(scope="module")
def fp32(quantize: Quantize) -> Probabilities:
    return quantize("backend=onnx", "dtype=fp32").predict()


def accuracy(probabilities: Probabilities, data: Dataset) -> float:
    return float((probabilities.argmax(1) == data.test.labels[: len(probabilities)]).mean())


@pytest.mark.parametrize(("backend", "dtype"), CELLS)
def test_resolves_as_the_dtype_table_says(backend: str, dtype: str) -> None:
    quantizer = BACKENDS[backend](make_config(f"backend={backend}", f"dtype={dtype}"))
    promised = DTYPE_TABLE[backend, dtype]
    if promised is None:
        with pytest.raises(UnsupportedError, match=r"qint8 weights|int8 kernels"):
            quantizer.resolve()
    else:
        resolved = quantizer.resolve()
        assert (resolved["weight_dtype"], resolved["activation_dtype"]) == promised


@pytest.mark.parametrize(("backend", "dtype"), SUPPORTED)
def test_writes_one_file(quantize: Quantize, backend: str, dtype: str) -> None:
    cell = quantize(f"backend={backend}", f"dtype={dtype}")
    assert list(cell.folder.iterdir()) == [cell.artifact.path]
    assert cell.artifact.size_bytes == cell.artifact.path.stat().st_size


@pytest.mark.parametrize(("backend", "dtype"), SUPPORTED)
def test_counts_quantized_layers(quantize: Quantize, backend: str, dtype: str) -> None:
    cell = quantize(f"backend={backend}", f"dtype={dtype}")
    assert cell.artifact.quantized_layers == (0 if dtype == "fp32" else WEIGHT_LAYERS)


@pytest.mark.parametrize(("backend", "dtype"), SUPPORTED)
def test_predicts_probabilities(quantize: Quantize, backend: str, dtype: str) -> None:
    probabilities = quantize(f"backend={backend}", f"dtype={dtype}").predict(images=300)
    assert probabilities.shape == (300, 10)
    assert probabilities.dtype == np.float32
    assert np.isfinite(probabilities).all()
    assert (probabilities >= 0).all()
    # Each of ten probabilities is rounded by at most half a step of 1/256.
    tolerance = 1e-5 if dtype == "fp32" else 10 / 512
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=tolerance)


@pytest.mark.parametrize(("backend", "dtype"), SUPPORTED)
def test_batch_size_does_not_change_predictions(
    quantize: Quantize, backend: str, dtype: str
) -> None:
    cell = quantize(f"backend={backend}", f"dtype={dtype}")
    whole, ragged, single = (cell.predict(size, images=100) for size in (100, 7, 1))
    np.testing.assert_allclose(ragged, whole, atol=1e-5)
    np.testing.assert_allclose(single, whole, atol=1e-5)
    assert (ragged.argmax(1) == whole.argmax(1)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_predicts_the_same_in_every_framework(
    quantize: Quantize, fp32: Probabilities, backend: str
) -> None:
    probabilities = quantize(f"backend={backend}", "dtype=fp32").predict()
    np.testing.assert_allclose(probabilities, fp32, atol=1e-4)
    assert (probabilities.argmax(1) == fp32.argmax(1)).all()


@pytest.mark.parametrize(("backend", "dtype"), QUANTIZED)
def test_keeps_the_accuracy(
    quantize: Quantize, fp32: Probabilities, shapes: Dataset, backend: str, dtype: str
) -> None:
    probabilities = quantize(f"backend={backend}", f"dtype={dtype}").predict()
    assert accuracy(fp32, shapes) > 0.85
    assert accuracy(probabilities, shapes) == pytest.approx(accuracy(fp32, shapes), abs=0.02)
    assert not np.array_equal(probabilities, fp32)


@pytest.mark.parametrize(("backend", "dtype"), QUANTIZED)
def test_halves_the_size_at_least(quantize: Quantize, backend: str, dtype: str) -> None:
    whole = quantize(f"backend={backend}", "dtype=fp32").artifact.size_bytes
    assert quantize(f"backend={backend}", f"dtype={dtype}").artifact.size_bytes < whole / 2


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_config_gives_the_same_file(
    quantize: Quantize, quantize_anew: Quantize, backend: str, dtype: str
) -> None:
    overrides = (f"backend={backend}", f"dtype={dtype}")
    first, second = quantize(*overrides), quantize_anew(*overrides)
    assert first.artifact.ranges == second.artifact.ranges
    assert first.artifact.path.read_bytes() == second.artifact.path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("backend", CALIBRATED)
def test_calibration_methods_differ(quantize: Quantize, backend: str) -> None:
    methods = ("minmax", "entropy", "percentile")
    cells = [quantize(f"backend={backend}", "dtype=int8", f"calib={name}") for name in methods]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        one, other = cells[i], cells[j]
        assert one.artifact.ranges.keys() == other.artifact.ranges.keys()
        assert one.artifact.ranges != other.artifact.ranges
        assert not np.array_equal(one.predict(), other.predict())


@pytest.mark.parametrize("backend", CALIBRATED)
def test_methods_never_widen_the_range(quantize: Quantize, backend: str) -> None:
    widest = quantize(f"backend={backend}", "dtype=int8").artifact.ranges
    cut = quantize(f"backend={backend}", "dtype=int8", "calib=percentile").artifact.ranges
    assert widest
    for name, (low, high) in widest.items():
        assert low <= cut[name][0] <= cut[name][1] <= high


@pytest.mark.parametrize(("backend", "dtype"), QUANTIZED)
def test_per_channel_differs_from_per_tensor(quantize: Quantize, backend: str, dtype: str) -> None:
    tensor = quantize(f"backend={backend}", f"dtype={dtype}")
    channel = quantize(f"backend={backend}", f"dtype={dtype}", "per_channel=true")
    assert channel.artifact.quantized_layers == WEIGHT_LAYERS
    assert channel.artifact.size_bytes > tensor.artifact.size_bytes  # one scale a channel
    assert not np.array_equal(channel.predict(), tensor.predict())


@pytest.mark.slow
@pytest.mark.parametrize("calib", ["minmax", "entropy", "percentile"])
@pytest.mark.parametrize("backend", CALIBRATED)
def test_calibration_batch_size_does_not_change_the_ranges(
    quantize: Quantize, backend: str, calib: str
) -> None:
    overrides = (f"backend={backend}", "dtype=int8", f"calib={calib}")
    whole = quantize(*overrides).artifact.ranges
    ragged = quantize(*overrides, "calib.batch_size=33").artifact.ranges  # 200 = 6 * 33 + 2
    assert ragged.keys() == whole.keys()
    for name in whole:  # a convolution may sum in another order
        assert ragged[name] == pytest.approx(whole[name], rel=1e-4)


def test_onnx_has_no_histogram_observer() -> None:
    with pytest.raises(UnsupportedError, match=r"calib=histogram.*minmax \| entropy"):
        BACKENDS["onnx"](make_config("backend=onnx", "calib=histogram")).resolve()


ONNX_TYPES = {"int8": onnx.TensorProto.INT8, "uint8": onnx.TensorProto.UINT8}


@pytest.mark.parametrize("per_channel", ["false", "true"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "u8s8"])
def test_onnx_file_holds_the_dtypes_of_the_table(
    quantize: Quantize, dtype: str, per_channel: str
) -> None:
    cell = quantize("backend=onnx", f"dtype={dtype}", f"per_channel={per_channel}")
    proto = onnx.load(cell.artifact.path)
    onnx.checker.check_model(proto, full_check=True)
    promised = DTYPE_TABLE["onnx", dtype]
    assert promised is not None
    weights, activations = (ONNX_TYPES[name] for name in promised)
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    nodes = proto.graph.node

    quantizers = [node for node in nodes if node.op_type == "QuantizeLinear"]
    assert len(quantizers) >= WEIGHT_LAYERS
    assert {constants[node.input[2]].data_type for node in quantizers} == {activations}

    dequantizers = {node.output[0]: node for node in nodes if node.op_type == "DequantizeLinear"}
    layers = [node for node in nodes if node.op_type in ("Conv", "Gemm", "MatMul")]
    assert len(layers) == WEIGHT_LAYERS
    for layer in layers:
        weight = dequantizers[layer.input[1]]
        assert constants[weight.input[0]].data_type == weights
        assert constants[weight.input[2]].data_type == weights
        per_layer = list(constants[weight.input[1]].dims)
        assert bool(per_layer) == (per_channel == "true") or layer.op_type != "Conv"


def test_onnx_scales_come_from_the_ranges(quantize: Quantize) -> None:
    cell = quantize("backend=onnx", "dtype=uint8", "calib=percentile")
    graph = onnx.load(cell.artifact.path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    # These pass their input's values on, and take its scale along.
    passed_on = {
        name
        for node in graph.node
        if node.op_type in ("AveragePool", "Reshape")
        for name in node.output
    }
    checked = 0
    for node in graph.node:
        ranged = node.input[0] in cell.artifact.ranges and node.input[0] not in passed_on
        if node.op_type == "QuantizeLinear" and ranged:
            low, high = cell.artifact.ranges[node.input[0]]
            # Zero is always a value of the range, and it takes 255 steps.
            expected = (max(high, 0.0) - min(low, 0.0)) / 255
            assert constants[node.input[1]] == pytest.approx(expected, rel=1e-3)
            checked += 1
    assert checked >= WEIGHT_LAYERS


def test_onnx_refuses_a_graph_in_which_nothing_is_quantized(
    shapes: Dataset, shapes_model: Fp32Model, tmp_path: Path
) -> None:
    helper = onnx.helper
    take, give = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("input", ["N", 32, 32, 3]), ("probabilities", ["N", 3]))
    )
    mean = helper.make_node("ReduceMean", ["input"], ["probabilities"], axes=[1, 2], keepdims=0)
    graph = helper.make_graph([mean], "no layers", [take], [give])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(proto, tmp_path / "plain.onnx")
    folder = tmp_path / "run"
    folder.mkdir()
    plain = replace(shapes_model, onnx_path=tmp_path / "plain.onnx")
    split = draw_calibration(shapes, 1, 0).split
    with pytest.raises(QuantizationError, match="quantized nothing"):
        BACKENDS["onnx"](make_config("data=shapes")).quantize(plain, split, folder)


def test_torch_refuses_a_module_in_which_nothing_is_quantized(
    shapes: Dataset, shapes_model: Fp32Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch import fx, nn

    from resnet8ptq.backends import torch as backend

    def without_layers(path: Path) -> Any:
        return fx.symbolic_trace(nn.Sequential(nn.Flatten(), nn.Softmax(dim=1))).eval()

    monkeypatch.setattr(backend, "load_torch_module", without_layers)
    split = draw_calibration(shapes, 1, 0).split
    with pytest.raises(QuantizationError, match="quantized nothing"):
        BACKENDS["torch"](make_config("data=shapes", "backend=torch")).quantize(
            shapes_model, split, tmp_path
        )


def test_torch_engine_missing_from_the_build_is_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", ["none", "x86"])
    quantizer = BACKENDS["torch"](make_config("backend=torch", "backend.engine=qnnpack"))
    with pytest.raises(UnsupportedError, match=r"engine=qnnpack is not in this build.*x86"):
        quantizer.resolve()


@pytest.mark.parametrize("vnni", [True, False])
def test_torch_engine_auto_is_onednn_where_the_cpu_has_vnni(
    monkeypatch: pytest.MonkeyPatch, vnni: bool
) -> None:
    import torch

    if "onednn" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(torch.backends.quantized, "engine", "fbgemm")
    monkeypatch.setattr(environment, "has_vnni", lambda: vnni)
    resolved = BACKENDS["torch"](make_config("backend=torch")).resolve()
    assert (resolved["engine"] == "onednn") == vnni


def test_torch_engine_auto_does_not_depend_on_the_run_before(
    monkeypatch: pytest.MonkeyPatch, quantize_anew: Quantize
) -> None:
    monkeypatch.setattr(environment, "has_vnni", lambda: False)
    auto = BACKENDS["torch"](make_config("backend=torch"))
    before = auto.resolve()["engine"]
    other = "qnnpack" if before == "fbgemm" else "fbgemm"
    quantize_anew("backend=torch", f"backend.engine={other}")
    assert auto.resolve()["engine"] == before


@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [
        ("fbgemm", "null", "7"),
        ("x86", "null", "7"),
        ("onednn", "null", "8"),
        ("fbgemm", "false", "8"),
        ("onednn", "true", "7"),
    ],
)
def test_torch_reduce_range_follows_the_engine(engine: str, given: str, expected: str) -> None:
    import torch

    if engine not in torch.backends.quantized.supported_engines:
        pytest.skip(f"this build of torch has no {engine}")
    overrides = (f"backend.engine={engine}", f"reduce_range={given}")
    resolved = BACKENDS["torch"](make_config("backend=torch", *overrides)).resolve()
    assert resolved["activation_bits"] == expected


def test_torch_reduce_range_changes_the_model(quantize: Quantize) -> None:
    seven, eight = (
        quantize("backend=torch", f"reduce_range={value}") for value in ("true", "false")
    )
    assert seven.artifact.ranges == eight.artifact.ranges
    assert not np.array_equal(seven.predict(), eight.predict())


def test_torch_file_holds_one_class_and_no_debug_records(quantize: Quantize) -> None:
    slim = quantize("backend=torch")
    whole = quantize("backend=torch", "backend.freeze=false")
    full = quantize("backend=torch", "backend.freeze=false", "backend.debug_records=true")

    def records(cell: Cell, suffix: str) -> list[str]:
        with zipfile.ZipFile(cell.artifact.path) as archive:
            names = [name for name in archive.namelist() if name.endswith(suffix)]
        return [name for name in names if "torch/classes" not in name]  # torch's own

    assert records(slim, ".debug_pkl") == records(whole, ".debug_pkl") == []
    assert records(full, ".debug_pkl") != []
    assert len(records(slim, ".py")) == 1 < len(records(whole, ".py")) == len(records(full, ".py"))
    assert slim.artifact.size_bytes < whole.artifact.size_bytes < full.artifact.size_bytes
    assert np.array_equal(slim.predict(), full.predict())
    assert np.array_equal(slim.predict(), whole.predict())


def test_torch_histogram_observer_is_its_own_method(quantize: Quantize) -> None:
    histogram = quantize("backend=torch", "calib=histogram")
    assert histogram.artifact.quantized_layers == WEIGHT_LAYERS
    assert not np.array_equal(histogram.predict(), quantize("backend=torch").predict())
