"""The conversion of an ONNX graph to a torch module that FX and `torch.export` can trace."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from resnet8ptq.backends.operators import WITHOUT_TORCH
from resnet8ptq.backends.torch.program import export, save
from resnet8ptq.backends.torch.torchscript import Example
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph import torch_imports, torch_operators
from resnet8ptq.graph.torch_module import to_torch_module
from tests.helpers import transformers

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'


def test_products_with_constant_weights_are_linear_layers():
    proto = transformers.build()
    module = to_torch_module(proto)
    linear = {n for n, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
    assert linear == set(transformers.LAYERS)  # without the products of computed tensors
    assert not [b for b in module.buffers() if b.ndim == 2]  # of which a file would hold copies
    pixels = np.random.default_rng(1).normal(size=(5, 3, 8, 6)).astype(np.float32)
    [expected] = onnxruntime.InferenceSession(proto.SerializeToString()).run(
        None, {"pixels": pixels}
    )
    with torch.inference_mode():
        result = torch.fx.symbolic_trace(module)(torch.from_numpy(pixels))
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(4,), (3, 2, 4)])
def test_a_product_with_a_vector_or_several_matrices_stays(shape):
    weights = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    gives = "float[N, 3, 5, 4] y" if len(shape) > 1 else "float[N, 3, 5] y"
    inner = shape[-2:][0]
    body = f"g (float[N, 3, 5, {inner}] x) => ({gives}) {{ y = MatMul(x, w) }}"
    proto = onnx.parser.parse_model(f"{HEAD} {body}")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    values = torch.arange(2.0 * 15 * inner).reshape(2, 3, 5, inner)
    result = to_torch_module(proto)(values)
    assert torch.equal(result, torch.matmul(values, torch.from_numpy(weights)))


def test_a_resize_whose_first_optional_input_is_empty_can_be_traced():
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 1, 2, 2] x) => (float[N, 1, 4, 4] y)
        <float[4] scales = {{1, 1, 2, 2}}>
        {{ y = Resize <mode = "linear"> (x, , scales) }}"""
    )
    traced = torch.fx.symbolic_trace(to_torch_module(proto))
    values = torch.arange(4.0).reshape(1, 1, 2, 2)
    assert torch.equal(traced(values), torch.nn.Upsample(scale_factor=2, mode="bilinear")(values))


def test_a_slice_without_axes_keeps_its_steps():
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 4] x) => (float[M, 2] y)
        <int64[2] starts = {{0, 0}}, int64[2] ends = {{9, 4}}, int64[2] steps = {{1, 2}}>
        {{ y = Slice(x, starts, ends, , steps) }}"""
    )
    assert to_torch_module(proto)(torch.arange(8.0).reshape(2, 4)).tolist() == [[0, 2], [4, 6]]


@pytest.mark.parametrize("end", [2**31 - 1, 2**63 - 1])
def test_a_slice_to_the_end_keeps_any_batch(end):
    """As TensorFlow crops a picture, along every axis."""
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 3] x) => (float[N, 2] y)
        <int64[2] starts = {{0, 1}}, int64[2] ends = {{{end}, {end}}}, int64[2] axes = {{0, 1}}>
        {{ y = Slice(x, starts, ends, axes) }}"""
    )
    program = export(to_torch_module(proto), Example((torch.ones(1, 3),), (False,)))
    values = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(program.module()(values), values[:, 1:])


