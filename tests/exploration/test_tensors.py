"""A comparison of tensors names the layer that was broken, and the kind of its fault."""

import copy
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from resnet8ptq.backends.file import onnx_file
from resnet8ptq.backends.file.contents import Inner
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.dataset import Split
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.exploration.search import network_facts, step_table
from resnet8ptq.exploration.tensors import (
    alignment,
    comparing,
    findings,
    network_picture,
    tensor_table,
)
from resnet8ptq.exploration.tensors.alignment import Fingerprint
from resnet8ptq.exploration.tensors.explaining import explain, find_least_db
from resnet8ptq.exploration.tensors.spread import Levels, Noise, Spread
from resnet8ptq.graph.session import open_runner
from resnet8ptq.sweeps.search import check_step
from tests.helpers.calling import call
from tests.helpers.configs import make_config

# Two parallel branches, which are equal in size, and a sum.
NETWORK = """
<ir_version: 8, opset_import: ["": 17]>
residual (float[n, 3, 12, 12] x) => (float[n, 5] y) {
    stem = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w0, b0)
    first = Relu(stem)
    left = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(first, w1, b1)
    right = Conv<kernel_shape = [1, 1]>(first, w2, b2)
    total = Add(left, right)
    second = Relu(total)
    mean = GlobalAveragePool(second)
    flat = Flatten(mean)
    y = Gemm(flat, w3, b3)
}
"""
SHAPES = {"w0": (8, 3, 3, 3), "w1": (8, 8, 3, 3), "w2": (8, 8, 1, 1), "w3": (8, 5)}
SAMPLES = np.random.default_rng(1).normal(size=(24, 3, 12, 12)).astype(np.float32)


def build(network: str = NETWORK) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(network)
    for name, shape in SHAPES.items():
        channels = shape[-1] if name == "w3" else shape[0]
        weights = random.normal(size=shape) / np.sqrt(np.prod(shape[1:]))
        biases = random.normal(size=channels)
        for key, values in ((name, weights), (f"b{name[1:]}", biases)):
            proto.graph.initializer.append(numpy_helper.from_array(np.float32(values), key))
    for node in proto.graph.node:
        node.name = f"node_{node.output[0]}"
    return proto


