"""What is special to ExecuTorch: what XNNPACK runs, its threads, and the batches it takes."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from resnet8ptq.backends.contract import Artifact, Predictor
from resnet8ptq.backends.executorch import contents, lowering
from resnet8ptq.backends.executorch import quantizer as executorch_quantizer
from resnet8ptq.backends.torch.torchscript import Example
from resnet8ptq.core.descriptor import Backend
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from tests.helpers import product_networks
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of
from tests.helpers.frameworks import needs

WEIGHT_LAYERS = 10
needs_executorch = needs("executorch")
PICTURES = np.random.default_rng(0).normal(size=(20, 3, 8, 6)).astype(np.float32)


@needs_executorch
def test_xnnpack_runs_every_layer_in_8_bits(quantize):
    cell, whole = (quantize("backend=executorch", f"dtype={d}") for d in ("int8", "fp32"))
    assert quantizer_of(cell.config).count_kernels(cell.artifact.path) == (WEIGHT_LAYERS, 0)
    assert quantizer_of(whole.config).count_kernels(whole.artifact.path) == (0, WEIGHT_LAYERS)
    assert cell.artifact.details["delegated_operators"] == "21 of 21"


def graph_of(kind, ids, types):
    """XNNPACK's graph of one operator, whose tensors have the datatypes `types`."""
    values = [
        {"xvalue_union": {"id_out": number, "datatype": f"xnn_datatype_{name}"}}
        for number, name in enumerate(types)
    ]
    return {"xvalues": values, "xnodes": [{"xnode_union": ids, "xnode_union_type": kind}]}


@pytest.mark.parametrize(
    ("ids", "types", "integer"),
    [
        ({"input1_id": 0, "output_id": 1}, ("qint8", "qint8"), True),
        ({"input1_id": 0, "output_id": 1}, ("qint8", "fp32"), False),
        ({}, (), False),  # nothing says that it has 8 bits
        ({"input_id": 7}, (), False),  # not among the tensors
    ],
)
def test_an_operator_is_an_integer_one_by_its_tensors(ids, types, integer, monkeypatch):
    monkeypatch.setattr(contents, "_decode", lambda _: graph_of("XNNAdd", ids, types))
    [operator] = contents._read_delegate(b"")
    assert operator.integer == integer


@pytest.mark.parametrize(
    ("types", "data", "weights", "dynamic"),
    [
        (("qint8", "qcint8", "qint8"), "int8", "int8", False),
        (("qdint8", "qbint4", "fp32"), "int8", "int4", True),
        (("fp32", "fp16", "fp32"), "float32", "float16", False),
    ],
)
def test_a_layer_has_the_dtypes_of_its_tensors(types, data, weights, dynamic, monkeypatch):
    ids = {"input1_id": 0, "filter_id": 1, "bias_id": 4294967295, "output_id": 2}
    monkeypatch.setattr(contents, "_decode", lambda _: graph_of("XNNFullyConnected", ids, types))
    [operator] = contents._read_delegate(b"")
    assert (operator.data, operator.weights, operator.dynamic) == (data, weights, dynamic)


@needs_executorch
def test_the_integers_are_those_that_pt2e_simulates(quantize):
    cell, simulated = (
        quantize(f"backend={name}", "dtype=int8") for name in ("executorch", "torch_pt2e")
    )
    assert cell.artifact.ranges == simulated.artifact.ranges
    assert (cell.predict().argmax(1) == simulated.predict().argmax(1)).mean() > 0.98


@pytest.mark.slow
@needs_executorch
def test_a_network_that_xnnpack_runs_in_float_is_not_called_quantized(shapes_model, tmp_path):
    nodes = [
        onnx.helper.make_node("Transpose", ["x"], ["t"], "turned", perm=[0, 2, 1]),
        onnx.helper.make_node("MatMul", ["x", "t"], ["y"], "product"),
    ]
    sides: tuple[dict[str, list[int | str]], ...] = ({"x": ["N", 8, 6]}, {"y": ["N", 8, 8]})
    path = product_networks.write(tmp_path / "product.onnx", nodes, {}, *sides)
    quantizer = quantizer_of(make_config("data=shapes", "backend=executorch"))
    model = replace(shapes_model, onnx_path=path)
    with pytest.raises(QuantizationError, match="no layer in 8 bits"):
        quantize_network(quantizer, model, Split(PICTURES[:, 0], None, "made"), tmp_path)