@pytest.mark.parametrize(
    "steps",
    [
        "y = Tile(x, copies)",
        *(f"c = Neg(x)  y = {kind}(x, c, row)" for kind in ("Max", "Min", "Sum")),
    ],
)
def test_copies_and_steps_of_several_tensors_can_be_traced(steps):
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 3] x) => (float[N, M] y)
        <int64[2] copies = {{1, 2}}, float[3] row = {{-1, 0, 1}}>
        {{ {steps} }}"""
    )
    proto.graph.node[-1].name = "last"
    module = to_torch_module(proto)
    program = export(module, Example((torch.ones(1, 3),), (False,)))
    values = torch.arange(12.0).reshape(4, 3) - 5
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    [expected] = session.run(None, {"x": values.numpy()})
    np.testing.assert_array_equal(program.module()(values), expected)
    np.testing.assert_array_equal(torch.fx.symbolic_trace(module)(values), expected)


@pytest.mark.parametrize(
    ("mode", "widths"),
    [
        *((mode, "0, 0, 1, 0, 0, 0, 2, 1") for mode in ("constant", "reflect", "edge", "wrap")),
        ("constant", "0, 0, -1, 2, 0, 0, -1, -2"),
    ],
)
def test_a_pad_with_a_value_can_be_exported(mode, widths):
    """ExecuTorch crops by no Pad."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 19]>
        network (float[N, 1, 3, 4] x) => (float[N, 1, a, b] y)
        <int64[8] widths = {{{widths}}}, float value = {{7}}>
        {{ y = Pad <mode = "{mode}"> (x, widths, value) }}"""
    )
    values = np.arange(24, dtype=np.float32).reshape(2, 1, 3, 4)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    program = torch.export.export(to_torch_module(proto), (torch.from_numpy(values),))
    padded = program.module()(torch.from_numpy(values))
    np.testing.assert_array_equal(padded, session.run(None, {"x": values})[0])
    pads = [node.args[1] for node in program.graph.nodes if "pad" in str(node.target)]
    assert min(min(pads, default=[0])) >= 0


@pytest.mark.parametrize("mode", ["reflect", "edge"])
@pytest.mark.parametrize(
    ("shape", "widths"), [((3, 6), [0, 1, 0, 2]), ((2, 4, 6), [0, 2, 1, 0, 1, 0])]
)
def test_a_signal_without_channels_and_channels_can_be_reflected(mode, shape, widths):
    """As torch.stft pads [N, samples]."""
    rank = ", ".join("abc"[: len(shape)])
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[{rank}] x) => (float[{rank.upper()}] y)
        <int64[{len(widths)}] widths = {{{", ".join(map(str, widths))}}}>
        {{ y = Pad <mode = "{mode}"> (x, widths) }}"""
    )
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    padded = to_torch_module(proto)(torch.from_numpy(values))
    np.testing.assert_array_equal(padded, session.run(None, {"x": values})[0])


def test_a_clip_with_both_ends_is_a_hardtanh():
    """Which XNNPACK fuses with a convolution; a clamp leaves the convolution in float."""
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 2] x) => (float[N, 2] y)
        <float low = {{-1}}, float high = {{2}}> {{ y = Clip(x, low, high) }}"""
    )
    module = to_torch_module(proto)
    assert [type(layer) for layer in module.children()] == [torch.nn.Hardtanh]
    assert module(torch.tensor([[-3.0, 3.0]])).tolist() == [[-1, 2]]


def test_a_constant_is_the_second_factor():
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 2] x) => (float[N, 2] y) <float[1] two = {{2}}>
        {{ y = Mul(two, x) }}"""
    )
    module = to_torch_module(proto)
    (product,) = (node for node in module.graph.nodes if node.op == "call_module")
    assert [argument.op for argument in product.args] == ["placeholder", "get_attr"]
    assert module(torch.ones(1, 2)).tolist() == [[2, 2]]


def divide(kind: str) -> torch.fx.GraphModule:
    """Return the quotient of two computed tensors, x / (x - 9)."""
    proto = onnx.parser.parse_model(
        f"""{HEAD} network ({kind}[N, 2] x) => ({kind}[N, 2] y) <{kind}[1] nine = {{9}}>
        {{ less = Sub(x, nine)  y = Div(x, less) }}"""
    )
    for node in proto.graph.node:
        node.name = node.op_type
    return to_torch_module(proto)


def test_a_division_of_computed_floats_can_be_traced():
    traced = torch.fx.symbolic_trace(divide("float"))
    assert traced(torch.tensor([[7.0, 8.0]])).tolist() == [[-3.5, -8]]


