"""One contract for every backend; then what is special to each."""

import filecmp
import re

import numpy as np
import onnx
import pytest

from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.config.schema import DTYPES, WEIGHT_ONLY
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.tasks.scoring.distortion import softmax
from tests.helpers.configs import make_config
from tests.helpers.factories import quantize_network, quantizer_of
from tests.helpers.frameworks import FILE, QUANTIZING, SHIPPED, skip_without_float_layers
from tests.helpers.quantized import TESTED, Probabilities, Quantize

# The dtypes in docs/settings.md: (weights, activations), or None where it is unsupported. A backend
# without rows here is held to resolve or refuse each dtype, and to quantize from its own start.
DTYPE_TABLE = {
    ("onnx", "fp32"): ("float32", "float32"),
    ("onnx", "int8"): ("int8", "int8"),
    ("onnx", "uint8"): ("uint8", "uint8"),
    ("onnx", "u8s8"): ("int8", "uint8"),
    ("torch", "fp32"): ("float32", "float32"),
    ("torch", "int8"): ("int8", "uint8"),
    ("torch", "uint8"): None,
    ("torch", "u8s8"): ("int8", "uint8"),
    ("torch", "w4a8"): None,
    ("torch_pt2e", "w4a8"): None,
    ("onnx", "w4a8"): ("int4", "uint8"),
    ("tflite", "w4a8"): ("int4", "int8"),
    ("tflite", "fp32"): ("float32", "float32"),
    ("tflite", "int8"): ("int8", "int8"),
    ("tflite", "uint8"): None,
    ("tflite", "u8s8"): None,
    ("torch_pt2e", "fp32"): ("float32", "float32"),
    ("torch_pt2e", "int8"): ("int8", "int8"),
    ("torch_pt2e", "uint8"): ("uint8", "uint8"),
    ("torch_pt2e", "u8s8"): ("int8", "uint8"),
    ("executorch", "fp32"): ("float32", "float32"),
    ("executorch", "int8"): ("int8", "int8"),
    ("executorch", "uint8"): None,
    ("executorch", "u8s8"): None,
    ("executorch", "w4a8"): None,
    ("openvino", "fp32"): ("float32", "float32"),
    ("openvino", "int8"): ("int8", "uint8"),
    ("openvino", "uint8"): None,
    ("openvino", "u8s8"): ("int8", "uint8"),
    ("openvino", "w4a8"): None,
    ("openvino_nncf", "fp32"): ("float32", "float32"),
    ("openvino_nncf", "int8"): ("int8", "uint8"),
    ("openvino_nncf", "uint8"): None,
    ("openvino_nncf", "u8s8"): None,
    ("openvino_nncf", "w4a8"): None,
    ("onnx", "w8a16"): ("int8", "uint16"),
    ("tflite", "w8a16"): ("int8", "int16"),
    **{(name, "w8a16"): None for name in ("torch", "torch_pt2e", "executorch", "openvino")},
    ("openvino_nncf", "w8a16"): None,
    **{(name, "fp16"): ("float16", "float32") for name in ("onnx", "torch", "tflite", "openvino")},
    ("torch_pt2e", "fp16"): ("float16", "float32"),
    **{(name, "fp16"): None for name in ("executorch", "openvino_nncf")},
    **{("file", dtype): None for dtype in DTYPES},  # the file has its own dtype, and int8 means it
    ("file", "int8"): ("int8", "int8"),
    # Weights alone: method=weight_only, see test_weight_only.py.
    **{(backend, dtype): None for backend in SHIPPED for dtype in WEIGHT_ONLY},
}
_REASONS = (
    r"qint8 weights|int8 kernels|int8 or int16|simulates 8 bits|below 8 bits|weights alone|"
    r"has its own dtype"
)


def start_dtype(backend: str) -> str:
    """Return the dtype from which the search starts with a backend."""
    [dtype] = [word for word in BACKENDS[backend].search.start if word.startswith("dtype=")]
    return dtype.removeprefix("dtype=")


