"""Weights in blocks, activations in float: method=weight_only."""

import csv
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.backends.contract import Artifact
from resnet8ptq.backends.onnx import profiler, weight_only
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ConfigError, QuantizationError, UnsupportedError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.deploy import older_runtime
from resnet8ptq.experiment.network_and_data import fit_data
from resnet8ptq.graph.links import find_all
from resnet8ptq.graph.passes import rewrite
from resnet8ptq.models import model
from resnet8ptq.models.model import Fp32Model
from tests.helpers.assembling import assemble
from tests.helpers.calling import Called, call, call_beside
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of
from tests.helpers.own_data import QUICK, write_data
from tests.helpers.product_networks import write, write_mixer

W4 = ("method=weight_only", "dtype=w4")
RANDOM = np.random.default_rng(0)
BATCH = RANDOM.normal(size=(20, 40)).astype(np.float32)
WEIGHTS = RANDOM.normal(size=(40, 6)).astype(np.float32)
TRUE = numpy_helper.from_array(np.array(True))


def load(path: Path, cache_root: Path, samples: NDArray) -> tuple[Fp32Model, Split]:
    split = Split(samples, None, "made")
    data = Dataset("own", (), split, split)
    settings = make_config("data=arrays", f"model.path={path}").model
    fp32 = model.load_network(settings, data, cache_root)
    return fp32, fit_data(data, fp32).test


def quantize(config: RunConfig, fp32: Fp32Model, split: Split, folder: Path) -> Artifact:
    quantizer = quantizer_of(config)
    quantizer.resolve()
    fitted = quantizer_of(replace(config, **quantizer.fit(fp32)))
    return fitted.quantize(fp32, fitted.asked, split, folder)


@pytest.fixture
def product(tmp_path: Path, cache_root: Path) -> tuple[Fp32Model, Split]:
    """One MatMul of 40 by 6."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "only")]
    path = write(tmp_path / "one.onnx", nodes, {"w": WEIGHTS}, {"x": ["N", 40]}, {"y": ["N", 6]})
    return load(path, cache_root, BATCH)


@pytest.fixture
def mixer(tmp_path: Path, cache_root: Path) -> tuple[Fp32Model, Split]:
    samples = RANDOM.normal(size=(10, 3, 8, 6)).astype(np.float32)
    return load(write_mixer(tmp_path / "mixer.onnx"), cache_root, samples)


@pytest.fixture
def sentences(tmp_path: Path, cache_root: Path) -> tuple[Fp32Model, Split]:
    """The mean of 7 embeddings, and a MatMul."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], "words"),
        helper.make_node("ReduceMean", ["e"], ["m"], "mean", axes=[1], keepdims=0),
        helper.make_node("MatMul", ["m", "w"], ["y"], "only"),
    ]
    constants = {"table": RANDOM.normal(size=(500, 40)), "w": WEIGHTS}
    takes = {"ids": ["N", 7]}
    path = write(tmp_path / "words.onnx", nodes, constants, takes, {"y": ["N", 6]}, integers=True)
    return load(path, cache_root, RANDOM.integers(0, 500, (20, 7)))


# Settings


IN_FLOAT = "weights only, float activations"


@pytest.mark.parametrize(
    ("words", "weights", "activations", "execution"),
    [
        (("dtype=w4",), "uint4", "float32", IN_FLOAT),
        (("dtype=w8",), "uint8", "float32", IN_FLOAT),
        (("dtype=w4", "symmetric.weights=true"), "int4", "float32", IN_FLOAT),
        (("dtype=w4", "weight_only.algorithm=hqq"), "uint4", "float32", IN_FLOAT),
        (
            ("dtype=w8", "weight_only.int8_products=true"),
            *("uint8", "int8 (dynamic)", "weights only, int8 products"),
        ),
    ],
)
def test_resolved(words, weights, activations, execution):
    resolved = quantizer_of(make_config("method=weight_only", *words)).resolve()
    assert (resolved.weight_dtype, resolved.activation_dtype) == (weights, activations)
    assert resolved.execution == execution
    assert resolved.weight_scheme == ("symmetric" if weights.startswith("int") else "affine")
    assert str(resolved.weight_bits) in weights