class _Reader(CalibrationDataReader):
    def __init__(self):
        self.batches = iter([{"x": SAMPLES[:16]}])

    def get_next(self):
        return next(self.batches, None)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The network, and its quantized file."""
    return quantize(tmp_path_factory.mktemp("tensors"), QuantFormat.QDQ)


def quantize(folder, file_format, network=NETWORK):
    fp32, quantized = folder / "fp32.onnx", folder / "int8.onnx"
    onnx.save(build(network), fp32)
    quantize_static(
        *(fp32, quantized, _Reader()),
        quant_format=file_format,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    return onnx.load(fp32), onnx.load(quantized)


def compare(fp32, quantized):
    tensors = onnx_file.open_tensors(quantized.SerializeToString(), 1)
    return comparing.compare_tensors(
        fp32, tensors.inner, lambda batch: tensors.run([batch]), Split(SAMPLES, None, "made"), 1
    )


def change(proto, name, function):
    """Change a constant of a file."""
    for tensor in proto.graph.initializer:
        if tensor.name == name:
            values = np.ascontiguousarray(function(numpy_helper.to_array(tensor)))
            tensor.CopyFrom(numpy_helper.from_array(values, name))
            return
    raise KeyError(name)


def input_of(proto, output, index):
    """Return the name of the constant behind the DequantizeLinear at an input of a layer."""
    makers = {name: node for node in proto.graph.node for name in node.output}
    dequantize = makers[makers[output].input[index]]
    return dequantize.input


def test_a_right_file_has_no_lost_tensor(files):
    compared = compare(*files)
    assert compared.first_lost is None
    assert {tensor.name for tensor in compared.tensors} >= {"x", "first", "left", "right", "second"}
    assert compared.costliest.own_db > 25
    assert findings.find_faults(compared) == []


def clip(proto):
    scale = next(n.input[1] for n in proto.graph.node
                 if n.op_type == "QuantizeLinear" and n.input[0] == "first")  # fmt: skip
    change(proto, scale, lambda values: values / np.float32(10))


def double_scale(proto):
    change(proto, input_of(proto, "left", 1)[1], lambda values: values * np.float32(2))


def zero_bias(proto):
    change(proto, input_of(proto, "right", 2)[0], np.zeros_like)


def swap_channels(proto):
    for name in input_of(proto, "left", 1):
        change(proto, name, lambda values: values[::-1])


FAULTS = [
    (clip, "first", step_table.CLIPPED),
    (double_scale, "left", step_table.WRONG_SCALE),
    (zero_bias, "right", step_table.WRONG_BIAS),
    (swap_channels, "left", step_table.CHANNEL_ORDER),
]


@pytest.mark.parametrize(("fault", "tensor", "name"), FAULTS)
@pytest.mark.parametrize("names", ["kept", "others"])
def test_a_fault_is_found_where_it_is(files, fault, tensor, name, names):
    fp32, quantized = files[0], copy.deepcopy(files[1])
    fault(quantized)
    if names == "others":
        rename(quantized)
    compared = compare(fp32, quantized)
    assert compared.costliest.name == tensor
    assert tensor in compared.describe()
    result = findings.find_faults(compared)
    assert [(one.name, one.tensors[0]) for one in result if tensor in one.tensors] == [
        (name, tensor)
    ]


@pytest.mark.parametrize("names", ["kept", "others"])
def test_another_bias_is_found_however_small_its_cost(files, names):
    quantized = copy.deepcopy(files[1])
    bias = input_of(quantized, "right", 2)[0]
    change(
        quantized,
        bias,
        lambda levels: np.where(np.arange(8) == 2, levels * 0.8, levels).astype("i4"),
    )
    if names == "others":
        rename(quantized)
    compared = compare(files[0], quantized)
    assert compared.costliest.own_db > comparing.SOUND_DB
    assert compared.faulty.name == "right" and "bias" in compared.describe()
    assert [(one.name, one.tensors) for one in findings.find_faults(compared)] == [
        (step_table.WRONG_BIAS, ("right",))
    ]


def test_tensors_keep_the_order_of_execution_where_a_fused_activation_comes_later(tmp_path):
    """A tensor with the name of a layer belongs to the Relu behind it if its range starts at 0."""
    late = NETWORK.replace("total = Add(left, right)", "bent = Relu(left) total = Add(bent, right)")
    fp32, quantized = quantize(tmp_path, QuantFormat.QDQ, late)
    for node in quantized.graph.node:
        for ports in (node.input, node.output):
            ports[:] = ["left" if name == "bent" else name for name in ports]
    names = [tensor.name for tensor in compare(fp32, quantized).tensors]
    assert names.index("right") < names.index("bent") < names.index("second")


def test_another_bias_of_an_integer_operator_is_found(tmp_path):
    fp32, quantized = quantize(tmp_path, QuantFormat.QOperator)
    assert findings.find_faults(compare(fp32, quantized)) == []
    [bias] = [n.input[8] for n in quantized.graph.node if n.name.startswith("node_right")]
    change(quantized, bias, lambda levels: np.where(np.arange(8) == 2, 0, levels).astype("i4"))
    [finding] = findings.find_faults(compare(fp32, quantized))
    assert (finding.name, finding.tensors) == (step_table.WRONG_BIAS, ("right",))


@pytest.mark.parametrize("per_channel", [True, False])
def test_the_weights_of_a_dynamic_file_are_compared(tmp_path, per_channel):
    fp32 = build()
    onnx.save(fp32, tmp_path / "fp32.onnx")
    quantize_dynamic(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", per_channel=per_channel)
    quantized = onnx.load(tmp_path / "int8.onnx")
    compared = compare(fp32, quantized)
    assert len(compared.weights) == 4
    assert min(weight.spread.sqnr_db for weight in compared.weights) > 30

    # A scale that makes the weights of one layer 3 times as large
    change(quantized, "w1_scale", lambda scale: scale * np.float32(3))
    compared = compare(fp32, quantized)
    assert compared.costliest.name == "left"
    assert "weights" in compared.describe() and "could not be compared" not in compared.describe()


def test_another_bias_of_a_dynamic_file_is_found(tmp_path):
    fp32 = build()
    onnx.save(fp32, tmp_path / "fp32.onnx")
    quantize_dynamic(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", per_channel=True)
    quantized = onnx.load(tmp_path / "int8.onnx")
    change(quantized, "b2", lambda bias: np.where(np.arange(8) == 2, 0, bias))
    [finding] = findings.find_faults(compare(fp32, quantized))
    assert (finding.name, finding.tensors) == (step_table.WRONG_BIAS, ("right",))


PRODUCTS = """
<ir_version: 8, opset_import: ["": 17]>
products (float[n, 3, 12, 12] x) => (float[n, 5] y) {
    flat = Flatten(x)
    left = MatMul(flat, w0)
    right = Gemm<transB = 1>(flat, w1, b1)
    total = Add(left, right)
    first = Relu(total)
    product = MatMul(first, w2)
    y = Add(product, b2)
}
"""


def build_products():
    random = np.random.default_rng(0)
    fp32 = onnx.parser.parse_model(PRODUCTS)
    shapes = {"w0": (432, 16), "w1": (16, 432), "b1": (16,), "w2": (16, 5), "b2": (5,)}
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32)
        fp32.graph.initializer.append(numpy_helper.from_array(values, name))
    for node in fp32.graph.node:
        node.name = f"node_{node.output[0]}"
    return fp32


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "least_db"), [(4, 17), (8, 40)])
def test_the_weights_of_blocks_are_compared(symmetric, bits, least_db):
    fp32 = build_products()
    quantizer = MatMulNBitsQuantizer(
        copy.deepcopy(fp32), block_size=32, is_symmetric=symmetric, bits=bits
    )
    quantizer.process()
    compared = compare(fp32, quantizer.model.model)
    assert [weight.rounded.dtype for weight in compared.weights] == [f"int{bits}"] * 2
    assert min(weight.spread.sqnr_db for weight in compared.weights) > least_db
    assert findings.find_faults(compared) == []


def test_the_weights_of_operators_that_a_runtime_fused_are_compared(tmp_path):
    fp32 = build_products()
    onnx.save(fp32, tmp_path / "fp32.onnx")
    quantize_dynamic(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", per_channel=True)

    # As ONNX Runtime saves the file that it has optimized
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(tmp_path / "int8.onnx", options)
    quantized = onnx.load(tmp_path / "fused.onnx")
    operators = {node.op_type for node in quantized.graph.node}
    assert operators >= {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
    compared = compare(fp32, quantized)
    assert len(compared.weights) == 3 and findings.find_faults(compared) == []
    assert min(weight.spread.sqnr_db for weight in compared.weights) > 30

    change(quantized, "b2", lambda bias: np.where(np.arange(5) == 2, 90, bias))
    [finding] = findings.find_faults(compare(fp32, quantized))
    assert (finding.name, finding.tensors) == (step_table.WRONG_BIAS, ("y",))


def test_weights_of_few_levels_are_no_other_weights():
    random = np.random.default_rng(0)
    weights = random.normal(size=(8, 64)).astype(np.float32)
    samples = random.normal(size=(50, 64)).astype(np.float32)
    step = np.abs(weights).max(axis=1, keepdims=True)
    rounded = np.rint(weights / step) * step

    def explain_weights(theirs, dtype):
        return explain(
            samples @ weights.T,
            samples @ theirs.T,
            None,
            weights=(weights, theirs),
            least_db=find_least_db(dtype),
        )

    of_matrix = np.abs(weights).max()  # most levels are 0
    coarse = np.rint(weights / of_matrix) * of_matrix
    assert explain_weights(coarse, "int2").kind == ""
    explanation = explain_weights(rounded, "int2")
    assert explanation.kind == "" and "rounded coarsely" in explanation.words
    assert explain_weights(rounded, "int8").kind == step_table.WRONG_WEIGHTS
    other = random.normal(size=(8, 64)).astype(np.float32)
    assert explain_weights(other, "int2").kind == step_table.WRONG_WEIGHTS


def test_a_layer_that_returns_nan_is_faulty(files):
    quantized = copy.deepcopy(files[1])
    scale = next(n.input[1] for n in quantized.graph.node
                 if n.op_type == "QuantizeLinear" and n.input[0] == "first")  # fmt: skip
    change(quantized, scale, lambda values: values * np.float32(np.nan))
    compared = compare(files[0], quantized)
    assert compared.costliest.name == "first" and "NaN" in compared.describe()


def test_a_corrected_bias_is_no_fault():
    """The rounded weights shift each channel by 0.1, and the file's bias takes it back."""
    exact = np.random.default_rng(0).normal(size=(4, 8, 12, 12)).astype(np.float32)
    noise = np.random.default_rng(1).normal(scale=0.01, size=exact.shape).astype(np.float32)
    biases = (np.zeros(8, np.float32), np.full(8, -0.1, np.float32))
    assert explain(exact, exact + noise, None, biases=biases).kind != step_table.WRONG_BIAS
    wrong = explain(exact, exact + noise - 0.1, None, biases=biases)
    assert wrong.kind == step_table.WRONG_BIAS and wrong.certain