def test_a_division_of_integers_is_truncated():
    assert divide("int64")(torch.tensor([[7, 8]])).tolist() == [[-3, -8]]


# Of the networks that tests, studies and examples load, after folding.
USED = (
    *("Add", "AveragePool", "Cast", "Clip", "Concat", "Conv", "Div", "Erf", "Exp", "Flatten"),
    *("Gather", "Gemm", "GlobalAveragePool", "GreaterOrEqual", "LayerNormalization"),
    *("LessOrEqual", "MatMul", "MaxPool", "Mul"),
    *("Range", "ReduceL2", "ReduceSum", "Relu", "Reshape", "Resize", "Shape", "Sigmoid", "Slice"),
    *("Softmax", "SpaceToDepth", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
)


@pytest.mark.parametrize("opset", [13, 15, 17])
def test_the_operators_in_use_have_a_converter(opset):
    """In the opsets that networks are raised or lowered to."""
    torch_imports.import_onnx2torch()
    from onnx2torch.node_converters.registry import get_converter

    for name in {*USED} - {*torch_operators._CONVERTERS}:
        if name != "LayerNormalization" or opset >= 17:  # which has it first
            assert callable(get_converter(name, version=opset, domain=""))


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_the_operators_that_torch_is_said_to_lack_have_no_converter(name):
    torch_imports.import_onnx2torch()
    from onnx2torch.node_converters.registry import _CONVERTER_REGISTRY

    assert name not in {known.operation_type for known in _CONVERTER_REGISTRY}
    assert name not in torch_operators._CONVERTERS


def test_a_split_into_equal_parts_of_a_newer_opset_can_be_traced():
    """As torch's exporter writes `chunk`: shuffled channels, gates, queries and keys."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        network (float[N, 4] x) => (float[N, 4] y)
        { a, b = Split <axis = 1, num_outputs = 2> (x)
          y = Concat <axis = 1> (b, a) }"""
    )
    traced = torch.fx.symbolic_trace(to_torch_module(proto))
    values = torch.arange(8.0).reshape(2, 4)
    assert torch.equal(traced(values), values[:, [2, 3, 0, 1]])


def test_attributes_of_a_newer_opset_with_their_default_are_dropped():
    """torch's exporter writes the default; another value has no meaning in the older opset."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        network (float[N, 4] x) => (float[N, 1] y) <int64[1] last = {1}>
        { y = ReduceMax <keepdims = 1, noop_with_empty_axes = 0> (x, last) }"""
    )
    assert to_torch_module(proto)(torch.eye(4)).tolist() == [[1]] * 4


