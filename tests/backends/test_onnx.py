"""ONNX Runtime: what its files hold, and every option it has."""

import filecmp
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import parser

from resnet8ptq.backends.contract import check_same
from resnet8ptq.backends.onnx import dynamic, slim
from resnet8ptq.backends.onnx import quantizer as onnx_quantizer
from resnet8ptq.core.errors import ConfigError, QuantizationError, UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.graph.session import open_runner, open_session
from resnet8ptq.precision.plan import Selection, find_float_nodes
from tests.helpers import passes
from tests.helpers.assembling import assemble
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of

WEIGHT_LAYERS = 10  # ResNet8: nine convolutions, one dense layer
DTYPES = {"int8": ("int8", "int8"), "uint8": ("uint8", "uint8"), "u8s8": ("int8", "uint8")}
FLAGSHIP = ("dtype=u8s8", "per_channel=true", "calib=percentile", "format=qoperator")


def kinds(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


ONNX_TYPES = {"int8": onnx.TensorProto.INT8, "uint8": onnx.TensorProto.UINT8}


@pytest.mark.parametrize("per_channel", ["false", "true"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "u8s8"])
def test_onnx_file_holds_the_dtypes_of_the_table(quantize, dtype, per_channel):
    cell = quantize("backend=onnx", f"dtype={dtype}", f"per_channel={per_channel}")
    proto = onnx.load(cell.artifact.path)
    onnx.checker.check_model(proto, full_check=True)
    weights, activations = (ONNX_TYPES[name] for name in DTYPES[dtype])
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


@pytest.mark.parametrize("words", [("dtype=fp32",), ("method=dynamic",)], ids=" ".join)
def test_format_auto_changes_nothing_where_there_is_no_format(quantize, words):
    plain, auto = (quantize("backend=onnx", *words, f"format={f}") for f in ("null", "auto"))
    assert filecmp.cmp(auto.artifact.path, plain.artifact.path, shallow=False)


def test_onnx_scales_come_from_the_ranges(quantize):
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


def test_onnx_refuses_a_graph_in_which_nothing_is_quantized(shapes, shapes_model, tmp_path):
    settings = {"axes": [1, 2], "keepdims": 0}
    mean = onnx.helper.make_node("ReduceMean", ["input"], ["probabilities"], **settings)
    sides = {"input": ["N", 32, 32, 3]}, {"probabilities": ["N", 3]}
    onnx.save(assemble([mean], *sides, {}), tmp_path / "plain.onnx")
    folder = tmp_path / "run"
    folder.mkdir()
    plain = replace(shapes_model, onnx_path=tmp_path / "plain.onnx")
    split = draw_calibration(shapes, 1, 0).split
    with pytest.raises(QuantizationError, match="quantized nothing"):
        quantize_network(quantizer_of(make_config("data=shapes")), plain, split, folder)


def test_qoperator_holds_integer_operators_and_agrees_with_qdq(quantize):
    qdq, qoperator = (quantize("dtype=u8s8", f"format={name}") for name in ("qdq", "qoperator"))
    assert "QLinearConv" not in kinds(qdq.artifact.path)
    assert {"QLinearConv", "QGemm"} <= kinds(qoperator.artifact.path)
    assert "Conv" not in kinds(qoperator.artifact.path)
    assert qoperator.artifact.quantized_layers == WEIGHT_LAYERS
    assert qoperator.artifact.size_bytes < qdq.artifact.size_bytes
    same = (qdq.predict().argmax(1) == qoperator.predict().argmax(1)).mean()
    assert same > 0.98


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_a_layer_left_in_float_runs_in_float(quantize, shapes_model, form, tmp_path):
    """ONNX Runtime rounds the weights of one between quantized layers when it loads the file."""
    nodes = [node.name for node in onnx.load(shapes_model.onnx_path).graph.node]
    left = next(name for name in nodes if "conv2d_3" in name)
    cell = quantize("backend=onnx", "dtype=u8s8", f"format={form}", f"nodes_to_exclude=[{left}]")
    open_session(str(cell.artifact.path), THREADS, tmp_path)
    loaded = onnx.load(tmp_path / "optimized.onnx").graph.node
    assert sum(node.op_type == "Conv" for node in loaded) == 1
    assert sum(node.op_type == "QLinearConv" for node in loaded) == WEIGHT_LAYERS - 2


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_float_output_leaves_no_ties(quantize, form):
    cell = quantize("dtype=u8s8", f"format={form}", "float_output=true")
    probabilities = cell.predict()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    top = np.sort(probabilities, axis=1)
    assert (top[:, -1] > top[:, -2]).all()
    assert cell.artifact.quantized_layers == WEIGHT_LAYERS
    assert onnx.load(cell.artifact.path).graph.node[-1].op_type == "Softmax"
    plain = quantize("dtype=u8s8", f"format={form}")
    assert (plain.predict().argmax(1) == probabilities.argmax(1)).mean() > 0.98


def test_symmetric_ranges_are_symmetric(quantize):
    cell = quantize("dtype=int8", "symmetric.activations=true")
    graph = onnx.load(cell.artifact.path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    zero_points = [constants[n.input[2]] for n in graph.node if n.op_type == "QuantizeLinear"]
    assert zero_points
    assert all((values == 0).all() for values in zero_points)
    assert quantizer_of(cell.config).resolve().activation_scheme == "symmetric"


def test_affine_weights_differ_and_per_channel_ones_are_refused(quantize):
    affine = quantize("dtype=u8s8", "symmetric.weights=false")
    graph = onnx.load(affine.artifact.path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {
        n.input[2]
        for n in graph.node
        if n.op_type == "DequantizeLinear" and n.input[0] in constants
    }
    assert any(constants[name].any() for name in weights)
    config = make_config("symmetric.weights=false", "per_channel=true")
    with pytest.raises(UnsupportedError, match="one zero point for all channels"):
        quantizer_of(config).resolve()


def test_reduced_range_keeps_weights_to_seven_bits(quantize):
    cell = quantize("dtype=u8s8", "reduce_range=true")
    graph = onnx.load(cell.artifact.path).graph
    levels = [
        onnx.numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1
    ]
    assert len(levels) == WEIGHT_LAYERS
    assert max(abs(values.astype(int)).max() for values in levels) == 64
    assert quantizer_of(cell.config).resolve().weight_bits == 7


def test_only_the_chosen_operators_are_quantized(quantize):
    assert quantize("op_types=[Gemm]").artifact.quantized_layers == 1
    with pytest.raises(ConfigError, match=r"op_types: got 'Convv'.*Conv"):
        quantize("op_types=[Convv]")


def test_operators_may_be_of_onnx_or_of_the_graph(shapes_model):
    graph = onnx.load(shapes_model.onnx_path).graph
    graph.node[0].op_type = "OfMine"  # from outside of ONNX
    chosen = Selection(op_types=["OfMine", "LSTM"])  # the second is not in the graph
    assert graph.node[0].name not in find_float_nodes(graph, chosen)


@pytest.mark.parametrize("per_channel", ["false", "true"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_dynamic_takes_its_ranges_from_the_batch(quantize, dtype, per_channel):
    cell = quantize("method=dynamic", f"dtype={dtype}", f"per_channel={per_channel}")
    assert {"ConvInteger", "DynamicQuantizeLinear"} <= kinds(cell.artifact.path)
    assert cell.artifact.quantized_layers == WEIGHT_LAYERS
    assert cell.artifact.ranges == {}
    assert not np.array_equal(cell.predict(100, images=200), cell.predict(1, images=200))
    resolved = quantizer_of(cell.config).resolve()
    assert (resolved.weight_dtype, resolved.activation_dtype) == (dtype, "uint8 (dynamic)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [("dtype=int8",), (*FLAGSHIP, "float_output=true"), ("method=dynamic",)]
)
def test_slim_file_predicts_the_same_to_the_bit(quantize, overrides):
    whole, small = quantize(*overrides), quantize(*overrides, "slim=true")
    assert small.artifact.size_bytes < whole.artifact.size_bytes - 9000
    assert np.array_equal(small.predict(), whole.predict())
    proto = onnx.load(small.artifact.path)
    onnx.checker.check_model(proto, full_check=True)
    assert (proto.graph.input[0].name, proto.graph.output[0].name) == ("input", "probabilities")
    assert not proto.graph.value_info and not proto.producer_name and not proto.metadata_props
    assert all(not node.name for node in proto.graph.node)
    standard = [node for node in proto.graph.node if not node.domain]
    said = {attribute.name for node in standard for attribute in node.attribute}
    assert not said & {"auto_pad", "dilations", "group", "alpha"}
    assert {"strides", "pads"} <= said
    domains = {node.domain for node in proto.graph.node}
    assert {opset.domain for opset in proto.opset_import} == domains
    values = [tensor.SerializeToString() for tensor in map(_unnamed, proto.graph.initializer)]
    assert len(values) == len(set(values))


def _unnamed(tensor: onnx.TensorProto) -> onnx.TensorProto:
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.ClearField("name")
    return copy


def test_slim_file_that_predicts_differently_is_refused(quantize, shapes, tmp_path):
    cell = quantize("dtype=int8")
    other = quantize("dtype=uint8").artifact.path
    split = draw_calibration(shapes, 1, 0).split
    with pytest.raises(QuantizationError, match="predicts differently"):
        whole, small = (open_runner(str(path)) for path in (cell.artifact.path, other))
        check_same(whole, small, split.batches(10))


def test_outputs_of_nan_equal_each_other():
    batch = np.array([[np.nan, 1]], np.float32)
    check_same(lambda _: [batch], lambda _: [batch.copy()], [batch])


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_onnx_runtime_reads_a_copy_beside_which_it_may_write(
    shapes, shapes_model, tmp_path, monkeypatch, method
):
    module = onnx_quantizer if method == "static" else dynamic
    name, read = f"quantize_{method}", []
    original = getattr(module, name)

    def spy(source: Path, *given: object, **named: object) -> None:
        read.append(source)
        original(source, *given, **named)

    monkeypatch.setattr(module, name, spy)
    config = make_config("data=shapes", f"method={method}", "op_types=[Gemm]")
    samples = draw_calibration(shapes, 1, 0).split
    quantize_network(quantizer_of(config), shapes_model, samples, tmp_path)
    (source,) = read
    assert source.parent not in (shapes_model.onnx_path.parent, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "level", "words"),
    [
        (("dtype=int8",), "INFO", "raised the weight scales of 3 channels"),
        (("dtype=u8s8", "format=qoperator"), "INFO", "raised the weight scales of 3 channels"),
        (("dtype=uint8",), "WARNING", "cut biases off at the ends of 32 bits (layers: 1)"),
    ],
)
def test_weights_of_nearly_nothing_are_one_line(
    shapes, shapes_model, tmp_path, caplog, overrides, level, words
):
    proto = onnx.load(shapes_model.onnx_path)
    conv = next(node for node in proto.graph.node if node.op_type == "Conv")
    weights = next(tensor for tensor in proto.graph.initializer if tensor.name == conv.input[1])
    dead = onnx.numpy_helper.to_array(weights).copy()
    dead[:3] *= 1e-30
    weights.CopyFrom(onnx.numpy_helper.from_array(dead, weights.name))
    onnx.save(proto, tmp_path / "dead.onnx")
    quantizer = quantizer_of(make_config("data=shapes", "per_channel=true", *overrides))
    model = replace(shapes_model, onnx_path=tmp_path / "dead.onnx")
    with caplog.at_level("INFO"):
        quantize_network(quantizer, model, draw_calibration(shapes, 1, 0).split, tmp_path)
    [line] = [record for record in caplog.records if "scale" in record.getMessage()]
    assert line.levelname == level
    assert words in line.getMessage()


def test_what_an_inner_graph_takes_comes_before_it(shapes, shapes_model, tmp_path):
    """ONNX Runtime's quantizer sorts the nodes without a look inside an If or a Loop."""
    proto = onnx.load(shapes_model.onnx_path)
    output = proto.graph.output[0].name
    for node in proto.graph.node:
        node.output[:] = ["before" if name == output else name for name in node.output]
    branches = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, K] before) => (float[N, K] after) {{
            sum = ReduceSum<keepdims = 0>({proto.graph.input[0].name})
            zero = Constant<value = float {{0.0}}>()
            positive = Greater(sum, zero)
            scaled = Add(before, before)
            after = If(positive) <
                then_branch = g1 () => (float[N, K] a) {{ a = Identity(scaled) }},
                else_branch = g2 () => (float[N, K] b) {{ b = Neg(scaled) }}>
        }}"""
    ).graph.node
    branches[-1].output[0] = output
    for index, node in enumerate(branches):
        node.name = f"branch{index}"
    proto.graph.node.extend(branches)
    onnx.save(proto, tmp_path / "branches.onnx")
    quantizer = quantizer_of(make_config("data=shapes"))
    model = replace(shapes_model, onnx_path=tmp_path / "branches.onnx")
    artifact = quantize_network(quantizer, model, draw_calibration(shapes, 1, 0).split, tmp_path)
    written = onnx.load(artifact.path)
    onnx.checker.check_model(written)
    [batch] = shapes.test.take(np.arange(4)).batches(4)
    expected, made = (open_runner(p.SerializeToString())(batch)[0] for p in (proto, written))
    assert np.corrcoef(expected.ravel(), made.ravel())[0, 1] > 0.99


def test_slim_keeps_a_constant_that_equals_one_that_nothing_reads():
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) '
        "<float[1] unread = {2.0}, float[1] read = {2.0}> { y = Mul(x, read) }"
    )
    small = slim.slim(proto)
    onnx.checker.check_model(small)
    [constant] = small.graph.initializer
    assert constant.name in small.graph.node[0].input


def test_slim_gives_short_names_that_other_constants_had():
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) '
        "<float[1] a = {3.0}, float[1] b = {2.0}> { sum = Add(x, b) y = Mul(sum, a) }"
    )
    small = slim.slim(proto)
    sample = np.ones(1, np.float32)
    assert open_runner(small.SerializeToString())(sample)[0].tolist() == [9.0]


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(
    ("product", "sizes"), [("wide, matrices", (4, 4, 3)), ("matrices, wide", (3, 4))]
)
def test_product_without_a_channel_axis_has_one_scale(
    shapes_model, tmp_path, product, sizes, dtype
):
    """With scales by channel, ONNX Runtime wrote a file that it could not run."""
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 2, 4, 4] x) => (float[N, 4, K, M] y)
        {{ wide = Conv(x, kernels)  y = MatMul({product}) }}"""
    )
    random = np.random.default_rng(0)
    for name, shape in {"kernels": (4, 2, 1, 1), "matrices": sizes}.items():
        values = random.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    for node in proto.graph.node:
        node.name = node.op_type
    onnx.save(proto, tmp_path / "network.onnx")
    samples = random.normal(size=(20, 2, 4, 4)).astype(np.float32)
    [expected] = open_runner(proto.SerializeToString())(samples)
    words = ("data=shapes", "per_channel=true", "reduce_range=true", f"dtype={dtype}")
    quantizer = quantizer_of(make_config(*words))
    network = replace(shapes_model, onnx_path=tmp_path / "network.onnx")
    artifact = quantize_network(quantizer, network, Split(samples, None, "made"), tmp_path)
    [got] = quantizer.load(artifact.path, THREADS).predict(samples)
    assert artifact.quantized_layers == 2
    assert 0 < np.abs(got - expected).max() < 0.03 * np.abs(expected).max()


def test_a_file_that_onnx_runtime_cannot_run_is_unsupported(shapes_model, tmp_path):
    """ONNX Runtime 1.31 moves Transposes over a Resize of some axes, and refuses its own graph."""
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
        network (float[N, 2, 4, 4] x) => (float[N, 2, 2, 2] y) <int64[2] sizes = {3, 3}> {
            wide = Conv(x, w)  small = Resize<mode = "linear", axes = [2, 3]>(wide, , , sizes)
            y = Conv(small, v)
        }"""
    )
    random = np.random.default_rng(0)
    for name, shape in {"w": (2, 2, 1, 1), "v": (2, 2, 2, 2)}.items():
        values = random.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    for index, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}{index}"
    onnx.save(proto, tmp_path / "network.onnx")
    samples = Split(random.normal(size=(8, 2, 4, 4)).astype(np.float32), None, "made")
    quantizer = quantizer_of(make_config("data=shapes"))
    network = replace(shapes_model, onnx_path=tmp_path / "network.onnx")
    artifact = quantize_network(quantizer, network, samples, tmp_path)
    with pytest.raises(UnsupportedError, match=r"cannot run its quantized file .*Resize"):
        quantizer.verify(artifact, network, samples)


def test_nodes_with_infinite_values_stay_in_float(shapes_model, tmp_path):
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 2, 4, 4] x) => (float[N, 2, 4, 4] y) <float least = {-4}> {
            wide = Conv(x, w)  some = Relu(wide)  low = Log(some)  cut = Max(low, least)
            y = Conv(cut, v)
        }"""
    )
    random = np.random.default_rng(0)
    for name in ("w", "v"):
        values = random.normal(size=(2, 2, 1, 1)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    for node in proto.graph.node:
        node.name = node.output[0]
    onnx.save(proto, tmp_path / "network.onnx")
    samples = Split(random.normal(size=(40, 2, 4, 4)).astype(np.float32), None, "made")
    quantizer = quantizer_of(make_config("data=shapes", "reduce_range=true"))
    network = replace(shapes_model, onnx_path=tmp_path / "network.onnx")
    artifact = quantize_network(quantizer, network, samples, tmp_path)
    assert artifact.quantized_layers == 2
    assert artifact.ranges.keys() == {"x", "wide", "some", "cut", "y"}
    batch = samples.stored[:]
    [expected], [got] = open_runner(proto)(batch), quantizer.load(artifact.path, 1).predict(batch)
    assert np.corrcoef(expected.ravel(), got.ravel())[0, 1] > 0.99


SETTINGS = [
    ("per_channel=true", "float_output=true"),
    ("float_output=true", "slim=true"),
    ("format=qoperator", "slim=true"),
    ("method=dynamic", "slim=true"),
    ("dtype=w8a16", "float_output=true", "slim=true"),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", SETTINGS, ids=" ".join)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traits=passes.TRAITS)
def test_quantized_file_has_every_output(shapes_model, words, traits):
    """Outputs with another reader, and tensors that inner graphs read, keep their values."""
    network = passes.prepare(replace(traits, constant_output=False))
    narrow = () if "dtype=w8a16" in words else ("reduce_range=true",)
    quantizer = quantizer_of(make_config("data=shapes", *words, *narrow))
    samples = Split(passes.SAMPLES, None, "made")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.onnx")
        onnx.save(network, path)
        model = replace(shapes_model, onnx_path=path)
        artifact = quantize_network(quantizer, model, samples, Path(folder))
        quantizer.verify(artifact, model, samples)
        onnx.checker.check_model(onnx.load(artifact.path), full_check=True)
        got = quantizer.load(artifact.path, THREADS).predict(passes.SAMPLES)
    expected = open_runner(network)(passes.SAMPLES)
    for value, one, other in zip(network.graph.output, expected, got, strict=True):
        assert np.abs(one - other).max() < 0.3 * np.abs(one).max(), value.name


def test_invalid_file_is_a_failure_of_the_quantizer(quantize, shapes, shapes_model, tmp_path):
    cell = quantize("data=shapes")
    proto = onnx.load(cell.artifact.path)
    proto.graph.node[-1].input[0] = "nowhere"
    onnx.save(proto, tmp_path / "model.onnx")
    broken = replace(cell.artifact, path=tmp_path / "model.onnx")
    samples = draw_calibration(shapes, 1, 0).split
    with pytest.raises(QuantizationError, match=r"invalid file .*nowhere"):
        quantizer_of(cell.config).verify(broken, shapes_model, samples)


@pytest.mark.parametrize("group", [1, 4])
def test_grouped_transposed_convolution_has_one_scale(shapes_model, tmp_path, group):
    random = np.random.default_rng(0)
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 8, 4, 4] x) => (float[N, 3, 8, 8] y) {{
            [up] wide = ConvTranspose<strides = [2, 2], group = {group}>(x, w, b)
            [last] y = Conv(wide, v)
        }}"""
    )
    for name, shape in {"w": (8, 8 // group, 2, 2), "b": (8,), "v": (3, 8, 1, 1)}.items():
        values = random.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(proto, tmp_path / "network.onnx")
    samples = random.normal(size=(20, 8, 4, 4)).astype(np.float32)
    quantizer = quantizer_of(make_config("data=shapes", "per_channel=true", "reduce_range=true"))
    network = replace(shapes_model, onnx_path=tmp_path / "network.onnx")
    artifact = quantize_network(quantizer, network, Split(samples, None, "made"), tmp_path)
    [expected], [got] = (
        open_runner(proto)(samples),
        quantizer.load(artifact.path, THREADS).predict(samples),
    )
    scales = {t.name: t.dims for t in onnx.load(artifact.path).graph.initializer}
    assert list(scales["w_scale"]) == ([8] if group == 1 else [])
    assert 0 < np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_a_softmax_in_float64_stays_in_float(shapes_model, tmp_path, form):
    random = np.random.default_rng(0)
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 3] x) => (float[N, 2] y) {
            [first] logits = MatMul(x, w)  [wide] precise = Cast<to = 11>(logits)
            [softmax] shares = Softmax(precise)  [narrow] kept = Cast<to = 1>(shares)
            [last] y = MatMul(kept, v)
        }"""
    )
    for name, shape in {"w": (3, 4), "v": (4, 2)}.items():
        values = random.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(proto, tmp_path / "network.onnx")
    samples = random.normal(size=(20, 3)).astype(np.float32)
    quantizer = quantizer_of(make_config("data=shapes", f"format={form}", "attention=all"))
    network = replace(shapes_model, onnx_path=tmp_path / "network.onnx")
    artifact = quantize_network(quantizer, network, Split(samples, None, "made"), tmp_path)
    [got] = quantizer.load(artifact.path, THREADS).predict(samples)
    [expected] = open_runner(proto)(samples)
    assert 0 < np.abs(got - expected).max() < 0.1


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_a_transposed_convolution_may_be_the_last_layer(shapes_model, tmp_path, form):
    """A segmenter's decoder ends in one, behind the Relu of the layer before it."""
    random = np.random.default_rng(0)
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 3, 4, 4] x) => (float[N, 2, 8, 8] y) {
            [first] wide = Conv(x, v)  [relu] kept = Relu(wide)
            [last] up = ConvTranspose<strides = [2, 2]>(kept, w)  [mask] y = Sigmoid(up)
        }"""
    )
    for name, shape in {"v": (8, 3, 1, 1), "w": (8, 2, 2, 2)}.items():
        values = random.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(proto, tmp_path / "network.onnx")
    samples = random.normal(size=(20, 3, 4, 4)).astype(np.float32)
    words = ("data=shapes", "per_channel=true", "float_output=true", f"format={form}")
    quantizer = quantizer_of(make_config(*words, "dtype=u8s8", "reduce_range=true"))
    network = replace(shapes_model, onnx_path=tmp_path / "network.onnx")
    artifact = quantize_network(quantizer, network, Split(samples, None, "made"), tmp_path)
    [got] = quantizer.load(artifact.path, THREADS).predict(samples)
    [expected] = open_runner(proto)(samples)
    assert 0 < np.abs(got - expected).max() < 0.1
    assert len(np.unique(got)) > 256
    assert onnx.load(artifact.path).graph.node[-1].op_type == "Sigmoid"
    scales = {tensor.name for tensor in onnx.load(artifact.path).graph.initializer}
    assert ("w_scale" in scales) == (form == "qdq")


@pytest.mark.parametrize("words", [("format=qoperator",), ("backend=torch",)], ids=" ".join)
def test_products_of_several_matrices_alone_are_unsupported(shapes_model, tmp_path, words):
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 4, 3, 5] x) => (float[N, 4, 3, 2] y) { [product] y = MatMul(x, w) }"""
    )
    random = np.random.default_rng(0)
    values = random.normal(size=(4, 5, 2)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(values, "w"))
    onnx.save(proto, tmp_path / "network.onnx")
    samples = Split(random.normal(size=(8, 4, 3, 5)).astype(np.float32), None, "made")
    quantizer = quantizer_of(make_config("data=shapes", "per_channel=true", *words))
    network = replace(shapes_model, onnx_path=tmp_path / "network.onnx")
    with pytest.raises(UnsupportedError, match="product"):
        quantize_network(quantizer, network, samples, tmp_path)