NNCF = "openvino_nncf"
FRAMEWORKS = (*QUANTIZING, "torch_pt2e")  # the fixture in conftest.py skips those not installed
# ExecuTorch lowers ResNet8 for many seconds: test_executorch.py has these for a smaller network.
FAST = [backend for backend in FRAMEWORKS if backend != "executorch"]
CELLS = [(backend, dtype) for backend in (*FRAMEWORKS, FILE) for dtype in DTYPES]
SUPPORTED = [cell for cell in CELLS if DTYPE_TABLE.get(cell)]
for new in set(QUANTIZING).difference(SHIPPED):
    SUPPORTED += [(new, "fp32"), (new, start_dtype(new))]
QUANTIZED = [cell for cell in SUPPORTED if cell[1] != "fp32"]
# ExecuTorch's ranges are PT2E's (test_executorch.py).
WITHOUT_RANGES = {name for name, backend in BACKENDS.items() if not backend.has_ranges}
CALIBRATED = [backend for backend in FAST if backend not in WITHOUT_RANGES]
LATER = ("executorch", "tflite", "torch_pt2e", NNCF)  # they quantize for seconds: marked slow
WEIGHT_LAYERS = 10  # ResNet8: nine convolutions, one dense layer


def params(cases):
    """Return backends, or pairs with a dtype, as parameters of a test."""
    cells = [(case,) if isinstance(case, str) else case for case in cases]
    marks = [[pytest.mark.slow] if cell[0] in LATER else [] for cell in cells]
    return [pytest.param(*cell, marks=mark) for cell, mark in zip(cells, marks, strict=True)]


@pytest.fixture(scope="module")
def fp32(quantize: Quantize) -> Probabilities:
    return quantize("backend=onnx", "dtype=fp32").predict()


def accuracy(probabilities: Probabilities, data: Dataset) -> float:
    return float((probabilities.argmax(1) == data.test.labels[: len(probabilities)]).mean())


def test_the_dtype_table_has_all_dtypes_of_all_its_backends():
    assert {(backend, dtype) for backend in SHIPPED for dtype in DTYPES} == set(DTYPE_TABLE)


@pytest.mark.parametrize(("backend", "dtype"), CELLS)
def test_resolves_as_the_dtype_table_says(quantize, backend, dtype):
    config = make_config(f"backend={backend}", f"dtype={dtype}")
    if (backend, dtype) == (FILE, "int8"):
        config = quantize("backend=file").config
    quantizer = quantizer_of(config)
    try:
        resolved = quantizer.resolve()
    except UnsupportedError as error:
        assert not DTYPE_TABLE.get((backend, dtype)), error
        assert f"dtype={dtype}: " in str(error) or "below 8 bits" in str(error)
        if backend in SHIPPED:
            assert re.search(_REASONS, str(error))
    else:
        dtypes = (resolved.weight_dtype, resolved.activation_dtype)
        assert dtypes == DTYPE_TABLE.get((backend, dtype), dtypes)


@pytest.mark.parametrize(("backend", "dtype"), params(SUPPORTED))
def test_writes_one_file_and_counts_its_layers(quantize, backend, dtype):
    cell = quantize(f"backend={backend}", f"dtype={dtype}")
    assert list(cell.folder.iterdir()) == [cell.artifact.path]
    assert cell.artifact.size_bytes == cell.artifact.path.stat().st_size
    assert cell.artifact.quantized_layers == (0 if dtype == "fp32" else WEIGHT_LAYERS)


@pytest.mark.parametrize(("backend", "dtype"), params(SUPPORTED))
def test_predicts_probabilities(quantize, backend, dtype):
    probabilities = quantize(f"backend={backend}", f"dtype={dtype}").predict()
    assert probabilities.shape == (TESTED, 10)
    assert probabilities.dtype == np.float32
    assert np.isfinite(probabilities).all()
    assert (probabilities >= 0).all()
    # Each of ten probabilities is rounded by at most half a step of 1/256.
    tolerance = 1e-5 if dtype == "fp32" else 10 / 512
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=tolerance)