def test_weights_that_are_not_known_are_not_blamed():
    """Rounding of weights, of a layer whose weights the file does not show."""
    exact = np.random.default_rng(0).normal(size=(4, 8, 12, 12)).astype(np.float32)
    noise = np.random.default_rng(1).normal(scale=0.2, size=exact.shape).astype(np.float32)
    explanation = explain(exact, exact + noise, None)
    assert explanation.kind == step_table.UNEXPLAINED
    assert "wrong" not in explanation.words and "could not be compared" in explanation.words


def rename(proto):
    """Give every tensor but the input another name."""
    for node in proto.graph.node:
        node.input[:] = [name if name in ("x", "") else f"t_{name}" for name in node.input]
        node.output[:] = [f"t_{name}" for name in node.output]
    for value in (*proto.graph.initializer, *proto.graph.output):
        value.name = f"t_{value.name}"
    del proto.graph.value_info[:]


def test_the_results_are_written(files, tmp_path):
    compared = compare(*files)
    weights = len(compared.weights)
    assert weights == 4
    assert len(tensor_table.to_csv(compared).splitlines()) == len(compared.tensors) + weights + 1
    document = tensor_table.to_document(compared, findings.find_faults(compared))
    assert document["costliest"] == compared.costliest.name
    tensor_table.save_figure(tmp_path / "tensors.png", compared, [], "title")


