"""Weights alone in fewer bits: dtype=fp16, and 8 bits with a scale for each channel."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from resnet8ptq.backends.contract import LARGEST_HALF
from resnet8ptq.backends.onnx import weight_storage
from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.tasks.scoring.distortion import sqnr_db
from tests.backends.test_backends import params
from tests.backends.test_weight_only import load
from tests.backends.test_weight_storage import CASES
from tests.helpers.configs import make_config
from tests.helpers.factories import quantize_network, quantizer_of
from tests.helpers.product_networks import write

HALF = "dtype=fp16"
EIGHT = ("method=weight_only", "dtype=w8", "weight_only.block_size=null")
TAKING = [
    name
    for name, backend in find_backends().items()
    if backend.search.float16_weights and backend.search.weights_alone
]
RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("backend", params(TAKING))
def test_next_to_nothing_is_lost(quantize, backend):
    fp32 = quantize(f"backend={backend}", "dtype=fp32").predict()
    half = quantize(f"backend={backend}", HALF).predict()
    assert sqnr_db([fp32], [half]) > 60
    assert (fp32.argmax(1) != half.argmax(1)).sum() == 0


@pytest.mark.parametrize("backend", params(TAKING))
def test_weights_in_8_bits_alone_take_a_quarter_of_the_bytes(quantize, backend):
    fp32 = quantize(f"backend={backend}", "dtype=fp32")
    eight = quantize(f"backend={backend}", *EIGHT)
    half = quantize(f"backend={backend}", HALF)
    assert sqnr_db([fp32.predict()], [eight.predict()]) > 30
    assert eight.artifact.quantized_layers == half.artifact.quantized_layers
    saved = fp32.artifact.size_bytes - eight.artifact.size_bytes
    assert saved > 1.3 * (fp32.artifact.size_bytes - half.artifact.size_bytes)


@pytest.mark.parametrize("backend", params(["onnx", "openvino", "torch"]))
@pytest.mark.parametrize("words", [(HALF,), EIGHT])
def test_an_excluded_node_keeps_its_weights(quantize, shapes_model, backend, words):
    node = next(iter(weight_layers(onnx.load(shapes_model.onnx_path).graph).values())).name
    whole = quantize(f"backend={backend}", *words)
    part = quantize(f"backend={backend}", *words, f"nodes_to_exclude=[{node}]")
    assert part.artifact.quantized_layers == whole.artifact.quantized_layers - 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("slim", ["false", "true"])
def test_every_layer_with_weights_is_stored_in_half(name, slim, tmp_path, cache_root):
    nodes, constants, sample, output = CASES[name]
    source = write(
        tmp_path / "net.onnx", nodes, constants, {"x": ["N", *sample]}, {"y": ["N", *output]}
    )
    fp32, split = load(source, cache_root, RANDOM.normal(size=(20, *sample)).astype(np.float32))
    quantizer = quantizer_of(make_config(HALF, f"slim={slim}"))
    artifact = quantize_network(quantizer, fp32, split, tmp_path)
    assert artifact.quantized_layers == 1
    stored = onnx.load(artifact.path).graph.initializer
    assert {t.data_type for t in stored if len(t.dims) > 1} == {TensorProto.FLOAT16}
    batch = next(iter(split.batches(20)))
    ours, theirs = (quantizer.load(p, 1).predict(batch) for p in (artifact.path, fp32.onnx_path))
    assert sqnr_db(theirs, ours) > 50


def test_a_layer_whose_weights_float16_lacks_keeps_them(tmp_path, cache_root):
    constants = {
        "w": RANDOM.normal(size=(40, 40)).astype(np.float32),
        "large": np.full((40, 8), 2 * LARGEST_HALF, np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "small"),
        helper.make_node("MatMul", ["a", "large"], ["y"], "large"),
    ]
    source = write(tmp_path / "net.onnx", nodes, constants, {"x": ["N", 40]}, {"y": ["N", 8]})
    fp32, split = load(source, cache_root, RANDOM.normal(size=(20, 40)).astype(np.float32))
    quantizer = quantizer_of(make_config(HALF))
    artifact = quantize_network(quantizer, fp32, split, tmp_path)
    assert artifact.quantized_layers == 1
    [outputs] = quantizer.load(artifact.path, 1).predict(next(iter(split.batches(20))))
    assert np.isfinite(outputs).all()


@pytest.mark.parametrize("backend", params(["onnx", "torch"]))
def test_a_file_whose_layers_all_stay_in_float_is_unsupported(
    shapes, shapes_model, tmp_path, backend
):
    layers = weight_layers(onnx.load(shapes_model.onnx_path).graph).values()
    decisions = Decisions(in_float=[node.name for node in layers])
    quantizer = quantizer_of(make_config("data=shapes", f"backend={backend}", HALF))
    with pytest.raises(UnsupportedError, match=r"dtype=fp16: .*no layer"):
        quantizer.quantize(shapes_model, decisions, shapes.test.take(np.arange(5)), tmp_path)


def test_an_embedding_counts_where_the_layer_stays_in_float(tmp_path):
    constants = {
        "table": RANDOM.normal(size=(50, 8)).astype(np.float32),
        "w": RANDOM.normal(size=(8, 8)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], "look"),
        helper.make_node("MatMul", ["rows", "w"], ["y"], "product"),
    ]
    path = write(tmp_path / "net.onnx", nodes, constants, {"ids": ["N"]}, {"y": ["N", 8]})
    proto = onnx.load(path)
    proto = weight_storage.quantize(proto, ["product"], half=True)
    assert weight_storage.count_layers(proto.graph) == 1


def test_torch_refuses_a_network_without_weights_to_store(tmp_path, cache_root):
    weights = np.full((40, 8), 2 * LARGEST_HALF, np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "large")]
    source = write(tmp_path / "net.onnx", nodes, {"w": weights}, {"x": ["N", 40]}, {"y": ["N", 8]})
    fp32, split = load(source, cache_root, RANDOM.normal(size=(20, 40)).astype(np.float32))
    with pytest.raises(UnsupportedError, match="dtype=fp16: the module has no layer"):
        quantize_network(quantizer_of(make_config(HALF, "backend=torch")), fp32, split, tmp_path)


@pytest.mark.parametrize("backend", params(["onnx", "torch"]))
def test_a_layer_that_a_step_leaves_in_float_keeps_its_weights(
    quantize, shapes, shapes_model, tmp_path, backend
):
    node = next(iter(weight_layers(onnx.load(shapes_model.onnx_path).graph).values())).name
    whole = quantize(f"backend={backend}", HALF)
    quantizer = quantizer_of(whole.config)
    split = shapes.test.take(np.arange(5))
    part = quantizer.quantize(shapes_model, Decisions(in_float=[node]), split, tmp_path)
    assert part.quantized_layers == whole.artifact.quantized_layers - 1
    assert part.size_bytes > whole.artifact.size_bytes


@pytest.mark.parametrize("method", ["dynamic", "qat"])
@pytest.mark.parametrize("backend", TAKING)
def test_methods_that_need_integers_are_unsupported(backend, method):
    quantizer = quantizer_of(make_config(f"backend={backend}", HALF, f"method={method}"))
    with pytest.raises(UnsupportedError, match=f"method={method}: dtype=fp16"):
        quantizer.resolve()