@pytest.mark.parametrize(("backend", "dtype"), params(SUPPORTED))
def test_batch_size_does_not_change_predictions(quantize, backend, dtype):
    cell = quantize(f"backend={backend}", f"dtype={dtype}")
    whole = cell.predict()[:50]
    ragged, single = (cell.predict(size, len(whole)) for size in (7, 1))
    # PT2E computes in float, on some CPUs in another order in another batch: what lies between two
    # levels may then fall to the other one, in single images.
    most = 0.02 * len(whole) if backend == "torch_pt2e" and dtype != "fp32" else 0
    for split in (ragged, single):
        assert (np.abs(split - whole).max(axis=1) > 1e-5).sum() <= most
        assert (split.argmax(1) != whole.argmax(1)).sum() <= most


@pytest.mark.parametrize("backend", params(FRAMEWORKS))
def test_fp32_predicts_the_same_in_every_framework(quantize, fp32, backend):
    probabilities = quantize(f"backend={backend}", "dtype=fp32").predict()
    np.testing.assert_allclose(probabilities, fp32, atol=1e-4)
    assert (probabilities.argmax(1) == fp32.argmax(1)).all()


@pytest.mark.parametrize(("backend", "dtype"), params(QUANTIZED))
def test_keeps_the_accuracy(quantize, fp32, shapes, backend, dtype):
    probabilities = quantize(f"backend={backend}", f"dtype={dtype}").predict()
    assert accuracy(fp32, shapes) > 0.85
    most = 0.02 if dtype != "w4a8" else 0.7  # the nearest of 15 levels, of a whole tensor
    assert accuracy(probabilities, shapes) == pytest.approx(accuracy(fp32, shapes), abs=most)
    assert not np.array_equal(probabilities, fp32)


# A file of another program has no FP32 file. NNCF's .xml is as large as ResNet8's weights.
@pytest.mark.parametrize(
    ("backend", "dtype"), params(cell for cell in QUANTIZED if cell[0] not in (FILE, NNCF))
)
def test_halves_the_size_at_least(quantize, backend, dtype):
    whole = quantize(f"backend={backend}", "dtype=fp32").artifact.size_bytes
    most = 0.7 if dtype == "fp16" else 0.5  # of a small network; biases and the graph stay
    assert quantize(f"backend={backend}", f"dtype={dtype}").artifact.size_bytes < most * whole


# In a compiled package oneDNN's descriptors of weights have bytes that nothing sets.
@pytest.mark.parametrize("backend", params(FAST))
def test_same_config_gives_the_same_file(quantize, quantize_anew, backend):
    overrides = (f"backend={backend}", "dtype=int8")
    first, second = quantize(*overrides), quantize_anew(*overrides)
    assert first.artifact.ranges == second.artifact.ranges
    assert filecmp.cmp(first.artifact.path, second.artifact.path, shallow=False)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_calibration_methods_differ(quantize, backend):
    methods = ("minmax", "entropy", "percentile")
    cells = [quantize(f"backend={backend}", "dtype=int8", f"calib={name}") for name in methods]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        one, other = cells[i], cells[j]
        assert one.artifact.ranges.keys() == other.artifact.ranges.keys()
        assert one.artifact.ranges != other.artifact.ranges
        assert not np.array_equal(one.predict(), other.predict())


@pytest.mark.parametrize("backend", params(CALIBRATED))
def test_methods_never_widen_the_range(quantize, backend):
    widest = quantize(f"backend={backend}", "dtype=int8").artifact.ranges
    cut = quantize(f"backend={backend}", "dtype=int8", "calib=percentile").artifact.ranges
    assert widest, f"backend={backend}: no ranges; expected them, or has_ranges=False in BACKEND"
    for name, (low, high) in widest.items():
        assert low <= cut[name][0] <= cut[name][1] <= high


@pytest.mark.parametrize("backend", params(FRAMEWORKS))
def test_a_layer_can_stay_in_float_or_the_choice_is_refused(backend):
    asked = quantizer_of(make_config(f"backend={backend}", "dtype=int8", "nodes_to_exclude=[a]"))
    if FLOAT_BITS in asked.widths:
        assert asked.resolve().weight_dtype == "int8"
    else:
        with pytest.raises(UnsupportedError, match=r"^nodes_to_exclude="):
            asked.resolve()