@pytest.fixture
def anomalies(tmp_path):
    """The words of a run on anomaly data whose training samples have no labels."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        coder (float[N, 6] x) => (float[N, 6] y)
        { a = Gemm(x, v)
          r = Relu(a)
          y = Gemm(r, w) }"""
    )
    random = np.random.default_rng(0)
    for name, shape in (("v", (6, 4)), ("w", (4, 6))):
        values = random.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(proto, tmp_path / "coder.onnx")
    samples = random.normal(size=(2, 40, 6)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x_train=samples[0], x_test=samples[1], y_test=[0, 1] * 20)
    words = (f"model.path={tmp_path / 'coder.onnx'}", f"data.root={tmp_path / 'a.npz'}")
    return (*words, "data=arrays", "task=anomaly")


@pytest.mark.parametrize(
    ("analysis", "printed"), [("compare", "3 tensors matched"), ("diagnose", "no single cause")]
)
def test_anomaly_data_need_no_labels_of_training_samples(analysis, printed, anomalies, tmp_path):
    done = call(tmp_path, *anomalies, f"+analysis={analysis}")
    assert done.code == 0, done.err
    assert printed in done.out
    assert "task=deviation compares the training samples" in done.err


def test_layers_are_not_chosen_by_samples_without_labels(anomalies, tmp_path):
    done = call(tmp_path, *anomalies, "+analysis=compare", "nodes_to_exclude=auto")
    assert done.code == 2 and "labels of the training samples" in done.errors[0]