@needs_executorch
def test_programs_survive_another_number_of_threads(quantize):
    cell = quantize("backend=executorch", "dtype=int8")
    quantizer, images = quantizer_of(cell.config), cell.data.test.inputs(slice(100))
    one, two = (quantizer.load(cell.artifact.path, threads) for threads in (1, 2))
    for predictor in (one, two, one):
        np.testing.assert_array_equal(predictor.predict(images)[0], cell.predict()[:100])


@pytest.fixture(scope="module")
def chain(shapes_model: Fp32Model, tmp_path_factory: pytest.TempPathFactory) -> Fp32Model:
    """A Relu between two convolutions, which is lowered in a few seconds; ResNet8 takes ten."""
    inner = onnx.helper.make_node("Relu", ["wide"], ["inner"], "inner")
    path = tmp_path_factory.mktemp("chain") / "chain.onnx"
    return replace(shapes_model, onnx_path=write_chain(path, inner))


Lowered = tuple[Artifact, Predictor]


def lower(network: Fp32Model, folder: Path, *overrides: str) -> Lowered:
    quantizer = quantizer_of(make_config("data=shapes", "backend=executorch", *overrides))
    artifact = quantize_network(quantizer, network, Split(PICTURES, None, "made"), folder)
    return artifact, quantizer.load(artifact.path, THREADS)