def test_other_block_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"block_size: got 48, expected null \| 16 \| 32"):
        make_config(*W4, "weight_only.block_size=48")


# The file


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (("dtype=w4", "symmetric.weights=true"), 1 / 8),  # the largest weight is a level, -8
        (("dtype=w4",), 1 / 7),
        (("dtype=w4", "weight_only.algorithm=hqq"), 1 / 3),
        (("dtype=w8", "weight_only.block_size=16"), 1 / 127),
    ],
)
def test_weights_are_rounded_and_activations_are_not(product, words, step, tmp_path):
    """The identity gives the file's weights; a product with these is the file's own."""
    fp32, split = product
    config = make_config("data=arrays", "method=weight_only", *words)
    artifact = quantize(config, fp32, split, tmp_path)
    predict = quantizer_of(config).load(artifact.path, THREADS).predict
    (rounded,) = predict(np.eye(40, dtype=np.float32))
    size = config.weight_only.block_size
    for start in range(0, 40, size):
        block, exact = rounded[start : start + size], WEIGHTS[start : start + size]
        assert (np.abs(block - exact).max(axis=0) <= step * np.abs(exact).max(axis=0)).all()
    assert not np.array_equal(rounded, WEIGHTS)
    np.testing.assert_allclose(predict(BATCH)[0], BATCH @ rounded, rtol=1e-4, atol=1e-4)
    assert (artifact.quantized_layers, artifact.ranges, artifact.details) == (1, {}, {})


def test_int8_products_round_the_activations_too(product, tmp_path):
    outputs = []
    for name in ("false", "true"):
        config = make_config("data=arrays", *W4, f"weight_only.int8_products={name}")
        (folder := tmp_path / name).mkdir()
        path = quantize(config, *product, folder).path
        (node,) = onnx.load(path).graph.node
        levels = [a.i for a in node.attribute if a.name == "accuracy_level"]
        assert levels == ([4] if name == "true" else [])
        outputs.append(quantizer_of(config).load(path, THREADS).predict(BATCH)[0])
    np.testing.assert_allclose(*outputs, atol=0.05 * np.abs(outputs[0]).max())


@pytest.mark.parametrize("more", [(), ("slim=true",)], ids=str)
def test_products_are_in_blocks_and_convolutions_in_float(mixer, more, tmp_path, caplog):
    """Two layers share their weights; the Gemm becomes a product and a sum."""
    fp32, split = mixer
    config = make_config("data=arrays", "method=weight_only", "dtype=w8", *more)
    artifact = quantize(config, fp32, split, tmp_path)
    assert "method=weight_only: layers in float: Conv 1" in caplog.text
    assert artifact.quantized_layers == 3
    assert artifact.details == {"float_operators": "Conv 1"}
    kinds = [node.op_type for node in onnx.load(artifact.path).graph.node]
    assert kinds.count("MatMulNBits") == 3 and not {"MatMul", "Gemm"} & {*kinds}
    assert list(tmp_path.glob("model.*")) == [artifact.path]
    batch = split.inputs(slice(None))
    before = onnxruntime.InferenceSession(fp32.onnx_path).run(None, {"pixels": batch})[0]
    after = quantizer_of(config).load(artifact.path, THREADS).predict(batch)[0]
    np.testing.assert_allclose(after, before, atol=0.02 * np.abs(before).max())