def test_the_last_part_of_an_uneven_split_is_smaller():
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        network (float[N, 5] x) => (float[N, 2] a, float[N, 2] b, float[N, 1] c)
        { a, b, c = Split <axis = 1, num_outputs = 3> (x) }"""
    )
    values = np.arange(10, dtype=np.float32).reshape(2, 5)
    expected = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": values})
    result = torch.fx.symbolic_trace(to_torch_module(proto))(torch.from_numpy(values))
    for part, same in zip(result, expected, strict=True):
        np.testing.assert_array_equal(part, same)


@pytest.mark.parametrize("sizes", ["", "sizes"])
def test_the_batch_of_a_split_stays_free(sizes):
    """ExecuTorch decomposes torch's own split for the batch of the trace alone."""
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 4] x) => (float[N, 2] y)
        <int64[2] sizes = {{2, 2}}, int64[1] last = {{-1}}>
        {{ a, b = Split <axis = 1> (x{sizes and ", " + sizes})
           c = Add(a, b)
           d = Unsqueeze(c, last)
           y = Squeeze(d, last) }}"""
    )
    program = export(to_torch_module(proto), Example((torch.ones(1, 4),), (False,)))
    assert not [node for node in program.graph.nodes if "split" in str(node.target)]
    values = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(program.module()(values), values[:, :2] + values[:, 2:])


@pytest.mark.parametrize("slopes", [(1,), (3, 1, 1), (1, 3, 1, 1)])
def test_slopes_of_the_channels_can_be_traced(slopes):
    """As networks for faces have them."""
    values = np.linspace(0.1, 0.3, np.prod(slopes), dtype=np.float32).reshape(slopes)
    proto = onnx.parser.parse_model(
        f"{HEAD} network (float[N, 3, 2, 2] x) => (float[N, 3, 2, 2] y) {{ y = PRelu(x, slope) }}"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(values, "slope"))
    inputs = np.random.default_rng(0).normal(size=(2, 3, 2, 2)).astype(np.float32)
    result = torch.fx.symbolic_trace(to_torch_module(proto))(torch.from_numpy(inputs))
    np.testing.assert_allclose(result.detach(), np.where(inputs < 0, inputs * values, inputs))


CONSTANTS = """float low = {-0.5}, float zero = {0}, int64[1] two = {2}, int64 one = {1},
    int64[2] from = {-1, 9}, int64[2] to = {-9223372036854775807, 0}, int64[2] axes = {3, 1},
    int64[2] mixed = {-1, 1}, int64[2] inner = {1, 2}, int64[2] outer = {9, 3},
    int64[2] back = {-1, -2}, int64[4] around = {1, 0, 2, 1}, float[6] row = {1, 2, 0.5, -1, 0, 3},
    float[4] factors = {1, 1, 2, 1.5}, float[4] smaller = {1, 1, 0.5, 0.5},
    float[4] of_rows = {1, 1.5, 2, 1}, int64[4] sizes = {1, 4, 7, 9}"""
POOL = "kernel_shape = [3, 2], strides = [2, 1], pads = [0, 1, 1, 0]"
OF_17 = (
    *("Acosh(y1)", "Asinh(x)", "Atanh(y0)", "Cosh(x)", "Sinh(x)", "Clip(x, , low)", "Clip(x, low)"),
    *("Clip(x, zero)", "ThresholdedRelu <alpha = 0.7> (x)", "Shrink <bias = 0.5> (x)"),
    *("Shrink(x)", "GlobalLpPool <p = 3> (x)", "LpNormalization(x)", "Mean(x, y0, y1)"),
    *("LpNormalization <axis = 1, p = 1> (x)", "MeanVarianceNormalization <axes = [2, 3]> (x)"),
    *("DepthToSpace <blocksize = 2> (x)", 'DepthToSpace <blocksize = 2, mode = "CRD"> (x)'),
    *(f"AveragePool <{POOL}, count_include_pad = {counts}> (x)" for counts in (0, 1)),
    f"AveragePool <{POOL}, ceil_mode = 1> (x)",
    f"LpPool <{POOL}, p = 3> (x)",
    *("PRelu(x, y0_)", "PRelu(x, row)", "Trilu <upper = 0> (x, one)", "Trilu(x)"),
    *(f"CumSum <exclusive = {e}, reverse = {r}> (x, one)" for e in (0, 1) for r in (0, 1)),
    *(f"Slice(x, from, to, {axes}, back)" for axes in ("axes", "mixed")),
    *(f"Reduce{kind} <axes = [1, 2], keepdims = 1> (x)" for kind in ("Max", "Min")),
    "ConvTranspose <strides = [2, 3], pads = [0, 2, 1, 0], output_padding = [1, 2]> (x, kernel)",
    *(
        f"ConvTranspose <strides = [2, 3], output_shape = {shape}> (x, kernel)"
        for shape in ([12, 18], [11, 17])
    ),
    *("Slice(x, inner, outer, mixed)", "TopK <axis = 1, largest = 0> (x, two)"),
)
RESIZES = (
    *(("linear", how, "factors") for how in ("asymmetric", "align_corners", "half_pixel")),
    *(("cubic", how, "factors") for how in ("asymmetric", "align_corners", "half_pixel")),
    *(("linear", "half_pixel", to) for to in ("smaller", ", sizes")),
    *(("nearest", how, "factors") for how in ("asymmetric", "align_corners", "half_pixel")),
    *(("nearest", "tf_half_pixel_for_nn", "factors"), ("nearest", "asymmetric", "of_rows")),
)
NEAREST = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
RESIZED = (
    *(
        f'Resize <mode = "{mode}", coordinate_transformation_mode = "{how}"> (x, , {to})'
        for mode, how, to in RESIZES
    ),
    *(f'Resize <nearest_mode = "{way}"> (x, , factors)' for way in NEAREST),
    'Resize <mode = "cubic", exclude_outside = 1, cubic_coeff_a = -0.5> (x, , factors)',
)
LATER = {
    18: (
        "Mish(x)",
        "Pad(x, around, zero, back)",
        'Resize <mode = "linear", antialias = 1> (x, , smaller)',
    ),
    20: ('Gelu <approximate = "tanh"> (x)', "Gelu(x)"),
    23: ("RMSNormalization(x, row)",),
    24: ("Swish(x)",),
}


@pytest.mark.parametrize(
    ("opset", "steps"),
    [
        *((17, steps) for steps in (*OF_17, *RESIZED)),
        *((opset, steps) for opset, kinds in LATER.items() for steps in kinds),
    ],
)
def test_computes_operators_that_onnx2torch_lacks_or_converts_wrongly(opset, steps):
    """`y0` lies between -1 and 1, and `y1` between 1 and 2; a pool follows, of known shape."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : {opset}]>
        network (float[N, 4, 6, 6] x) => (float[N, a, b, c] y, float[N, d, 1, 1] z) <{CONSTANTS}>
        {{ sine = Sin(x)  y0 = Mul(sine, half)  y1 = Exp(y0)  y = {steps}
           z = GlobalAveragePool(y) }}"""
    )
    full = np.random.default_rng(1).normal(size=(4, 6, 6)).astype(np.float32)
    kernel = np.resize(full, (4, 3, 3, 4))
    for name, values in (("y0_", full), ("half", np.float32(0.5)), ("kernel", kernel)):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values), name))
    if "TopK" in steps:
        proto.graph.node[-2].output.append("places")
    count = 1 if "sizes" in steps else 3
    values = np.random.default_rng(0).normal(size=(count, 4, 6, 6)).astype(np.float32)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    expected = session.run(None, {"x": values})
    result = torch.fx.symbolic_trace(to_torch_module(proto))(torch.from_numpy(values))
    for same, got in zip(expected, result, strict=True):
        np.testing.assert_allclose(got.detach(), same, atol=1e-5)


OF_INDICES = (
    *(f"Gather <axis = {axis}> (x, places)" for axis in (1, -1)),
    *(f"GatherElements <axis = {axis}> (x, places)" for axis in (1, -1)),
    *(
        f'ScatterElements <axis = 1, reduction = "{how}"> (x, rows, sine)'
        for how in ("none", "add")
    ),
    *(f'ScatterND <reduction = "{how}"> (x, at, row)' for how in ("none", "add")),
    *(f"OneHot <axis = {axis}> (places, three, ends)" for axis in (1, -1)),
    *(f'GridSample <mode = "{mode}"> (picture, grid)' for mode in ("linear", "nearest", "cubic")),
    'GridSample <padding_mode = "border", align_corners = 1> (picture, grid)',
    *(f"Bitwise{kind}(places, rows)" for kind in ("And", "Or", "Xor")),
    *("BitwiseNot(places)", "CastLike(x, places)"),
)


@pytest.mark.parametrize("steps", OF_INDICES)
def test_computes_and_saves_operators_of_computed_indices(steps, tmp_path):
    """`places` are -1, 0 or 1, and `rows` count the four rows."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        network (float[N, 4, 6] x) => (float[N] y)
        <int64[4, 1] count = {{0, 1, 2, 3}}, int64 zero = {{0}}, int64[1] one = {{1}},
         int64 three = {{3}}, float[2] ends = {{-1, 2}}, int64[1, 2] at = {{0, 1}},
         float[1, 6] row = {{1, 2, 3, 4, 5, 6}}, int64[4] sides = {{0, 3, 4, 2}}>
        {{ signs = Sign(x)  places = Cast <to = 7> (signs)  none = Mul(places, zero)
           rows = Add(none, count)  sine = Sin(x)  picture = Unsqueeze(x, one)
           grid = Reshape(sine, sides)  y = {steps} }}"""
    )
    (output,) = proto.graph.output
    output.type.tensor_type.ClearField("shape")
    output.type.tensor_type.elem_type = 7 if "Bitwise" in steps or "CastLike" in steps else 1
    values = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)
    [expected] = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": values})
    for _ in expected.shape:
        output.type.tensor_type.shape.dim.add()
    module = to_torch_module(proto)
    result = torch.fx.symbolic_trace(module)(torch.from_numpy(values))
    np.testing.assert_allclose(result, expected, atol=1e-5)
    save(module, Example((torch.ones(1, 4, 6),), (False,)), tmp_path / "model.pt2")


def test_operators_of_several_steps_keep_any_batch():
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 4, 6, 6] x) => (float[N, a, b, c] y) <{CONSTANTS}>
        {{ a = LpPool <{POOL}> (x)  b = AveragePool <{POOL}> (a)
           c = Resize <mode = "linear", coordinate_transformation_mode = "asymmetric">
             (b, , factors)
           d = Slice(c, from, to, axes, back)  e, f = TopK <axis = 1> (d, two)
           g = CumSum <reverse = 1> (e, one)  y = PRelu(g, slopes) }}"""
    )
    slopes = np.full((1, 2, 9), 0.1, np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(slopes, "slopes"))
    module = to_torch_module(proto)
    program = export(module, Example((torch.ones(1, 4, 6, 6),), (False,)))
    values = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(program.module()(values), module(values))