@pytest.fixture(scope="module")
def lowered(chain: Fp32Model, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return lower(chain, tmp_path_factory.mktemp("lowered"))


@pytest.mark.slow
@needs_executorch
def test_more_samples_than_memory_is_planned_for_run_in_parts(
    chain, lowered, tmp_path, monkeypatch
):
    predictors = [lowered[1]]
    for most in (1, 16):  # 16: a bound that torch's own choice of kernels has
        monkeypatch.setattr(executorch_quantizer, "MOST_AT_ONCE", most)
        predictors.append(lower(chain, tmp_path)[1])
    [whole] = lowered[1].predict(PICTURES)
    for predictor in predictors:
        np.testing.assert_array_equal(predictor.predict(PICTURES)[0], whole)
        parts = [predictor.predict(PICTURES[n : n + 3])[0] for n in range(0, len(PICTURES), 3)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.slow
@needs_executorch
def test_files_are_reproduced_and_per_channel_has_more_scales(chain, lowered, tmp_path):
    before, again = lowered[0].path.read_bytes(), lower(chain, tmp_path)[0].path.read_bytes()
    assert again == before
    artifact, predictor = lower(chain, tmp_path, "per_channel=true")
    assert artifact.size_bytes > len(before)
    assert not np.array_equal(predictor.predict(PICTURES)[0], lowered[1].predict(PICTURES)[0])


@pytest.mark.slow
@needs_executorch
def test_decisions_of_a_step_have_the_effect_of_settings(chain, lowered, tmp_path):
    (tmp_path / "asked").mkdir()
    asked, _ = lower(chain, tmp_path / "asked", "nodes_to_exclude=[last]")
    files = []
    for settings, decisions in (
        ([], Decisions(in_float=["last"])),
        (["nodes_to_exclude=[last]"], Decisions()),
    ):
        quantizer = quantizer_of(make_config("data=shapes", "backend=executorch", *settings))
        made = quantizer.quantize(chain, decisions, Split(PICTURES, None, "made"), tmp_path)
        files.append(made.path.read_bytes())
    assert asked.quantized_layers == 1
    assert files == [asked.path.read_bytes(), lowered[0].path.read_bytes()]


@pytest.mark.slow
@needs_executorch
def test_a_layer_stays_in_float_behind_8_bits(chain, lowered, tmp_path):
    artifact, predictor = lower(chain, tmp_path, "precision.plan={last: 32}")
    count = quantizer_of(make_config("backend=executorch")).count_kernels
    assert (count(lowered[0].path), count(artifact.path)) == ((2, 0), (1, 1))
    [mixed], [whole] = predictor.predict(PICTURES), lowered[1].predict(PICTURES)
    assert 0 < np.linalg.norm(mixed - whole) < 0.05 * np.linalg.norm(whole)


def write_chain(path: Path, inner: onnx.NodeProto) -> Path:
    """Write an operator `wide` -> `inner` between two convolutions."""
    nodes = [
        onnx.helper.make_node("Conv", ["x", "v"], ["wide"], "first"),
        inner,
        onnx.helper.make_node("Conv", ["inner", "w"], ["y"], "last"),
    ]
    random = np.random.default_rng(0)
    filters = {"v": random.normal(size=(8, 3, 1, 1)), "w": random.normal(size=(4, 8, 1, 1))}
    return product_networks.write(
        path, nodes, filters, {"x": ["N", 3, 8, 6]}, {"y": ["N", 4, 8, 6]}
    )


@needs_executorch
def test_a_softmax_of_pictures_keeps_its_axis_and_lowering_is_named(
    shapes_model, tmp_path, monkeypatch
):
    """XNNPACK's convolutions put the channels last, and its softmax is over the last axis."""
    inner = onnx.helper.make_node("Softmax", ["wide"], ["inner"], "softmax")
    path = write_chain(tmp_path / "softmax.onnx", inner)
    named: list[str] = []
    monkeypatch.setattr(lowering, "waiting", lambda label: nullcontext(named.append(label)))
    _, predictor = lower(replace(shapes_model, onnx_path=path), tmp_path, "dtype=fp32")
    [expected] = open_runner(str(path))(PICTURES)
    np.testing.assert_allclose(predictor.predict(PICTURES)[0], expected, atol=1e-5)
    assert len(named) == 1 and named[0].startswith("Lowering a graph of ")


@needs_executorch
def test_an_operator_of_several_steps_between_convolutions_keeps_its_layout(shapes_model, tmp_path):
    """All steps share the dequantized output of the convolution."""
    inner = onnx.helper.make_node("LpNormalization", ["wide"], ["inner"], "inner")
    path = write_chain(tmp_path / "steps.onnx", inner)
    _, predictor = lower(replace(shapes_model, onnx_path=path), tmp_path, "dtype=int8")
    [expected], [result] = open_runner(str(path))(PICTURES), predictor.predict(PICTURES)
    assert np.linalg.norm(result - expected) < 0.1 * np.linalg.norm(expected)


@needs_executorch
def test_an_operator_that_the_runtime_lacks_is_unsupported(shapes_model, tmp_path):
    inner = onnx.helper.make_node("LRN", ["wide"], ["inner"], "inner", size=3)
    network = replace(shapes_model, onnx_path=write_chain(tmp_path / "lrn.onnx", inner))
    with pytest.raises(UnsupportedError, match=r"runtime lacks a kernel for aten::avg_pool3d\.out"):
        lower(network, tmp_path, "dtype=fp32")


@needs_executorch
def test_a_transposed_convolution_along_one_axis_is_unsupported(shapes_model, tmp_path):
    """XNNPACK gets it as one of pictures, whose input it takes for 8 bits."""
    nodes = [
        onnx.helper.make_node("Conv", ["x", "v"], ["wide"], "first"),
        onnx.helper.make_node("ConvTranspose", ["wide", "w", "b"], ["y"], "last"),
    ]
    random = np.random.default_rng(0)
    shapes = {"v": (8, 8, 1), "w": (8, 4, 3), "b": (4,)}
    weights = {name: random.normal(size=shape) for name, shape in shapes.items()}
    sides: tuple[dict[str, list[int | str]], ...] = {"x": ["N", 8, 6]}, {"y": ["N", 4, 8]}
    path = product_networks.write(tmp_path / "signal.onnx", nodes, weights, *sides)
    quantizer = quantizer_of(make_config("data=shapes", "backend=executorch"))
    signals = Split(PICTURES[:, 0], None, "made")
    with pytest.raises(UnsupportedError, match="XNNPACK refuses a layer in float after one in 8"):
        quantize_network(quantizer, replace(shapes_model, onnx_path=path), signals, tmp_path)


@needs_executorch
def test_a_layer_that_xnnpack_lacks_is_unsupported(shapes_model, tmp_path):
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], "three_axes")
    filters = {"w": np.random.default_rng(0).normal(size=(2, 1, 2, 2, 2))}
    sides: tuple[dict[str, list[int | str]], ...]
    sides = {"x": ["N", 1, 3, 8, 6]}, {"y": ["N", 2, 2, 7, 5]}
    path = product_networks.write(tmp_path / "volume.onnx", [node], filters, *sides)
    quantizer = quantizer_of(make_config("data=shapes", "backend=executorch", "per_channel=true"))
    volumes = Split(PICTURES[:, np.newaxis], None, "made")
    with pytest.raises(UnsupportedError, match=r"^per_channel=true: XNNPACK has no kernel for a"):
        quantize_network(quantizer, replace(shapes_model, onnx_path=path), volumes, tmp_path)