def test_a_search_chooses_no_layers_by_samples_without_labels(anomalies):
    facts = network_facts.read_network_facts(resolve(make_config(*anomalies)))
    assert "labels of the training samples" in facts.untuned
    check_step(make_config(*anomalies, "+analysis=diagnose"), [], facts.untuned)
    with pytest.raises(ConfigError, match="labels of the training samples"):
        check_step(make_config(*anomalies, "nodes_to_exclude=auto"), [], facts.untuned)


def test_a_search_without_training_samples_chooses_no_layers(anomalies, monkeypatch):
    settings = resolve(make_config(*anomalies))
    data, network = network_facts.load_data_and_network(settings)
    empty = replace(data, train=data.train.take(np.arange(0)))
    monkeypatch.setattr(network_facts, "load_data_and_network", lambda _: (empty, network))
    assert network_facts.read_network_facts(settings).untuned == "a has no training samples"


def test_one_nan_does_not_hide_the_range_of_the_others():
    values = np.array([np.nan, -3, 2], np.float32)
    spread = Spread.of(values, values)
    assert (spread.low, spread.high) == (-3, 2)


def test_an_outlier_is_no_part_of_the_reach():
    values = np.array([0, *np.linspace(0.5, 0.9, 200), -100], np.float32)
    spread = Spread.of(values, np.round(values))
    assert (spread.low, spread.high, spread.peak, spread.reach) == (-100, values.max(), 100, 1)
    assert spread.peaks == 100
    assert spread.bulk_db < 20 < Noise(*(100**2, 1.0)).sqnr_db
    alone = Spread.of(np.ones(1, np.float32), np.ones(1, np.float32))
    assert (alone.reach, alone.peaks) == (0, 0)


@given(order=st.permutations(range(3)), seed=st.integers(0, 99))
def test_any_layout_is_undone(order, seed):
    values = np.random.default_rng(seed).normal(size=(1, 2, 3, 3)).astype(np.float32)
    other = values[0].transpose(order)[np.newaxis]
    axes = alignment.find_axes(values, other)
    assert np.array_equal(alignment.arrange(other, axes, values.shape), values)


@given(
    count=st.integers(1, 12),
    dropped=st.sets(st.integers(0, 11)),
    fault=st.integers(0, 12),
    seed=st.integers(0, 99),
)
def test_tensors_behind_a_fault_keep_their_order(count, dropped, fault, seed):
    """Pairs never cross, and tensors before the fault are matched to themselves."""
    random = np.random.default_rng(seed)
    made = [[random.normal(n, 1 + n, size=(1, 4, 5)).astype(np.float32)] for n in range(count)]
    fp32 = [Fingerprint.of(str(n), values) for n, values in enumerate(made)]
    kept = [n for n in range(count) if n not in dropped]
    noisy = [[v * (1 if n < fault else -3) for v in made[n]] for n in kept]
    other = [Fingerprint.of(f"t{n}", values) for n, values in zip(kept, noisy, strict=True)]
    nearness = lambda row, column: alignment.find_nearness(made[row][0], noisy[column][0])  # noqa: E731
    pairs = alignment.match(fp32, other, nearness)
    assert {(n, kept.index(n)) for n in kept if n < fault} <= {*pairs}
    assert len({column for _, column in pairs}) == len(pairs)


def test_the_file_runs_as_its_tensors_say(files):
    """The last tensor is the output of the file."""
    tensors = onnx_file.open_tensors(files[1].SerializeToString(), 1)
    output = open_runner(files[1], optimized=False)(SAMPLES[:2])[0]
    assert np.allclose(tensors.run([SAMPLES[:2]])[-1], output)


def test_the_picture_has_every_layer_and_frames_the_fault(files):
    quantized = copy.deepcopy(files[1])
    double_scale(quantized)
    compared = compare(files[0], quantized)
    picture = network_picture.draw_network(compared, findings.find_faults(compared), "<title>")
    root = ElementTree.fromstring(picture)
    groups = [group for group in root if group.tag.endswith("}g")]
    boxes = network_picture.find_boxes(compared.network, compared.operators)
    kinds = [[node.op_type for node in box.nodes] for box in boxes]
    assert kinds == [
        *(["Conv", "Relu"], ["Conv"], ["Conv"], ["Add", "Relu"]),
        *(["GlobalAveragePool", "Flatten"], ["Gemm"]),
    ]
    assert [box.after for box in boxes] == [set(), {0}, {0}, {1, 2}, {3}, {4}]
    assert len(groups) == len(boxes)
    [framed] = [group for group in groups if group.get("class") == "fault"]
    assert step_table.WRONG_SCALE in "".join(framed.itertext())
    assert "script" not in picture and "&lt;title&gt;" in picture