@pytest.mark.parametrize(
    "steps",
    [
        "end = Shape <start = 1, end = 2> (x)",
        "sizes = Shape(x)  length = Gather(sizes, number)  end = Unsqueeze(length, none)",
        "sizes = Shape(x)  end = Gather(sizes, one)",
    ],
)
def test_fixed_positions_are_cut_to_the_length_of_an_input(steps):
    """As exporters of transformers write learned embeddings of positions."""
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, length, 2] x) => (float[N, length, 2] y)
        <int64[1] none = {{0}}, int64[1] one = {{1}}, int64 number = {{1}},
         float[1, 5, 2] positions = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}>
        {{ {steps}  first = Slice(positions, none, end, one)  y = Add(x, first) }}"""
    )
    module = to_torch_module(proto)
    program = export(module, Example((torch.ones(1, 4, 2),), (True,))).module()
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for shape in ((3, 5, 2), (2, 3, 2)):
        values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        [expected] = session.run(None, {"x": values})
        for computed in (torch.fx.symbolic_trace(module), program):
            np.testing.assert_array_equal(computed(torch.from_numpy(values)), expected)


@pytest.mark.parametrize(
    "steps",
    [
        *("last = ReduceMax <axes = [1], keepdims = 0> (x)  y = Unsqueeze(last, number)",),
        *("sizes = Shape(x)  like = Expand(half, sizes)  y = Mul(x, like)",),
        *("turned = Transpose <perm = [1, 0]> (x)  y = GatherND(turned, places)",),
    ],
)
def test_exporters_steps_keep_any_batch_and_can_be_traced(steps):
    """torch writes axes as a single number, shapes of other tensors, and picked columns."""
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 4] x) => (float[a, b] y)
        <int64 number = {{1}}, float half = {{0.5}}, int64[2, 1] places = {{3, 1}}> {{ {steps} }}"""
    )
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    [expected] = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": values})
    module = to_torch_module(proto)
    program = export(module, Example((torch.ones(1, 4),), (False,))).module()
    for computed in (torch.fx.symbolic_trace(module), program):
        np.testing.assert_array_equal(computed(torch.from_numpy(values)), expected)


