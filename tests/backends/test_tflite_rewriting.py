"""Weights, biases and ranges of our own in the converter's file, and slim files."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from ai_edge_litert.schema_py_generated import TensorType
from numpy.typing import NDArray

from resnet8ptq.backends.contract import check_same
from resnet8ptq.backends.tflite import contents, predictor, rewriting, slim
from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.core import isolation
from resnet8ptq.core.errors import ConfigError, QuantizationError, UnsupportedError
from resnet8ptq.corrections import layers as correcting
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.graph import weights as graph_weights
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models import model
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.plan import Plan
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of, runtime_of
from tests.helpers.quantized import Quantize

ConvertedBy = Callable[[bool], bytes]
INT8 = Plan(WeightScheme("int8", per_channel=True))
INT4 = Plan(WeightScheme("int4", per_channel=True))


@pytest.fixture
def converted(quantize: Quantize) -> ConvertedBy:
    """Return the converter's own file, with scales per channel or per tensor."""

    def content(per_channel: bool) -> bytes:
        cell = quantize("backend=tflite", f"per_channel={str(per_channel).lower()}")
        return cell.artifact.path.read_bytes()

    return content


@pytest.fixture
def graph(shapes_model: Fp32Model) -> onnx.GraphProto:
    return onnx.load(shapes_model.onnx_path).graph


@pytest.fixture(scope="module")
def calibration(shapes: Dataset) -> Split:
    return draw_calibration(shapes, 20, 42).split


@pytest.fixture(scope="module")
def ranges(shapes_model: Fp32Model, calibration: Split) -> dict[str, Range]:
    return find_ranges(shapes_model.onnx_path, calibration)


def find_ranges(path: Path, calibration: Split) -> dict[str, Range]:
    config = make_config("data=shapes")
    return Activations(path, calibration, config.calib, runtime_of(config)).find_around([])


def changed(graph: onnx.GraphProto) -> onnx.GraphProto:
    """Return a graph with other weights and biases, as corrections make it."""
    graph, random = copy.deepcopy(graph), np.random.default_rng(0)
    for node in weight_layers(graph).values():
        weights = graph_weights.read_weights(graph, node)
        factor = random.uniform(0.5, 1.5, weights.shape).astype(np.float32)
        graph_weights.write_weights(graph, node, weights * factor)
        if node.op_type != "MatMul":
            bias = graph_weights.read_bias(graph, node)
            graph_weights.write_bias(graph, node, bias + random.normal(0, 0.1, bias.shape))
    return graph


def run(content: bytes, batch: NDArray[np.float32]) -> NDArray[np.float32]:
    return predictor.open_run(content, THREADS)(batch)[0]