def test_a_viewer_finds_the_values_by_nodes_and_tensors_of_the_file(files):
    compared = compare(*files)
    results = network_picture.to_node_data(compared)["results"]
    nodes = {name: node for node in files[0].graph.node for name in node.output}
    measured = [t for t in compared.tensors if t.name in nodes and np.isfinite(t.own_db)]
    assert len(measured) > 5
    for tensor in measured:
        values = [results[key]["value"] for key in (tensor.inner.name, nodes[tensor.name].name)]
        assert values == [round(tensor.own_db, 1)] * 2
    assert {node.name for node in files[1].graph.node} & results.keys()


def compare_one(operator, levels, values, file=None):
    """One tensor of a file whose layer is exact but for its levels."""
    inner = Inner("t", levels.low, levels.high, levels.step)
    tensor = comparing.ComparedTensor("t", operator, inner)
    tensor.add(values, levels.round(values) if file is None else file, values)
    return comparing.TensorComparison(onnx.ModelProto(), (tensor,), tensor, {"t": operator}, 1)


UNIT = Levels(0, 1, 1 / 256)
WIDE = Levels(0, 68, 68 / 255)
UNIFORM = np.random.default_rng(0).uniform(0, 1, (1, 200, 12, 12)).astype(np.float32)


def test_a_range_of_which_a_part_is_used_is_named():
    def names(operator, levels, values):
        return [one.name for one in findings.find_faults(compare_one(operator, levels, values))]

    assert names("Softmax", UNIT, UNIFORM / 50) == [step_table.FIXED_SCALE]
    assert names("AveragePool", WIDE, UNIFORM) == [step_table.UNUSED_RANGE]
    assert names("AveragePool", UNIT, UNIFORM) == []


def test_an_outlier_channel_is_reported_from_outliers_in_any():
    one, any_ = UNIFORM.copy(), UNIFORM.copy()
    one[:, 7] *= 68
    any_[:, ::2, 0, 0] = 68
    any_[:, 1::2, 1, 1] = 68
    [channel] = findings.find_faults(compare_one("Conv", WIDE, one))
    [others] = findings.find_faults(compare_one("Conv", WIDE, any_))
    assert channel.name == step_table.OUTLIER_CHANNEL and "channel 7," in channel.meaning
    assert others.name == step_table.OUTLIER_ACTIVATION


def test_a_channel_that_is_constant_in_the_file_alone_is_dead():
    file = UNIT.round(UNIFORM)
    file[:, 5] = 0.25
    named = [one.name for one in findings.find_faults(compare_one("Conv", UNIT, UNIFORM, file))]
    assert named[-1] == step_table.DEAD_CHANNEL
    dead = UNIFORM.copy()
    dead[:, 5] = 0.25
    assert findings.find_faults(compare_one("Conv", UNIT, dead)) == []


def test_an_axis_of_tokens_holds_no_channels():
    scores = comparing.ComparedTensor("scores", "Softmax", Inner("scores"))
    for length in (5, 5, 3, 3):  # texts, the longest first
        values = np.ones((1, length, length), np.float32)
        scores.add(values, values, values)
    assert scores.channels.shape == (4, 0) and scores.count == 2 * (25 + 9)


@pytest.mark.parametrize("finding", [step_table.CLIPPED, step_table.UNLIKE_INPUTS, "unknown"])
def test_answers_are_settings_that_apply(finding):
    config = make_config("data=shapes", "per_channel=false")
    for change in step_table.answer(config, finding, ["node"]):
        assert change.apply(config) != config


def test_a_run_that_chooses_its_nodes_gets_no_list_of_them():
    config = make_config("data=shapes", "nodes_to_exclude=auto")
    assert step_table.answer(config, step_table.UNLIKE_INPUTS, ["node"]) == []