@pytest.mark.parametrize("more", [(), ("slim=true",)], ids=str)
def test_embeddings_have_8_bits_by_row_or_4_in_blocks_if_they_are_named(sentences, more, tmp_path):
    """The opset rises to one with 4 bits; operators that changed before it still load."""
    fp32, split = sentences
    outputs, sizes = [], []
    left = (*W4, "nodes_to_exclude=[words]")
    for name, words in {
        "left": left,
        "rows": W4,
        "blocks": (*W4, "op_types=[MatMul,Gather]"),
    }.items():
        (folder := tmp_path / name).mkdir()
        config = make_config("data=arrays", *words, *more)
        artifact = quantize(config, fp32, split, folder)
        assert artifact.quantized_layers == 1
        assert artifact.details == {}
        batch = split.inputs(slice(None))
        outputs.append(quantizer_of(config).load(artifact.path, THREADS).predict(batch)[0])
        sizes.append(artifact.size_bytes)
    assert sizes[1] < sizes[0] / 2 and sizes[2] < sizes[0] / 4
    for other, close in zip(outputs[1:], (0.02, 0.2), strict=True):
        np.testing.assert_allclose(other, outputs[0], atol=close * np.abs(outputs[0]).max())
        assert not np.array_equal(other, outputs[0])
    proto = onnx.load(artifact.path)
    assert "GatherBlockQuantized" in {node.op_type for node in proto.graph.node}
    with pytest.raises(UnsupportedError, match=r"GatherBlockQuantized .* from ONNX Runtime 1\.20"):
        older_runtime.lower(proto, 19)


def test_layers_stay_in_float_by_name(mixer, tmp_path):
    config = make_config("data=arrays", *W4, "nodes_to_exclude=[second]")
    artifact = quantize(config, *mixer, tmp_path)
    assert artifact.quantized_layers == 2
    assert artifact.details == {"float_operators": "Conv 1, MatMul 1"}


@pytest.mark.parametrize("words", [("op_types=[Conv]",), ("nodes_to_quantize=[conv]",)], ids=str)
def test_without_a_product_it_is_unsupported(mixer, words, tmp_path):
    config = make_config("data=arrays", *W4, *words)
    with pytest.raises(UnsupportedError, match="the network has none to quantize: Conv 1, Gemm 1"):
        quantizer_of(config).fit(mixer[0])
    with pytest.raises(QuantizationError, match="quantized nothing"):
        quantize_network(quantizer_of(config), *mixer, tmp_path)


@given(
    st.floats(0.25, 4, width=32),
    st.floats(0.25, 4, width=32),
    st.booleans(),
    st.sampled_from(["", "vector", "scalar"]),
)
def test_a_gemm_is_a_product_and_a_sum(alpha, beta, transposed, bias):
    weights = WEIGHTS.T.copy() if transposed else WEIGHTS
    constants = {"w": weights, "b": RANDOM.normal(size=() if bias == "scalar" else 6)}
    inputs = ["x", "w", "b"] if bias else ["x", "w"]
    gemm = helper.make_node(
        "Gemm", inputs, ["y"], "g", alpha=alpha, beta=beta, transB=int(transposed)
    )
    floats = {name: np.float32(array) for name, array in constants.items()}
    proto = assemble([gemm], {"x": ["N", 40]}, {"y": ["N", 6]}, floats)
    before = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": BATCH})[0]
    proto = rewrite(proto, [weight_only.write_as_products({"g"})])
    kinds = [node.op_type for node in proto.graph.node]
    assert kinds == (["MatMul", "Add"] if bias else ["MatMul"])
    after = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": BATCH})[0]
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


