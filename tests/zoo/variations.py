"""Variations of the reported structures: ranks, axes, opsets, control flow, groups, names."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.zoo.onnx_networks import network, node
from tests.zoo.registry import Draw, Network, structure


def convolved(nodes: list[onnx.NodeProto], opset: int = 17, **constants: object) -> Network:
    """Return a Conv from `x` to `c` [8, 6, 6], the nodes from `c` to `d`, and a Conv to `y`."""
    draw = Draw(1)
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]),
        *nodes,
        node("Conv", ["d", "v"], ["y"]),
    ]
    stored = {"w": draw.weights(8, 3, 3, 3), "b": draw.weights(8), "v": draw.weights(4, 8, 1, 1)}
    outputs = {"y": ["N", 4, None, None]}
    return network(nodes, stored | constants, {"x": draw.samples(3, 8, 8)}, outputs, opset)


@structure()
def conv_of_one_axis_dilated() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], dilations=[3], pads=[2, 1], strides=[2]),
        node("LeakyRelu", ["c"], ["r"], alpha=0.2),
        node("Conv", ["r", "v"], ["y"], group=2),
    ]
    constants = {"w": draw.weights(8, 3, 3), "b": draw.weights(8), "v": draw.weights(4, 4, 1)}
    return network(nodes, constants, {"x": draw.samples(3, 20)})


@structure()
def conv_of_three_axes() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], pads=[0, 1, 0, 1, 0, 1]),
        node("Relu", ["c"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[1, 2, 2], strides=[1, 2, 2]),
        node("Conv", ["p", "v"], ["y"]),
    ]
    constants = {
        "w": draw.weights(4, 2, 2, 3, 2),
        "b": draw.weights(4),
        "v": draw.weights(3, 4, 1, 1, 1),
    }
    return network(nodes, constants, {"x": draw.samples(2, 4, 6, 6)})


@structure()
def layer_norm_and_attention() -> Network:
    draw = Draw()
    nodes = [
        node("LayerNormalization", ["x", "gain", "shift"], ["n"], axis=-1),
        *(node("MatMul", ["n", f"w_{p}"], [p]) for p in "qkv"),
        node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], ["s"]),
        node("Softmax", ["s"], ["a"], axis=-1),
        node("MatMul", ["a", "v"], ["o"]),
        node("Add", ["o", "x"], ["r"]),
        node("MatMul", ["r", "head"], ["y"]),
    ]
    constants = {f"w_{p}": draw.weights(16, 16) for p in "qkv"} | {"head": draw.weights(16, 4)}
    constants |= {"gain": 1 + draw.weights(16), "shift": draw.weights(16)}
    return network(nodes, constants, {"x": draw.samples(6, 16)})


@structure()
def group_norm() -> Network:
    gain = np.linspace(0.5, 2, 8).astype(np.float32)
    nodes = [node("GroupNormalization", ["c", "gain", "shift"], ["d"], num_groups=2)]
    return convolved(nodes, opset=21, gain=gain, shift=gain - 1)


@structure()
def instance_norm() -> Network:
    gain = np.linspace(0.5, 2, 8).astype(np.float32)
    nodes = [node("InstanceNormalization", ["c", "gain", "shift"], ["d"])]
    return convolved(nodes, gain=gain, shift=gain - 1)


@structure()
def einsum_with_weights() -> Network:
    draw = Draw()
    nodes = [
        node("Einsum", ["x", "w"], ["h"], equation="bthk,hkn->bthn"),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(4, 8, 6), "v": draw.weights(6, 3)}
    return network(nodes, constants, {"x": draw.samples(5, 4, 8)})


def padded(mode: str) -> Network:
    sides = {"sizes": np.array([0, 0, 1, 2, 0, 0, 0, 1])}
    return convolved([node("Pad", ["c", "sizes"], ["d"], mode=mode)], **sides)


@structure()
def pad_by_reflection() -> Network:
    return padded("reflect")


@structure()
def pad_by_the_edge() -> Network:
    return padded("edge")


@structure()
def pad_with_a_value() -> Network:
    sides = {"sizes": np.array([0, 0, 1, 2, 0, 0, 0, 1]), "value": np.float32(-3)}
    return convolved([node("Pad", ["c", "sizes", "value"], ["d"])], **sides)


@structure()
def pad_of_some_axes() -> Network:
    sides = {"sizes": np.array([1, 1]), "zero": np.float32(0), "axes": np.array([-1])}
    return convolved([node("Pad", ["c", "sizes", "zero", "axes"], ["d"])], opset=18, **sides)


@structure()
def where_and_comparison() -> Network:
    nodes = [
        node("Greater", ["c", "limit"], ["g"]),
        node("Where", ["g", "c", "other"], ["d"]),
    ]
    return convolved(nodes, limit=np.float32(0.1), other=np.float32(-0.2))


@structure()
def top_k_values() -> Network:
    nodes = [node("TopK", ["c", "k"], ["d", "index"], axis=3)]
    return convolved(nodes, k=np.array([3]))


@structure()
def scattered_rows() -> Network:
    index = np.zeros((1, 8, 2, 6), np.int64)
    index[:, :, 1] = 3
    rows = np.full((1, 8, 2, 6), 0.25, np.float32)
    nodes = [
        node("Shape", ["c"], ["shape"], end=1),
        node("Concat", ["shape", "ones"], ["sizes"], axis=0),
        node("Tile", ["index", "sizes"], ["places"]),
        node("Tile", ["rows", "sizes"], ["values"]),
        node("ScatterElements", ["c", "places", "values"], ["d"], axis=2),
    ]
    return convolved(nodes, index=index, rows=rows, ones=np.array([1, 1, 1]))


@structure()
def sliced_with_steps() -> Network:
    ends = {"starts": np.array([-1, 0]), "ends": np.array([-(2**31), 5])}
    more = {"axes": np.array([2, -1]), "steps": np.array([-1, 2])}
    nodes = [node("Slice", ["c", *ends, *more], ["d"])]
    return convolved(nodes, **ends, **more)


@structure()
def split_unevenly() -> Network:
    nodes = [
        node("Split", ["c", "sizes"], ["a", "b2", "c2"], axis=1),
        node("Concat", ["c2", "a", "b2"], ["d"], axis=1),
    ]
    return convolved(nodes, sizes=np.array([1, 2, 5]))


@structure()
def prelu_by_channel() -> Network:
    slopes = np.linspace(-0.5, 1.5, 8).reshape(8, 1, 1).astype(np.float32)
    return convolved([node("PRelu", ["c", "slopes"], ["d"])], slopes=slopes)


@structure()
def float16_island() -> Network:
    nodes = [
        node("Cast", ["c"], ["h"], to=TensorProto.FLOAT16),
        node("Mul", ["h", "half"], ["m"]),
        node("Cast", ["m"], ["d"], to=TensorProto.FLOAT),
    ]
    return convolved(nodes, half=np.float16(0.5))


@structure()
def clip_of_negative_values() -> Network:
    ends = {"low": np.float32(-0.5), "high": np.float32(-0.1)}
    return convolved([node("Clip", ["c", "low", "high"], ["d"])], **ends)


@structure()
def clip_wider_than_its_values() -> Network:
    ends = {"low": np.float32(-100), "high": np.float32(100)}
    return convolved([node("Clip", ["c", "low", "high"], ["d"])], **ends)


@structure()
def division_by_a_sum() -> Network:
    nodes = [
        node("Exp", ["c"], ["e"]),
        node("ReduceSum", ["e", "axes"], ["s"]),
        node("Div", ["e", "s"], ["d"]),
    ]
    return convolved(nodes, axes=np.array([1]))


@structure()
def squeeze_and_excite() -> Network:
    draw = Draw(2)
    nodes = [
        node("GlobalAveragePool", ["c"], ["p"]),
        node("Conv", ["p", "w1"], ["f"]),
        node("Relu", ["f"], ["r"]),
        node("Conv", ["r", "w2"], ["g"]),
        node("HardSigmoid", ["g"], ["s"]),
        node("Mul", ["c", "s"], ["d"]),
    ]
    return convolved(nodes, w1=draw.weights(2, 8, 1, 1), w2=draw.weights(8, 2, 1, 1))


@structure()
def space_to_depth() -> Network:
    nodes = [
        node("SpaceToDepth", ["c"], ["s"], blocksize=2),
        node("DepthToSpace", ["s"], ["d"], blocksize=2, mode="CRD"),
    ]
    return convolved(nodes)


@structure()
def output_read_again() -> Network:
    """Three outputs; one is read by a Relu, one by another layer."""
    draw = Draw()
    nodes = [
        node("Gemm", ["x", "w", "b"], ["first"]),
        node("Relu", ["first"], ["second"]),
        node("Gemm", ["second", "w", "b"], ["y"]),
    ]
    constants = {"w": draw.weights(8, 8), "b": draw.weights(8)}
    outputs = {"first": None, "second": None, "y": None}
    return network(nodes, constants, {"x": draw.samples(8)}, outputs)


@structure()
def branch_by_shape() -> Network:
    outer = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    branches = [
        helper.make_graph([node(kind, ["c"], ["z"])], kind, [], [outer]) for kind in ("Relu", "Neg")
    ]
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "one"], ["channels"]),
        node("Greater", ["channels", "two"], ["q"]),
        node("If", ["q"], ["d"], then_branch=branches[0], else_branch=branches[1]),
    ]
    return convolved(nodes, one=np.array(1), two=np.array(2))


@structure()
def loop_over_steps() -> Network:
    makes = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            node("Identity", ["going"], ["still"]),
            node("Mul", ["state", "half"], ["m"]),
            node("Add", ["m", "c"], ["next"]),
        ],
        "body",
        [
            makes("i", TensorProto.INT64, []),
            makes("going", TensorProto.BOOL, []),
            makes("state", TensorProto.FLOAT, None),
        ],
        [makes("still", TensorProto.BOOL, []), makes("next", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32(0.5), "half")],
    )
    nodes = [node("Loop", ["count", "true", "c"], ["d"], body=body)]
    return convolved(nodes, count=np.array(3), true=np.array(True))


@structure()
def gru_in_steps() -> Network:
    draw = Draw()
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        node("GRU", ["t", "w", "r", "b"], ["all"], hidden_size=8, linear_before_reset=1),
        node("Squeeze", ["all", "one"], ["s"]),
        node("Transpose", ["s"], ["u"], perm=[1, 0, 2]),
        node("MatMul", ["u", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(1, 24, 6), "r": draw.weights(1, 24, 8), "b": draw.weights(1, 48)}
    constants |= {"one": np.array([1]), "v": draw.weights(8, 4)}
    return network(nodes, constants, {"x": draw.samples(5, 6)})


@structure(flows=("openvino_nncf",))
def weights_on_the_left() -> Network:
    draw = Draw()
    nodes = [
        node("MatMul", ["w", "x"], ["h"]),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(5, 6), "v": draw.weights(8, 3)}
    return network(nodes, constants, {"x": draw.samples(6, 8)})


@structure()
def weights_through_a_cast_and_a_transpose() -> Network:
    """Constants as nodes, which are computed from each other."""
    draw = Draw()
    weights = numpy_helper.from_array(draw.weights(8, 16).astype(np.float16), "w")
    nodes = [
        node("Constant", [], ["w"], value=weights),
        node("Cast", ["w"], ["f"], to=TensorProto.FLOAT),
        node("Transpose", ["f"], ["t"], perm=[1, 0]),
        node("MatMul", ["x", "t"], ["h"]),
        node("Gemm", ["h", "f"], ["g"]),
        node("Gemm", ["g", "f"], ["y"], transB=1),
    ]
    return network(nodes, {}, {"x": draw.samples(16)})


@structure()
def gemm_transposed_on_the_left() -> Network:
    draw = Draw()
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[1, 0]),
        node("Gemm", ["t", "w", "b"], ["h"], transA=1, alpha=0.5),
        node("Gemm", ["h", "v", "zero"], ["y"], transB=1),
    ]
    constants = {"w": draw.weights(16, 8), "b": draw.weights(8), "v": draw.weights(4, 8)}
    return network(nodes, constants | {"zero": np.float32(0)}, {"x": draw.samples(16)})


@structure()
def gemm_with_a_computed_bias() -> Network:
    draw = Draw()
    nodes = [
        node("Gemm", ["x", "u"], ["bias"]),
        node("Gemm", ["x", "w", "bias"], ["y"], beta=0.5),
    ]
    constants = {"u": draw.weights(16, 8), "w": draw.weights(16, 8)}
    return network(nodes, constants, {"x": draw.samples(16)})


@structure()
def bytes_as_inputs() -> Network:
    draw = Draw()
    nodes = [
        node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        node("Div", ["f", "most"], ["u"]),
        node("Conv", ["u", "w", "b"], ["y"]),
    ]
    constants = {"w": draw.weights(4, 3, 3, 3), "b": draw.weights(4), "most": np.float32(255)}
    return network(nodes, constants, {"x": draw.integers(256, 3, 8, 8).astype(np.uint8)})


@structure()
def channel_of_one() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4),
        node("Conv", ["c", "v"], ["y"], group=1),
    ]
    constants = {"w": draw.weights(1, 1, 3, 3), "b": draw.weights(1), "v": draw.weights(1, 1, 1, 1)}
    return network(nodes, constants, {"x": draw.samples(1, 6, 6)})


@structure()
def depthwise_with_a_multiplier() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], group=4, strides=[2, 1], pads=[1, 0, 2, 1]),
        node("Conv", ["c", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(8, 1, 3, 3), "b": draw.weights(8), "v": draw.weights(3, 8, 1, 1)}
    return network(nodes, constants, {"x": draw.samples(4, 8, 8)})


@structure()
def conv_with_a_padding_around_a_window() -> Network:
    """Dilated, with different paddings at each side, and a Conv whose weights are computed."""
    draw = Draw()
    nodes = [
        node("Mul", ["v", "gain"], ["u"]),
        node("Conv", ["x", "w", "b"], ["c"], dilations=[2, 1], pads=[3, 0, 1, 2]),
        node("Conv", ["c", "u"], ["y"]),
    ]
    constants = {"w": draw.weights(8, 3, 3, 3), "b": draw.weights(8), "v": draw.weights(3, 8, 1, 1)}
    return network(nodes, constants | {"gain": np.float32(3)}, {"x": draw.samples(3, 8, 8)})


@structure()
def gated_pair() -> Network:
    """silu(a) * b with one input, as in gated layers; b reaches large values."""
    draw = Draw()
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("MatMul", ["x", "v"], ["b"]),
        node("Sigmoid", ["a"], ["s"]),
        node("Mul", ["a", "s"], ["silu"]),
        node("Mul", ["silu", "b"], ["g"]),
        node("MatMul", ["g", "u"], ["y"]),
    ]
    constants = {"w": draw.weights(16, 24), "v": 3 * draw.weights(16, 24), "u": draw.weights(24, 8)}
    return network(nodes, constants, {"x": draw.samples(16)})


@structure()
def scalars_added() -> Network:
    """A constant of rank 0, of rank 4, and a sum of three."""
    nodes = [
        node("Add", ["c", "one"], ["e"]),
        node("Mul", ["e", "wide"], ["f"]),
        node("Sum", ["f", "c", "one"], ["d"]),
    ]
    wide = np.linspace(0.5, 2, 8).reshape(1, 8, 1, 1).astype(np.float32)
    return convolved(nodes, one=np.float32(0.7), wide=wide)


@structure()
def argmax_beside_its_map() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w"], ["map"]),
        node("ArgMax", ["map"], ["best"], axis=1, keepdims=0),
        node("Cast", ["best"], ["y"], to=TensorProto.FLOAT),
    ]
    outputs = {"map": None, "y": None}
    return network(nodes, {"w": draw.weights(5, 3, 3, 3)}, {"x": draw.samples(3, 6, 6)}, outputs)


@structure()
def opset_23() -> Network:
    draw = Draw()
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("RMSNormalization", ["h", "gain"], ["n"]),
        node("MatMul", ["n", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(8, 16), "gain": 1 + draw.weights(16), "v": draw.weights(16, 4)}
    return network(nodes, constants, {"x": draw.samples(3, 8)}, opset=23)


def relu_behind(kind: str, **attributes: object) -> Network:
    return convolved([node(kind, ["c"], ["p"], **attributes), node("Relu", ["p"], ["d"])])


@structure()
def relu_behind_a_max_pool() -> Network:
    return relu_behind("MaxPool", kernel_shape=[2, 2])


@structure()
def relu_behind_an_average_pool() -> Network:
    return relu_behind("AveragePool", kernel_shape=[2, 2])


@structure()
def relu_behind_a_transpose() -> Network:
    return relu_behind("Transpose", perm=[0, 1, 3, 2])


@structure()
def relu_beside_another_reader() -> Network:
    """The first Relu of a residual block before whose activation the shortcut begins."""
    draw = Draw(2)
    nodes = [
        node("Relu", ["c"], ["r"]),
        node("Conv", ["r", "u"], ["e"]),
        node("Add", ["e", "c"], ["d"]),
    ]
    return convolved(nodes, u=draw.weights(8, 8, 1, 1))


@structure()
def two_pads_with_one_value() -> Network:
    nodes = [
        node("Pad", ["c", "sizes", "zero"], ["p"]),
        node("Sigmoid", ["p"], ["s"]),
        node("Pad", ["s", "sizes", "zero"], ["d"]),
    ]
    return convolved(nodes, sizes=np.array([0, 0, 1, 0, 0, 0, 0, 1]), zero=np.float32(0))


@structure()
def relu_of_the_input() -> Network:
    draw = Draw()
    nodes = [
        node("Relu", ["x"], ["r"]),
        node("Concat", ["r", "x"], ["c"], axis=1),
        node("Conv", ["c", "w"], ["y"]),
    ]
    return network(nodes, {"w": draw.weights(4, 6, 3, 3)}, {"x": draw.samples(3, 8, 8)})