def test_a_bias_of_one_number_has_one_for_each_output():
    """Quantized kernels do not broadcast it."""
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 2] x) => (float[N, 2] y)
        <float[2, 2] w = {{1, 2, 3, 4}}, float[1] b = {{5}}> {{ y = Gemm(x, w, b) }}"""
    )
    proto.graph.node[0].name = "layer"
    module = to_torch_module(proto)
    assert module.layer.bias.tolist() == [5, 5]
    assert module(torch.ones(1, 2)).tolist() == [[9, 11]]


def test_one_output_of_several_is_returned():
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 4] x) => (float[N, 2] b, float[N, 4] y)
        {{ a, b = Split <axis = 1> (x)  y = Neg(x) }}"""
    )
    values = torch.arange(8.0).reshape(2, 4)
    b, y = to_torch_module(proto)(values)
    assert torch.equal(b, values[:, 2:]) and torch.equal(y, -values)


RECURRENT = (
    *(("LSTM", f'direction = "{way}"') for way in ("forward", "reverse", "bidirectional")),
    *(("GRU", f'linear_before_reset = 1, direction = "{way}"') for way in ("reverse", "forward")),
    *(("GRU", f'direction = "{way}"') for way in ("reverse", "bidirectional")),
    *(("RNN", f'activations = ["{name}"]') for name in ("Tanh", "Relu")),
)