@needs_executorch
def test_weights_on_the_left_and_several_matrices_stay_in_float(shapes_model, tmp_path):
    nodes = [
        onnx.helper.make_node("MatMul", ["l", "x"], ["a"], "left"),
        onnx.helper.make_node("MatMul", ["a", "s"], ["b"], "several"),
        onnx.helper.make_node("MatMul", ["b", "w"], ["y"], "plain"),
    ]
    shapes = {"l": (5, 8), "s": (3, 6, 6), "w": (6, 4)}
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=shape) for name, shape in shapes.items()}
    sides: tuple[dict[str, list[int | str]], ...] = {"x": ["N", 3, 8, 6]}, {"y": ["N", 3, 5, 4]}
    path = product_networks.write(tmp_path / "network.onnx", nodes, weights, *sides)
    network = replace(shapes_model, onnx_path=path)
    artifact, predictor = lower(network, tmp_path, "dtype=int8", "per_channel=true")
    assert artifact.quantized_layers == 1
    [expected], [result] = open_runner(str(path))(PICTURES), predictor.predict(PICTURES)
    assert np.linalg.norm(result - expected) < 0.1 * np.linalg.norm(expected)


def test_a_recurrent_layer_is_unsupported_before_any_work(shapes_model, tmp_path):
    node = onnx.helper.make_node("GRU", ["x", "w", "r"], ["y"], "layer", hidden_size=2)
    constants = {"w": np.zeros((1, 6, 4)), "r": np.zeros((1, 6, 2))}
    sides: tuple[dict[str, list[int | str]], ...] = ({"x": [3, "N", 4]}, {"y": [3, 1, "N", 2]})
    path = product_networks.write(tmp_path / "gru.onnx", [node], constants, *sides)
    quantizer = quantizer_of(make_config("data=shapes", "backend=executorch"))
    with pytest.raises(UnsupportedError, match=r"a recurrent layer: .* try backend=torch"):
        quantizer.fit(replace(shapes_model, onnx_path=path))


@needs_executorch
def test_an_error_of_the_network_itself_is_no_refusal():
    wrong = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        lowering.lower(wrong, Example((torch.zeros(1, 4),), (False,)), 4)


@needs_executorch
def test_a_program_of_other_results_is_unsupported(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(
        executorch_quantizer, "infer", lambda m, batch: [np.ones((1, 4, 8, 6), "f")]
    )
    with pytest.raises(UnsupportedError, match="computes other values"):
        lower(chain, tmp_path)


def test_a_program_that_returns_nan_is_unsupported(monkeypatch):
    def load(content: bytes, threads: int):
        return lambda batch: [np.full_like(batch, np.nan)]

    monkeypatch.setattr(executorch_quantizer.predictor, "LoadedProgram", load)
    monkeypatch.setattr(executorch_quantizer, "infer", lambda module, batch: [batch])
    with pytest.raises(UnsupportedError, match="computes other values"):
        executorch_quantizer._check_run(b"", None, Split(PICTURES, None, "made"))


@needs_executorch
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("AveragePool", {"kernel_shape": [3, 2], "pads": [0, 1, 1, 0]}), ("Pad", {})],
)
def test_a_padding_that_crops_or_that_a_pool_takes_runs(shapes_model, tmp_path, kind, settings):
    """XNNPACK failed to load a Pad that a pool in float takes, and to run one that crops."""
    inputs = ["wide", "pads"] if kind == "Pad" else ["wide"]
    inner = onnx.helper.make_node(kind, inputs, ["inner"], "inner", **settings)
    path = write_chain(tmp_path / "network.onnx", inner)
    proto = onnx.load(path)
    if kind == "Pad":
        pads = np.array([0, 0, -1, 1, 0, 0, 1, -2])
        proto.graph.initializer.append(onnx.numpy_helper.from_array(pads, "pads"))
    for axis in proto.graph.output[0].type.tensor_type.shape.dim[2:]:
        axis.Clear()
    onnx.save(proto, path)
    _, predictor = lower(replace(shapes_model, onnx_path=path), tmp_path, "dtype=int8")
    [expected], [result] = open_runner(str(path))(PICTURES), predictor.predict(PICTURES)
    assert np.linalg.norm(result - expected) < 0.1 * np.linalg.norm(expected)


def test_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(Backend, "is_installed", False)
    with pytest.raises(UnsupportedError, match=r"not installed; try .*install .*executorch"):
        quantizer_of(make_config("backend=executorch")).resolve()