def run_without_xnnpack(content: bytes, batch: NDArray[np.float32]) -> NDArray[np.float32]:
    """Run on LiteRT's own kernels, which are those that take 4-bit weights."""
    own = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(model_content=content, experimental_op_resolver_type=own)
    interpreter.allocate_tensors()
    return predictor.LoadedFile(interpreter, predictor.read_output)(batch)[0]


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_uncorrected_network_comes_back_as_the_converter_made_it(
    converted, graph, shapes, per_channel
):
    content = converted(per_channel)
    before = contents.read_model(content)
    names = rewriting.match_layers(before, graph)
    tensors = before.subgraphs[0].tensors
    theirs = {}  # the converter's own ranges, by ONNX name
    for index, name in rewriting._name_activations(before, names, graph).items():
        quantization = tensors[index].quantization
        scale, zero_point = float(quantization.scale[0]), int(quantization.zeroPoint[0])
        theirs[name] = (scale * (-128 - zero_point), scale * (127 - zero_point))
    plan = Plan(WeightScheme("int8", per_channel))
    written = rewriting.write_corrected(content, graph, graph, plan, theirs)
    pairs = zip(contents.layers(before), contents.layers(contents.read_model(written)), strict=True)
    for was, layer in pairs:
        # The two formats are folded by different programs, in another order of float32.
        np.testing.assert_allclose(
            layer.weights.quantization.scale, was.weights.quantization.scale, rtol=1e-5
        )
        for tensors in ((was.weights, layer.weights), (was.bias, layer.bias)):
            old = contents.read_levels(before, tensors[0])
            new = contents.read_levels(contents.read_model(written), tensors[1])
            assert (old != new).mean() < 0.02
            assert np.abs(old - new).max() <= max(1, 1e-4 * np.abs(old).max())
    [batch] = shapes.test.take(np.arange(200)).batches(200)
    np.testing.assert_allclose(run(written, batch), run(content, batch), atol=4 / 256)


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_file_holds_the_levels_of_the_corrected_network(converted, graph, ranges, per_channel):
    other = changed(graph)
    nodes = weight_layers(other)
    first, second, third, *_ = nodes
    plan = Plan(WeightScheme("int8", per_channel), {first: 4, second: 2, third: 3})
    content = converted(per_channel)
    written = rewriting.write_corrected(content, graph, other, plan, ranges)
    read = contents.read_model(written)
    names = rewriting.match_layers(contents.read_model(content), graph)
    for layer, name in zip(contents.layers(read), names, strict=True):
        narrow = name in plan.bits
        assert layer.weights.type == (TensorType.INT4 if narrow else TensorType.INT8)
        assert len(read.buffers[layer.weights.buffer].data) == (
            -(-np.prod(layer.weights.shape) // 2) if narrow else np.prod(layer.weights.shape)
        )
        weights = graph_weights.read_weights(other, nodes[name])
        rounded = plan.scheme(name).grid(weights, 0).round(weights)
        # OIHW to OHWI
        np.testing.assert_allclose(
            contents.read_values(read, layer.weights), np.moveaxis(rounded, 1, -1), rtol=1e-6
        )
        step = contents.scales(layer.bias)
        np.testing.assert_allclose(
            step, contents.scales(layer.input).item() * layer.weights.quantization.scale, rtol=1e-6
        )
        bias = graph_weights.read_bias(other, nodes[name])
        assert np.all(np.abs(contents.read_values(read, layer.bias) - bias) <= 0.51 * step)


def test_two_4_bit_weights_lie_in_a_byte_the_first_in_the_low_half():
    made = contents.read_levels, contents.write_levels
    tensor = empty_tensor([1, 5])
    holder = type("Model", (), {"buffers": []})()
    levels = np.array([[1, -2, -8, 7, -1]])
    made[1](holder, tensor, levels, np.ones(1, np.float32))
    assert holder.buffers[0].data.tolist() == [0xE1, 0x78, 0x0F]
    np.testing.assert_array_equal(made[0](holder, tensor), levels)


def empty_tensor(shape: list[int]) -> object:
    quantization = type("Quantization", (), {})()
    values = {"type": TensorType.INT4, "shape": shape, "quantization": quantization}
    return type("Tensor", (), values)()


def test_activations_have_the_true_ranges(converted, graph, ranges):
    content = converted(True)
    read = contents.read_model(rewriting.write_corrected(content, graph, graph, INT8, ranges))
    tensors, seen, ratios = read.subgraphs[0].tensors, [], []
    theirs = contents.read_model(content).subgraphs[0].tensors
    names = rewriting.match_layers(read, graph)
    for index, name in rewriting._name_activations(read, names, graph).items():
        if "Reshape" in name:  # of the pooled sum, whose range it keeps
            continue
        quantization = tensors[index].quantization
        low, high = ranges[name]
        low, high = min(low, 0), max(high, 0)
        scale, zero_point = float(quantization.scale[0]), int(quantization.zeroPoint[0])
        assert scale == pytest.approx((high - low) / 255)
        assert scale * (-128 - zero_point) == pytest.approx(low, abs=0.51 * scale)
        seen.append(name)
        ratios.append(scale / float(theirs[index].quantization.scale[0]))
    # The converter finds the same but for the sums' first inputs, whose ranges it makes too wide.
    assert max(ratios) < 1.001
    assert sum(ratio > 0.999 for ratio in ratios) >= 11
    assert len(seen) == 14  # the input, nine convolutions, three sums, the dense layer
    for code, operator in contents.operators(read):
        if code == "RESHAPE":
            kept = [tensors[i].quantization for i in (operator.inputs[0], operator.outputs[0])]
            assert kept[0].scale == kept[1].scale
    output = tensors[read.subgraphs[0].outputs[0]].quantization
    assert (output.scale[0], output.zeroPoint[0]) == (1 / 256, -128)


def find_pool(content: bytes, graph: onnx.GraphProto) -> tuple[str, float, str]:
    """Return what pools the last maps, the scale of its output, and its ONNX name."""
    (name,) = [n.output[0] for n in graph.node if n.op_type == "AveragePool"]
    read = contents.read_model(content)
    ((code, operator),) = [
        result for result in contents.operators(read) if result[0] in ("AVERAGE_POOL_2D", "MEAN")
    ]
    made = read.subgraphs[0].tensors[operator.outputs[0]]
    assert list(made.shape) == [1, 1, 1, 64]
    return code, float(made.quantization.scale[0]), name


def test_a_pool_over_whole_maps_has_a_range_of_its_own(converted, shapes_model, ranges, shapes):
    proto = onnx.load(shapes_model.onnx_path)
    graph = proto.graph
    content = converted(True)
    code, shared, name = find_pool(content, graph)
    assert code == "AVERAGE_POOL_2D"
    free = rewriting.write_corrected(content, graph, graph, INT8, ranges)
    low, high = ranges[name]
    assert find_pool(free, graph)[:2] == ("MEAN", pytest.approx((high - min(low, 0)) / 255))
    assert find_pool(free, graph)[1] < 0.7 * shared
    # Where its range is not known, it stays a pool with that of its input.
    others = {key: result for key, result in ranges.items() if key != name}
    kept = rewriting.write_corrected(content, graph, graph, INT8, others)
    assert find_pool(kept, graph)[0] == "AVERAGE_POOL_2D"
    [batch] = shapes.test.take(np.arange(200)).batches(200)
    [exact] = open_runner(proto, THREADS)(batch)
    errors = [np.square(run(item, batch) - exact).mean() for item in (free, kept)]
    assert errors[0] < errors[1]


def test_a_pool_over_parts_of_maps_stays(converted):
    read = contents.read_model(converted(True))
    operators = contents.operators(read)
    ((_, pool),) = [pair for pair in operators if pair[0] == "AVERAGE_POOL_2D"]
    pool.builtinOptions.filterWidth -= 1
    rewriting.pools_to_means(read)
    assert "MEAN" not in dict(contents.operators(read))
    pool.builtinOptions.filterWidth += 1
    rewriting.pools_to_means(read)
    assert dict(contents.operators(read))["MEAN"] is pool


def test_4_bit_weights_predict_as_simulated(quantize, shapes_model, shapes):
    cell = quantize("backend=tflite", "dtype=w4a8", "per_channel=true")
    assert quantizer_of(cell.config).resolve().weight_dtype == "int4"
    assert quantizer_of(cell.config).resolve().execution == "integer"
    assert cell.artifact.quantized_layers == 10
    simulated = onnx.load(shapes_model.onnx_path)
    for node in weight_layers(simulated.graph).values():
        correcting.round_weights(simulated.graph, node, INT4.default)
    [batch] = shapes.test.take(np.arange(500)).batches(500)
    float_activations = open_runner(simulated, THREADS)(batch)[0]
    outputs = cell.predict()
    assert (outputs.argmax(1) == float_activations.argmax(1)).mean() > 0.96
    labels = shapes.test.labels[:500]
    right, expected = ((p.argmax(1) == labels).mean() for p in (outputs, float_activations))
    assert right == pytest.approx(expected, abs=0.02)


def save_small_network(path: Path) -> None:
    """Write what ResNet8 has not: depthwise layers, ReLU6, a flattened image, no biases, zeros."""
    import keras

    keras.utils.set_random_seed(1)
    taken = keras.Input((32, 32, 3))
    tensor = keras.layers.Conv2D(7, 3, strides=2, padding="same", activation="relu")(taken)
    tensor = keras.layers.DepthwiseConv2D(3, strides=2, use_bias=False)(tensor)
    tensor = keras.layers.ReLU(6.0)(keras.layers.BatchNormalization(epsilon=2e4)(tensor))
    branch = keras.layers.SeparableConv2D(7, 3, padding="same")(tensor)
    tensor = keras.layers.MaxPooling2D(2)(keras.layers.Add()([tensor, branch]))
    tensor = keras.layers.Flatten()(tensor)
    tensor = keras.layers.Dense(11, use_bias=False, activation="relu")(tensor)
    tensor = keras.layers.Dense(10, activation="softmax", bias_initializer="normal")(tensor)
    network = keras.Model(taken, tensor)
    kernel, bias = network.layers[1].get_weights()
    kernel[..., 0], bias[0] = 0, 0.5
    network.layers[1].set_weights([kernel, bias])
    network.save(path)


@pytest.fixture(scope="module")
def small(
    tmp_path_factory: pytest.TempPathFactory, shapes: Dataset, cache_root: Path, calibration: Split
) -> tuple[Fp32Model, bytes]:
    folder = tmp_path_factory.mktemp("small")
    path = folder / "small.h5"
    isolation.call(save_small_network, path, crashed=QuantizationError("crashed"))
    config = make_config("data=shapes", "backend=tflite", "per_channel=true", f"model.path={path}")
    network = model.load_network(config.model, shapes, cache_root)
    made = quantize_network(quantizer_of(config), network, calibration, folder)
    return network, made.path.read_bytes()


@pytest.mark.slow
def test_layers_of_every_kind_are_matched_and_run_in_4_bits(small, shapes, calibration):
    network, content = small
    graph = onnx.load(network.onnx_path).graph
    ranges = find_ranges(network.onnx_path, calibration)
    written = rewriting.write_corrected(content, graph, graph, INT4, ranges)
    read = contents.read_model(written)
    codes = [layer.code for layer in contents.layers(read)]
    assert codes == [
        *("CONV_2D", "DEPTHWISE_CONV_2D", "DEPTHWISE_CONV_2D", "CONV_2D"),
        *("FULLY_CONNECTED", "FULLY_CONNECTED"),
    ]
    assert {layer.weights.type for layer in contents.layers(read)} == {TensorType.INT4}
    # The same levels in 8 bits give the same bits.
    for layer in contents.layers(read):
        levels, scale = contents.read_levels(read, layer.weights), layer.weights.quantization.scale
        layer.weights.type = TensorType.INT8
        contents.write_levels(read, layer.weights, levels, scale)
    [batch] = shapes.test.take(np.arange(50)).batches(50)
    result = run_without_xnnpack(written, batch)
    np.testing.assert_array_equal(result, run_without_xnnpack(contents.write_model(read), batch))
    assert len(np.unique(result, axis=0)) > 10
    simulated = onnx.load(network.onnx_path)
    for node in weight_layers(simulated.graph).values():
        correcting.round_weights(simulated.graph, node, INT4.default)
    np.testing.assert_allclose(result, open_runner(simulated, THREADS)(batch)[0], atol=0.1)


def test_the_quantizer_writes_the_corrected_network(shapes_model, calibration, tmp_path):
    proto = onnx.load(shapes_model.onnx_path)
    proto.graph.CopyFrom(changed(proto.graph))
    path = tmp_path / "corrected.onnx"
    onnx.save(proto, path)
    network = shapes_model.with_weights_of(path)
    assert network.uncorrected == shapes_model.onnx_path
    assert network.with_weights_of(path).uncorrected == shapes_model.onnx_path
    config = make_config("data=shapes", "backend=tflite", "per_channel=true")
    made = quantize_network(quantizer_of(config), network, calibration, tmp_path)
    read = contents.read_model(made.path.read_bytes())
    node = next(iter(weight_layers(proto.graph).values()))
    weights = graph_weights.read_weights(proto.graph, node)
    rounded = INT8.default.grid(weights, 0).round(weights)
    first = next(contents.layers(read))
    np.testing.assert_allclose(
        contents.read_values(read, first.weights), np.moveaxis(rounded, 1, -1), rtol=1e-6
    )
    # Its ranges are its own: the converter has never seen it.
    output = node.output[0].replace("batch_normalization_1/batchnorm/add_1", "activation_1/Relu")
    high = find_ranges(path, calibration)[output][1]
    assert first.output.quantization.scale[0] == pytest.approx(high / 255)


def test_given_ranges_win(shapes_model, ranges, calibration, tmp_path):
    config = make_config("data=shapes", "backend=tflite", "per_channel=true")
    doubled = {name: (2 * low, 2 * high) for name, (low, high) in ranges.items()}
    made = quantize_network(quantizer_of(config), shapes_model, calibration, tmp_path, doubled)
    first = next(contents.layers(contents.read_model(made.path.read_bytes())))
    assert first.input.quantization.scale[0] == 2


@pytest.mark.slow
def test_floats_in_and_out_leave_the_levels_as_they_are(quantize, shapes):
    settings = ("backend=tflite", "dtype=w4a8", "per_channel=true")
    integers, floats = quantize(*settings), quantize(*settings, "backend.integer_io=false")
    read = contents.read_model(floats.artifact.path.read_bytes())
    ends = (*read.subgraphs[0].inputs, *read.subgraphs[0].outputs)
    assert {read.subgraphs[0].tensors[i].type for i in ends} == {TensorType.FLOAT32}
    np.testing.assert_array_equal(floats.predict(), integers.predict())


def test_a_channel_of_zeros_and_one_of_tiny_weights_keep_their_biases(converted, graph, ranges):
    other = copy.deepcopy(graph)
    node = next(iter(weight_layers(other).values()))
    weights, bias = graph_weights.read_weights(other, node), graph_weights.read_bias(other, node)
    weights[0], weights[1] = 0, 1e-12
    bias[:2] = 1.5
    graph_weights.write_weights(other, node, weights)
    graph_weights.write_bias(other, node, bias)
    read = contents.read_model(
        rewriting.write_corrected(converted(True), graph, other, INT8, ranges)
    )
    layer = next(contents.layers(read))
    values = contents.read_values(read, layer.bias)
    np.testing.assert_allclose(values[:2], 1.5, atol=contents.scales(layer.bias).max() / 2)
    assert np.abs(contents.read_levels(read, layer.bias)).max() < 2**31
    assert not contents.read_levels(read, layer.weights)[0].any()


def with_product(graph: onnx.GraphProto) -> onnx.GraphProto:
    """Return a copy that computes its last Gemm by a MatMul and an Add, as for three axes."""
    graph = copy.deepcopy(graph)
    gemm = list(weight_layers(graph).values())[-1]
    values = np.ascontiguousarray(graph_weights.read_weights(graph, gemm).T)
    graph.initializer.append(onnx.numpy_helper.from_array(values, "matrix"))
    product = onnx.helper.make_node("MatMul", [gemm.input[0], "matrix"], ["product"], gemm.name)
    add = onnx.helper.make_node("Add", ["product", gemm.input[2]], [*gemm.output], "add_bias")
    others = list(graph.node)
    position = others.index(gemm)
    del graph.node[:]
    graph.node.extend([*others[:position], product, add, *others[position + 1 :]])
    return graph


def test_the_bias_after_a_product_is_written_and_counts_in_its_range(converted, graph, ranges):
    fp32 = with_product(graph)
    corrected = copy.deepcopy(fp32)
    add = next(node for node in corrected.node if node.name == "add_bias")
    bias = graph_weights.read_initializer(corrected, add.input[1]) + 3
    graph_weights.write_input(corrected, add, 1, bias)
    wide = {**ranges, "product": (-1.0, 1.0), add.output[0]: (-1.0, 7.0)}
    written = rewriting.write_corrected(converted(True), fp32, corrected, INT8, wide)
    read = contents.read_model(written)
    last = list(contents.layers(read))[-1]
    step = contents.scales(last.bias).max()
    np.testing.assert_allclose(contents.read_values(read, last.bias), bias, atol=step)
    assert last.output.quantization.scale[0] == pytest.approx(8 / 255)


def test_a_bias_after_a_product_that_differs_from_the_file_is_unsupported(converted, graph, ranges):
    other = with_product(graph)
    add = next(node for node in other.node if node.name == "add_bias")
    bias = graph_weights.read_initializer(other, add.input[1]) + 3
    graph_weights.write_input(other, add, 1, bias)
    with pytest.raises(UnsupportedError, match="its bias is not that of"):
        rewriting.write_corrected(converted(True), other, other, INT8, ranges)


def test_another_network_is_unsupported_and_the_layer_named(converted, graph, ranges):
    other = changed(graph)
    with pytest.raises(
        UnsupportedError, match=r"CONV_2D .*Relu.*: no layer of .*try backend.flow=onnx2tf"
    ):
        rewriting.write_corrected(converted(True), other, other, INT8, ranges)
    shifted = copy.deepcopy(graph)
    name, node = next(iter(weight_layers(shifted).items()))
    graph_weights.write_bias(shifted, node, graph_weights.read_bias(shifted, node) + 1)
    with pytest.raises(UnsupportedError, match=f"its bias is not that of {name}"):
        rewriting.write_corrected(converted(True), shifted, shifted, INT8, ranges)


def test_an_activation_without_a_range_is_unsupported(converted, graph, ranges):
    missing = next(name for name in ranges if "add" in name and "Add" in name)
    with_relu = next(node.output[0] for node in graph.node if missing in node.input)
    left = {name: result for name, result in ranges.items() if name != with_relu}
    with pytest.raises(UnsupportedError, match=r"add_1/Add.*: the ONNX graph has no such"):
        rewriting.write_corrected(converted(True), graph, graph, INT8, left)


def test_a_layer_that_the_plan_misspells_is_an_error(converted, graph, ranges):
    plan = replace(INT8, bits={"conv9": 4})
    with pytest.raises(ConfigError, match=r"precision\.plan: got 'conv9'"):
        rewriting.write_corrected(converted(True), graph, graph, plan, ranges)


def test_what_is_written_is_read_back(converted, graph, ranges):
    content = converted(True)
    read = contents.read_model(content)
    names = rewriting.match_layers(read, graph)
    held = {
        name: rewriting.Rounded(
            contents.read_levels(read, layer.weights),
            layer.weights.quantization.scale,
            contents.read_levels(read, layer.bias),
            layer.bias.quantization.scale,
        )
        for name, layer in zip(names, contents.layers(read), strict=True)
    }
    rewriting.check(content, held)
    last = names[-1]
    held[last] = replace(held[last], weights=held[last].weights + 1)
    with pytest.raises(
        QuantizationError, match=f"{last}: the file does not hold the chosen levels"
    ):
        rewriting.check(content, held)


@pytest.mark.parametrize("dtype", ["int8", "w4a8"])
def test_a_slim_file_predicts_the_same_bits(quantize, shapes, dtype):
    settings = ("backend=tflite", f"dtype={dtype}", "per_channel=true")
    whole, small = quantize(*settings), quantize(*settings, "slim=true")
    assert small.artifact.size_bytes < whole.artifact.size_bytes - 10_000
    assert small.artifact.ranges == whole.artifact.ranges
    np.testing.assert_array_equal(small.predict(), whole.predict())
    read = contents.read_model(small.artifact.path.read_bytes())
    graph = read.subgraphs[0]
    named = {index for index, tensor in enumerate(graph.tensors) if tensor.name}
    assert named == {*graph.inputs, *graph.outputs}
    assert (read.description, read.metadata) == (None, None)
    interpreter = Interpreter(model_content=small.artifact.path.read_bytes())
    assert list(interpreter.get_signature_list()) == ["serving_default"]


def test_the_data_of_buffers_is_aligned(converted):
    content = slim.slim(converted(True))
    read = contents.read_model(content)
    for buffer in read.buffers[1:]:
        data = bytes(buffer.data)
        if len(data) >= 64:  # long enough to be there once
            assert content.index(data) % 16 == 0


def test_a_file_that_predicts_differently_is_not_taken(converted, shapes):
    whole, other = (predictor.open_run(converted(item), THREADS) for item in (True, False))
    batches = list(shapes.test.take(np.arange(100)).batches(50))
    check_same(whole, whole, batches)
    with pytest.raises(QuantizationError, match=r"^slim: .* predicts differently"):
        check_same(whole, other, batches)