def recur(kind: str, settings: str, zero: float = 0) -> onnx.ModelProto:
    """Return a recurrent layer whose initial states a network expands to its batch."""
    states = "state, state" if kind == "LSTM" else "state"
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 5, 3] x) => (float[N, D, 5, 4] y, float[N, D, 4] z)
        <int64[1] at = {{0}}, int64[1] wide = {{4}}, float zero = {{{zero}}}>
        {{ sizes = Shape(x)  batch = Gather(sizes, at)
           full = Concat <axis = 0> (ways, batch, wide)  state = Expand(zero, full)
           steps = Transpose <perm = [1, 0, 2]> (x)
           all, last = {kind} <hidden_size = 4, {settings}> (steps, w, r, b, , {states})
           y = Transpose <perm = [2, 1, 0, 3]> (all)  z = Transpose <perm = [1, 0, 2]> (last) }}"""
    )
    ways, gates = 1 + ("bidirectional" in settings), {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    random = np.random.default_rng(0)
    shapes = {"w": (ways, 4 * gates, 3), "r": (ways, 4 * gates, 4), "b": (ways, 8 * gates)}
    values = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, array in ({"ways": np.array([ways])} | values).items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


@pytest.mark.parametrize("state", [0, 0.5])
@pytest.mark.parametrize(("kind", "settings"), RECURRENT)
def test_recurrent_layers_can_be_traced_and_exported(kind, settings, state):
    proto = recur(kind, settings, state)
    values = np.random.default_rng(1).normal(size=(2, 5, 3)).astype(np.float32)
    expected = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": values})
    module = to_torch_module(proto)
    program = export(module, Example((torch.ones(1, 5, 3),), (False,)))
    for computed in (torch.fx.symbolic_trace(module), program.module()):
        for result, same in zip(computed(torch.from_numpy(values)), expected, strict=True):
            np.testing.assert_allclose(result.detach(), same, atol=1e-5)


def test_initial_states_can_be_inputs():
    """As of a network that is called once for each part of a signal."""
    proto = recur("LSTM", 'direction = "forward"', 1)
    node = next(node for node in proto.graph.node if node.op_type == "LSTM")
    node.input[5:7] = ["h", "c"]
    for name in ("h", "c"):
        proto.graph.input.append(onnx.helper.make_tensor_value_info(name, 1, [1, "N", 4]))
    random = np.random.default_rng(1)
    shapes = {"x": (2, 5, 3), "h": (1, 2, 4), "c": (1, 2, 4)}
    values = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    expected = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, values)
    result = to_torch_module(proto)(*map(torch.from_numpy, values.values()))
    for got, same in zip(result, expected, strict=True):
        np.testing.assert_allclose(got.detach(), same, atol=1e-5)


@pytest.mark.parametrize("settings", ["clip = 1.0", 'activations = ["Relu", "Tanh"]'])
def test_variants_of_recurrent_layers_that_torch_lacks_are_unsupported(settings):
    with pytest.raises(UnsupportedError, match="GRU"):
        to_torch_module(recur("GRU", settings))


def test_a_pool_of_unknown_rank_is_left_to_onnx2torch():
    """onnx infers no shape after an operator of another domain, and onnx2torch lacks this one."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft": 1]>
        network (float[N, 2, 4, 4] x) => (float[N, 2, 4, 4] y)
        { gelu = com.microsoft.Gelu(x)
          y = AveragePool <kernel_shape = [2, 2], pads = [0, 0, 1, 1]> (gelu) }"""
    )
    with pytest.raises(UnsupportedError, match="onnx2torch"):
        to_torch_module(proto)


@pytest.mark.parametrize("part", ["start = 1", "start = -2", "start = 1, end = 3"])
def test_positions_count_along_the_last_axis_of_a_part_of_a_shape(part):
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 3, 5] x) => (float[N, 3, M] y)
        <int64 last = {{-1}}, int64 zero = {{0}}, int64 one = {{1}}>
        {{ sizes = Shape <{part}> (x)  size = Gather(sizes, last)  numbers = Range(zero, size, one)
           floats = Cast <to = 1> (numbers)  y = Add(x, floats) }}"""
    )
    result = to_torch_module(proto)(torch.zeros(2, 3, 5))
    assert torch.equal(result, torch.arange(5.0).expand(2, 3, 5))