def test_layers_whose_constants_do_not_allow_it_stay_in_float():
    """A bias that is computed cannot be scaled; a table cannot be in blocks of two kinds."""
    proto = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 4] x, int64[N] i) => (float[N, 4] y) <float[4, 4] w = {1, 1, 1, 1, 1, 1, 1, 1,
        1, 1, 1, 1, 1, 1, 1, 1}>
        {
            [lookup] a = Gather(w, i)
            [scaled] b = Gemm <beta = 0.5> (x, w, a)
            [plain] c = Gemm (b, w, a)
            [turned] d = Gemm <transA = 1> (c, w)
            [product] y = MatMul(d, w)
        }
        """
    )
    assert [node.name for node in weight_only.find_layers(proto.graph)] == ["plain", "product"]
    assert weight_only.find_embeddings(proto.graph) == []
    del proto.graph.node[-1]
    assert [node.name for node in weight_only.find_embeddings(proto.graph)] == ["lookup"]


def test_layers_of_inner_graphs_stay_in_float(tmp_path):
    branches = {}
    for name in ("then_branch", "else_branch"):
        product = helper.make_node("MatMul", ["y", "v"], [f"{name}_z"], f"{name}_product")
        output = helper.make_tensor_value_info(f"{name}_z", TensorProto.FLOAT, None)
        branches[name] = helper.make_graph([product], name, [], [output])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], "outer"),
        helper.make_node("Constant", [], ["true"], "condition", value=TRUE),
        helper.make_node("If", ["true"], ["z"], "choice", **branches),
    ]
    constants = {"w": WEIGHTS, "v": WEIGHTS.T.copy()}
    path = write(tmp_path / "if.onnx", nodes, constants, {"x": ["N", 40]}, {"z": ["N", 40]})
    weight_only.quantize(path, tmp_path / "quantized.onnx", [], make_config(*W4))
    operators = Counter(
        node.op_type for node in find_all(onnx.load(tmp_path / "quantized.onnx"), onnx.NodeProto)
    )
    assert operators["MatMulNBits"] == 1
    assert operators["MatMul"] == 2


def test_profile_and_kernels_are_float(product, tmp_path):
    path = quantize(make_config("data=arrays", *W4), *product, tmp_path).path
    assert profiler.count_kernels(path) == (0, 1)
    with profiler.profile(path, 1) as profiled:
        profiled.predict(BATCH)
        (node,) = profiled.nodes(1)
    assert (node.operator, node.kind) == ("MatMulNBits", "float")


@pytest.mark.parametrize(("dtype", "oldest"), [("w4", "1.17"), ("w8", "1.22")])
def test_older_runtimes_without_the_kernel_are_named(product, dtype, oldest, tmp_path):
    config = make_config("data=arrays", "method=weight_only", f"dtype={dtype}")
    path = quantize(config, *product, tmp_path).path
    with pytest.raises(UnsupportedError, match=re.escape(f"from ONNX Runtime {oldest} on")):
        older_runtime.lower(onnx.load(path), 16)
    if dtype == "w4":
        assert older_runtime.lower(onnx.load(path), 17) == "opset 17, IR 8 -> opset 17, IR 8"


# A whole run


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Called:
    folder = tmp_path_factory.mktemp("weight_only")
    write_data(folder / "data.npz", 300)
    network = write_mixer(folder / "mixer.onnx")
    words = (f"model.path={network}", f"data.root={folder / 'data.npz'}", "preprocess=unit")
    words += ("data=arrays", "method=weight_only", "report.columns=[all]", *QUICK)
    return call(folder, "-m", *words, "dtype=w4,int8", "weight_only.block_size=16,32", "slim=true")


@pytest.mark.slow
def test_a_run_says_how_it_was_quantized(sweep):
    assert sweep.code == 0, sweep.err
    rows = [row for row in sweep.table if row["dtype"] == "w4"]
    assert [row["weight_only.block_size"] for row in rows] == ["16", "32"]
    for row in rows:
        assert (row["calibration"], row["weights"]) == ("weight_only", "in blocks")
        assert row["execution"] == "weights only, float activations"
        assert row["accuracy"] == "100.00%"
    assert {row["status"] for row in sweep.table if row["dtype"] == "int8"} == {"unsupported"}
    assert "in float: Conv 1" in sweep.out


def test_it_is_deployed(sweep, tmp_path):
    (run, *_) = [run for run in sweep.children if run.data.params["dtype"] == "w4"]
    words = ("verify=false", f"run_id={run.info.run_id}", f"folder={tmp_path / 'out'}")
    done = call_beside(sweep.folder, "deploy", *words)
    assert done.code == 0, done.err
    assert "predictions equal to the run's" in done.out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "uint4 weights, float32 activations" in card
    assert "weight_only.block_size=16" in card


def test_its_layers_are_ranked(sweep, tmp_path):
    """The convolution, which stays in float, is not among them."""
    words = (f"model.path={sweep.folder / 'mixer.onnx'}", "data=arrays", "preprocess=unit", *W4)
    words += (f"data.root={sweep.folder / 'data.npz'}", "+analysis=sensitivity", *QUICK)
    done = call(tmp_path, *words)
    assert done.code == 0, done.err
    [table] = tmp_path.glob("runs/*/*/sensitivity.csv")
    rows = csv.DictReader(table.read_text().splitlines())
    assert {row["layer"] for row in rows} == {"first", "second", "head"}