@pytest.mark.parametrize("backend", params(FAST))
def test_decisions_of_a_step_have_the_effect_of_settings(
    quantize, shapes, shapes_model, tmp_path, backend
):
    node = next(iter(weight_layers(onnx.load(shapes_model.onnx_path).graph).values())).name
    skip_without_float_layers(make_config(f"backend={backend}"))
    whole = quantize(f"backend={backend}", "dtype=int8")
    split = draw_calibration(shapes, 20, whole.config.seed).split
    excluded = make_config("data=shapes", f"backend={backend}", f"nodes_to_exclude=['{node}']")
    quantizer, set_so = quantizer_of(whole.config), quantizer_of(excluded)
    made = []
    for framework, decisions in (
        (quantizer, Decisions(in_float=[node])),
        (set_so, set_so.asked),
        (set_so, Decisions()),
    ):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(framework.quantize(shapes_model, decisions, split, folder))
    decided, asked, overruled = made
    assert decided.quantized_layers == asked.quantized_layers < whole.artifact.quantized_layers
    assert overruled.quantized_layers == whole.artifact.quantized_layers
    batch = shapes.test.inputs(slice(20))
    [one], [other] = (quantizer.load(item.path, 1).predict(batch) for item in (decided, asked))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("backend", params(CALIBRATED))
def test_given_ranges_win_and_make_calibration_needless(
    quantize, shapes, shapes_model, tmp_path, backend
):
    whole = quantize(f"backend={backend}", "dtype=u8s8")
    doubled = {name: (2 * low, 2 * high) for name, (low, high) in whole.artifact.ranges.items()}
    nothing = shapes.test.take(np.arange(0))  # images to calibrate on would be missed
    artifact = quantize_network(
        quantizer_of(whole.config), shapes_model, nothing, tmp_path, doubled
    )
    assert artifact.ranges == doubled
    assert artifact.path.read_bytes() != whole.artifact.path.read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        *(("backend=onnx", f"format={name}") for name in ("qdq", "qoperator")),
        *((f"backend={name}",) for name in ("torch", "torch_pt2e")),
    ],
)
def test_logits_give_the_probabilities(quantize, settings):
    cell = quantize("dtype=u8s8", *settings)
    images = cell.data.test.stored[:50].astype(np.float32)
    logits = cell.predictor.logits(images)
    assert logits is not None
    [probabilities] = cell.predictor.predict(images)
    most = 0.01 if "backend=onnx" in settings else 1 / 256
    np.testing.assert_allclose(probabilities, softmax(logits), atol=most)


@pytest.mark.parametrize("backend", params(FAST))
def test_per_channel_differs_from_per_tensor(quantize, backend):
    tensor = quantize(f"backend={backend}", "dtype=int8")
    channel = quantize(f"backend={backend}", "dtype=int8", "per_channel=true")
    assert channel.artifact.quantized_layers == WEIGHT_LAYERS
    assert channel.artifact.size_bytes > tensor.artifact.size_bytes  # one scale a channel
    assert not np.array_equal(channel.predict(), tensor.predict())


# Where torch looks is the same with each method.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "calib"),
    [
        *(("onnx", calib) for calib in ("minmax", "entropy", "percentile")),
        *((backend, "percentile") for backend in CALIBRATED if backend != "onnx"),
    ],
)
def test_calibration_batch_size_does_not_change_the_ranges(quantize, backend, calib):
    overrides = (f"backend={backend}", "dtype=int8", f"calib={calib}")
    whole = quantize(*overrides).artifact.ranges
    ragged = quantize(*overrides, "calib.batch_size=33").artifact.ranges  # 200 = 6 * 33 + 2
    assert ragged.keys() == whole.keys()
    for name in whole:  # a convolution may sum in another order
        assert ragged[name] == pytest.approx(whole[name], rel=1e-4)
