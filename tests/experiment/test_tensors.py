"""A comparison of tensors names the layer that was broken, and the kind of its fault."""

import copy

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from resnet8ptq.backends.file import onnx_file
from resnet8ptq.data.dataset import Split
from resnet8ptq.experiment.tensors import alignment, comparing, comparison_table
from resnet8ptq.experiment.tensors.alignment import Fingerprint
from resnet8ptq.graph.session import open_runner

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


def build() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(NETWORK)
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
    folder = tmp_path_factory.mktemp("tensors")
    fp32, quantized = folder / "fp32.onnx", folder / "int8.onnx"
    onnx.save(build(), fp32)
    quantize_static(
        *(fp32, quantized, _Reader()),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    return onnx.load(fp32), onnx.load(quantized)


def compare(fp32, quantized):
    tensors = onnx_file.open_tensors(quantized.SerializeToString(), 1)
    return comparing.compare(
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
    assert not compared.cut


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
    (clip, "first", "range"),
    (double_scale, "left", "scale"),
    (zero_bias, "right", "bias"),
    (swap_channels, "left", "another order"),
]


@pytest.mark.parametrize(("fault", "tensor", "word"), FAULTS)
@pytest.mark.parametrize("names", ["kept", "others"])
def test_a_fault_is_found_where_it_is(files, fault, tensor, word, names):
    fp32, quantized = files[0], copy.deepcopy(files[1])
    fault(quantized)
    if names == "others":
        rename(quantized)
    compared = compare(fp32, quantized)
    assert compared.costliest.name == tensor
    assert word in compared.explanation
    assert tensor in compared.describe()
    assert (fault is clip) == (tensor in [one.name for one in compared.cut])


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
    assert len(comparison_table.to_csv(compared).splitlines()) == len(compared.tensors) + 1
    document = comparison_table.to_document(compared)
    assert document["costliest"] == compared.costliest.name
    comparison_table.draw(compared, "title")


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