def test_positions_have_the_type_of_their_range():
    """As torch exports `arange(n, dtype=torch.float32)`."""
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, M] x) => (float[N] y)
        <int64 last = {{1}}, float zero = {{0}}, float one = {{1}}>
        {{ sizes = Shape(x)  size = Gather(sizes, last)  floats = Cast <to = 1> (size)
           numbers = Range(zero, floats, one)  y = MatMul(x, numbers) }}"""
    )
    module = to_torch_module(proto)
    program = export(module, Example((torch.ones(1, 3),), (False,)))
    for computed in (torch.fx.symbolic_trace(module), program.module()):
        assert computed(torch.ones(2, 3)).tolist() == [3, 3]


@pytest.mark.parametrize("axis", [1, 2, 3, -1, -2])
def test_axes_are_flattened_from_either_end(axis):
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 3, 2] x) => (float[a, b] y)
        {{ y = Flatten <axis = {axis}> (x) }}"""
    )
    values = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    [expected] = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": values})
    np.testing.assert_array_equal(to_torch_module(proto)(torch.from_numpy(values)), expected)


def test_a_whole_shape_is_no_batch_size():
    proto = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 3] x) => (float[N, 3, 2] y)
        <float[2] values = {{4, 5}}, int64[1] two = {{2}}>
        {{ sizes = Shape(x)  full = Concat <axis = 0> (sizes, two)  y = Expand(values, full) }}"""
    )
    result = to_torch_module(proto)(torch.ones(2, 3))
    assert torch.equal(result, torch.tensor([4.0, 5]).expand(2, 3, 2))


def test_a_reduction_with_an_empty_list_of_axes_is_unsupported():
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
        network (float[N, 3] x) => (float[N, 3] y) <int64[0] axes = {}>
        { y = ReduceMean <noop_with_empty_axes = 1> (x, axes) }"""
    )
    with pytest.raises(UnsupportedError, match="ReduceMean"):
        to_torch_module(proto)
