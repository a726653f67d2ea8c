"""ONNX networks of the zoo."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper

from tests.helpers.assembling import Sizes, assemble
from tests.zoo.registry import Draw, Network, Samples, structure

node = helper.make_node


def network(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, ArrayLike],
    samples: Samples,
    outputs: Mapping[str, Sizes | None] | None = None,
    opset: int = 17,
) -> Network:
    """Return a network whose inputs have the form of the samples; its output is `y` by default."""
    kinds = {name: helper.np_dtype_to_tensor_dtype(v.dtype) for name, v in samples.items()}
    takes = {name: ["N", *values.shape[1:]] for name, values in samples.items()}
    model = assemble(nodes, takes, outputs or {"y": None}, constants, opset, kinds)
    model.ir_version = 10
    return Network(onnx.shape_inference.infer_shapes(model), samples)


@structure("onnxruntime 27845", flows=("file",))
def dequantized_without_zero_point() -> Network:
    draw = Draw()
    levels = np.random.default_rng(0).integers(-127, 128, (8, 16)).astype(np.int8)
    constants = {"shape": np.array([16, 8]), "w": (levels * 0.01).astype(np.float32)}
    nodes = [
        node("Reshape", ["w", "shape"], ["r"]),
        node("Transpose", ["r"], ["t"], perm=[0, 1]),
        node("MatMul", ["x", "t"], ["y"]),
    ]
    samples = {"x": draw.samples(16)}
    exact = network(nodes, constants, samples, opset=21)
    stored = {"q": levels, "s": np.float32(0.01), "shape": np.array([16, 8])}
    nodes = [node("DequantizeLinear", ["q", "s"], ["w"]), *nodes]
    file = network(nodes, stored, samples, opset=21)
    return Network(exact.model, samples, file.model)


@structure("onnxruntime 28130")
def gemm_with_alpha_and_beta() -> Network:
    draw = Draw()
    nodes = [node("Gemm", ["x", "w", "b"], ["y"], alpha=2.0, beta=3.0)]
    return network(nodes, {"w": draw.weights(16, 8), "b": draw.weights(8)}, {"x": draw.samples(16)})


@structure("onnxruntime 28448")
def resize_linear_half_pixel() -> Network:
    draw = Draw()
    mode = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        node("Resize", ["c", "", "scales"], ["r"], **mode),
        node("Conv", ["r", "v"], ["y"]),
    ]
    scales = np.array([1, 1, 2, 2], np.float32)
    constants = {"w": draw.weights(8, 4, 3, 3), "v": draw.weights(3, 8, 1, 1), "scales": scales}
    return network(nodes, constants, {"x": draw.samples(4, 8, 8)})


@structure("onnxsim 749", flows=("onnx weight_only w4", "file"), least_db=15)  # 4 bits
def weights_in_blocks() -> Network:
    draw = Draw()
    levels = [np.random.default_rng(n).integers(-7, 8, (64, 64)) for n in range(2)]
    scale = np.full((2, 64), 0.02, np.float32)
    head, samples = draw.weights(64, 8), {"x": draw.samples(64)}
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Gemm", ["h", "v"], ["g"], transB=1),
        node("MatMul", ["g", "head"], ["y"]),
    ]
    floats = {"w": levels[0] * 0.02, "v": levels[1] * 0.02, "head": head}
    constants = {name: values.astype(np.float32) for name, values in floats.items()}
    exact = network(nodes, constants, samples, opset=21)
    blocks = {"block_size": 32}
    dequantize = [
        node("DequantizeLinear", ["w_q", "scale"], ["w"], axis=0, **blocks),
        node("DequantizeLinear", ["v_q", "scale_t"], ["v"], axis=1, **blocks),
    ]
    stored = {"head": head, "scale": scale, "scale_t": np.ascontiguousarray(scale.T)}
    file = network([*dequantize, *nodes], stored, samples, opset=21).model
    for name, values in zip(("w_q", "v_q"), levels, strict=True):
        tensor = helper.make_tensor(name, TensorProto.INT4, values.shape, values.ravel())
        file.graph.initializer.append(tensor)
    return Network(exact.model, samples, file)


@structure("onnxruntime 25001", flows=("file",))
def int32_dequantized_and_reshaped() -> Network:
    draw, random = Draw(), np.random.default_rng(0)
    levels, bias = random.integers(-127, 128, (16, 8)), random.integers(-1000, 1000, 8)
    samples, shape = {"x": draw.samples(16)}, np.array([1, 8])
    nodes = [
        node("Reshape", ["b", "shape"], ["row"]),
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "row"], ["y"]),
    ]
    floats = {"w": (levels * 0.01).astype("f"), "b": (bias * 0.001).astype("f"), "shape": shape}
    exact = network(nodes, floats, samples)
    stored = {"w_q": levels.astype(np.int8), "w_s": np.float32(0.01), "shape": shape}
    stored |= {"b_q": bias.astype(np.int32), "b_s": np.float32(0.001)}
    dequantize = [node("DequantizeLinear", [f"{n}_q", f"{n}_s"], [n]) for n in "wb"]
    return Network(exact.model, samples, network([*dequantize, *nodes], stored, samples).model)


@structure("onnxruntime 19529", flows=("onnx percentile",))
def mean_of_rank_0() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Abs", ["c"], ["a"]),
        node("ReduceMean", ["a"], ["m"], keepdims=0),
        node("Mul", ["c", "m"], ["y"]),
    ]
    return network(nodes, {"w": draw.weights(4, 3, 3, 3)}, {"x": draw.samples(3, 6, 6)})


def suppression(threshold: float) -> Network:
    """Boxes by a Conv, kept by NonMaxSuppression; a high threshold leaves none."""
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]),
        node("Reshape", ["c", "flat"], ["f"]),
        node("Split", ["f", "parts"], ["boxes_t", "scores"], axis=1),
        node("Transpose", ["boxes_t"], ["boxes"], perm=[0, 2, 1]),
        node("NonMaxSuppression", ["boxes", "scores", "most", "iou", "least"], ["kept"]),
        node("Gather", ["kept", "last"], ["index"], axis=1),
        node("Squeeze", ["boxes", "first"], ["all"]),
        node("Gather", ["all", "index"], ["picked"]),
    ]
    constants = {
        "w": draw.weights(5, 3, 1, 1),
        "b": np.array([2, 2, 6, 6, 1], np.float32),  # corners, away from zero
        "flat": np.array([0, 5, -1]),
        "parts": np.array([4, 1]),
        "most": np.array([3]),
        "iou": np.float32(0.5),
        "least": np.float32(threshold),
        "last": np.array(2),
        "first": np.array([0]),
    }
    outputs = {"boxes": [1, 16, 4], "picked": None}
    made = network(nodes, constants, {"x": draw.samples(3, 4, 4)}, outputs)
    made.model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    return made


@structure("onnxruntime 19544, 21476")
def suppression_with_boxes() -> Network:
    return suppression(-10)


@structure("onnxruntime 19544, 21476")
def suppression_without_a_box() -> Network:
    return suppression(10)


@structure("onnxruntime 24815")
def gemm_with_a_wide_bias() -> Network:
    draw = Draw()
    nodes = [node("Gemm", ["x", "w", "b"], ["y"])]
    constants = {"w": draw.weights(256, 10), "b": draw.weights(1, 10, scale=3)}
    return network(nodes, constants, {"x": draw.samples(256)})


@structure("onnxruntime 21000, 22020, 25278", flows=("tflite", "executorch"))
def channel_without_weights() -> Network:
    draw = Draw()
    kernel, bias = draw.weights(8, 3, 3, 3), draw.weights(8)
    kernel[2], bias[2] = 1e-9 * kernel[2], 5
    kernel[5] = 0
    nodes = [node("Conv", ["x", "w", "b"], ["c"]), node("Conv", ["c", "v"], ["y"])]
    constants = {"w": kernel, "b": bias, "v": draw.weights(4, 8, 1, 1)}
    return network(nodes, constants, {"x": draw.samples(3, 8, 8)}, {"y": None, "c": None})


@structure("onnxruntime 11415")
def depthwise_with_dead_channels() -> Network:
    draw = Draw()
    kernel = draw.weights(8, 1, 5, 5)
    kernel[::3] *= 1e-4
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], group=8, pads=[2] * 4),
        node("HardSwish", ["c"], ["h"]),
        node("Conv", ["h", "v"], ["y"]),
    ]
    constants = {"w": kernel, "b": draw.weights(8), "v": draw.weights(4, 8, 1, 1)}
    return network(nodes, constants, {"x": draw.samples(8, 8, 8)})


@structure("onnxruntime 5586")
def clip_with_a_maximum_alone() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Clip", ["c", "", "high"], ["r"]),
        node("Conv", ["r", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(8, 3, 3, 3), "v": draw.weights(4, 8, 1, 1)}
    return network(nodes, constants | {"high": np.float32(0.3)}, {"x": draw.samples(3, 8, 8)})


@structure("onnxruntime 5586")
def clip_with_a_computed_minimum() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Mul", ["half", "half"], ["low"]),
        node("ReduceMin", ["high_of"], ["high"], keepdims=0),
        node("Clip", ["c", "low", "high"], ["r"]),
        node("Conv", ["r", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(8, 3, 3, 3), "v": draw.weights(4, 8, 1, 1)}
    constants |= {"half": np.float32(-0.3), "high_of": np.array([2, 0.5], np.float32)}
    return network(nodes, constants, {"x": draw.samples(3, 8, 8)})


@structure("onnxruntime 7105, 7507")
def shared_bias_and_empty_names() -> Network:
    draw = Draw()
    nodes = [
        node("Gemm", ["x", "w", "b"], ["h"], name=""),
        node("Relu", ["h"], ["r"], name=""),
        node("Gemm", ["r", "v", "b"], ["y"], name=""),
    ]
    constants = {"w": draw.weights(8, 8), "v": 20 * draw.weights(8, 8), "b": draw.weights(8)}
    return network(nodes, constants, {"x": draw.samples(8)})


@structure("onnxruntime 21277")
def tied_table() -> Network:
    draw = Draw()
    nodes = [
        node("Gather", ["table", "ids"], ["rows"]),
        node("MatMul", ["rows", "w"], ["h"]),
        node("Relu", ["h"], ["r"]),
        node("Transpose", ["table"], ["words"], perm=[1, 0]),
        node("MatMul", ["r", "words"], ["y"]),
    ]
    constants = {"table": draw.weights(50, 16), "w": draw.weights(16, 16)}
    return network(nodes, constants, {"ids": draw.integers(50, 6)})


@structure("onnxruntime 19694")
def conv_transpose_to_more_channels() -> Network:
    draw = Draw()
    nodes = [
        node("ConvTranspose", ["x", "w", "b"], ["t"], strides=[2, 2]),
        node("Conv", ["t", "v"], ["y"]),
    ]
    kernel = draw.weights(3, 64, 2, 2) * np.geomspace(0.1, 10, 64)[:, np.newaxis, np.newaxis]
    constants = {"w": kernel.astype("f"), "b": draw.weights(64), "v": draw.weights(4, 64, 1, 1)}
    return network(nodes, constants, {"x": draw.samples(3, 6, 6)})


@structure("onnxruntime 19694")
def conv_transpose_in_groups() -> Network:
    draw = Draw()
    nodes = [
        node("ConvTranspose", ["x", "w", "b"], ["t"], strides=[2, 2], group=3),
        node("Conv", ["t", "v"], ["y"]),
    ]
    constants = {
        "w": draw.weights(6, 4, 2, 2),
        "b": draw.weights(12),
        "v": draw.weights(4, 12, 1, 1),
    }
    return network(nodes, constants, {"x": draw.samples(6, 6, 6)})


@structure("onnxruntime 25489", flows=("tflite",))
def product_with_a_matrix_for_each_head() -> Network:
    draw = Draw()
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "v"], ["y"])]
    constants = {"w": draw.weights(4, 16, 24), "v": draw.weights(24, 8)}
    return network(nodes, constants, {"x": draw.samples(4, 12, 16)})


@structure("onnxruntime 15465")
def lstm_in_two_directions() -> Network:
    draw = Draw()
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        node(
            "LSTM",
            ["t", "w", "r", "b", "lengths"],
            ["", "h"],
            hidden_size=8,
            direction="bidirectional",
        ),
        node("Transpose", ["h"], ["s"], perm=[1, 0, 2]),
        node("Flatten", ["s"], ["f"]),
        node("Gemm", ["f", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(2, 32, 6), "r": draw.weights(2, 32, 8), "b": draw.weights(2, 64)}
    samples = {"x": draw.samples(5, 6), "lengths": (1 + draw.integers(5)).astype(np.int32)}
    return network(nodes, constants | {"v": draw.weights(16, 4)}, samples)


@structure("nncf 3843")
def both_edges_of_a_node() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"]),
        node("Mul", ["a", "a"], ["square"]),
        node("Sub", ["a", "a"], ["zero"]),
        node("Add", ["square", "zero"], ["s"]),
        node("Concat", ["s", "s"], ["twice"], axis=1),
        node("Conv", ["twice", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(4, 3, 3, 3), "b": draw.weights(4), "v": draw.weights(4, 8, 1, 1)}
    return network(nodes, constants, {"x": draw.samples(3, 8, 8)})


def same_padding(mode: str) -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], auto_pad=mode),
        node("Relu", ["c"], ["r"]),
        node("Conv", ["r", "v"], ["y"], auto_pad=mode, strides=[2, 2]),
    ]
    constants = {
        "w": draw.weights(8, 1, 32, 1),
        "b": draw.weights(8),
        "v": draw.weights(4, 8, 4, 2),
    }
    return network(nodes, constants, {"x": draw.samples(1, 40, 3)})


@structure("executorch 20517, 20558")
def same_upper_with_an_even_kernel() -> Network:
    return same_padding("SAME_UPPER")


@structure("executorch 20517, 20558")
def same_lower_with_an_even_kernel() -> Network:
    return same_padding("SAME_LOWER")


@structure("executorch 17166")
def relu_of_a_product() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"]),
        node("Conv", ["x", "v", "b"], ["c"]),
        node("Mul", ["a", "c"], ["m"]),
        node("Relu", ["m"], ["r"]),
        node("Conv", ["r", "u"], ["y"]),
    ]
    constants = {"w": draw.weights(8, 3, 3, 3), "v": draw.weights(8, 3, 3, 3)}
    constants |= {"b": draw.weights(8), "u": draw.weights(4, 8, 1, 1)}
    return network(nodes, constants, {"x": draw.samples(3, 8, 8)})


@structure("executorch 18569")
def concat_of_seven_branches() -> Network:
    draw = Draw()
    names = [f"c{n}" for n in range(7)]
    constants = {f"w{n}": draw.weights(2, 3, 1, 1) for n in range(7)} | {
        "v": draw.weights(4, 14, 1, 1)
    }
    nodes = [node("Conv", ["x", f"w{n}"], [f"c{n}"]) for n in range(7)]
    nodes += [node("Concat", names, ["all"], axis=1), node("Conv", ["all", "v"], ["y"])]
    return network(nodes, constants, {"x": draw.samples(3, 8, 8)})


@structure("executorch 18185")
def conv_transpose_with_output_padding() -> Network:
    draw = Draw()
    window = {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]}
    nodes = [
        node("Conv", ["x", "u"], ["c"]),
        node("ConvTranspose", ["c", "w", "b"], ["y"], **window),
    ]
    constants = {"u": draw.weights(4, 3, 1, 1), "w": draw.weights(4, 6, 3, 3), "b": draw.weights(6)}
    return network(nodes, constants, {"x": draw.samples(3, 6, 6)})


@structure(
    "PINTO_model_zoo 352", flows=("onnx percentile", "tflite percentile", "tflite corrected")
)
def outputs_with_fixed_scales() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]),
        node("Sigmoid", ["c"], ["s"]),
        node("Conv", ["s", "v"], ["d"]),
        node("Tanh", ["d"], ["t"]),
        node("Flatten", ["t"], ["f"]),
        node("Gemm", ["f", "u"], ["g"]),
        node("Softmax", ["g"], ["y"]),
    ]
    constants = {
        "w": 4 * draw.weights(8, 3, 3, 3),
        "b": draw.weights(8),
        "v": 3 * draw.weights(4, 8, 3, 3),
    }
    return network(nodes, constants | {"u": draw.weights(64, 5)}, {"x": draw.samples(3, 8, 8)})


@structure("tensorflow 33588")
def mean_over_channels() -> Network:
    draw = Draw()
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]),
        node("ReduceMean", ["c"], ["m"], axes=[1]),
        node("Mul", ["c", "m"], ["g"]),
        node("ReduceMean", ["g"], ["whole"], axes=[1, 2, 3]),
        node("Add", ["g", "whole"], ["s"]),
        node("Conv", ["s", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(8, 3, 3, 3), "b": draw.weights(8), "v": draw.weights(4, 8, 1, 1)}
    return network(nodes, constants, {"x": draw.samples(3, 8, 8)})


@structure("pytorch 183528, 99424, onnxruntime 16203", flows=("openvino", "torch fx"))
def average_pool_in_ceil_mode() -> Network:
    draw = Draw()
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]),
        node("AveragePool", ["c"], ["p"], ceil_mode=1, count_include_pad=1, **window),
        node("Conv", ["p", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(8, 3, 1, 1), "b": draw.weights(8), "v": draw.weights(4, 8, 1, 1)}
    return network(nodes, constants, {"x": draw.samples(3, 4, 4)}, opset=19)


@structure("pytorch 183528, 99424, onnxruntime 16203", flows=("openvino", "torch fx"))
def max_pool_with_a_window_of_padding() -> Network:
    draw = Draw()
    window = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1] * 4, "ceil_mode": 1}
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]),
        node("MaxPool", ["c"], ["p"], **window),
        node("Conv", ["p", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(8, 3, 1, 1), "b": draw.weights(8), "v": draw.weights(4, 8, 1, 1)}
    return network(nodes, constants, {"x": draw.samples(3, 5, 5)})


@structure("onnx2tf 16")
def conv_transpose_and_batch_norm() -> Network:
    draw = Draw()
    nodes = [
        node("ConvTranspose", ["x", "w", "b"], ["t"], strides=[2, 2]),
        node("BatchNormalization", ["t", "scale", "shift", "mean", "var"], ["n"]),
        node("Relu", ["n"], ["r"]),
        node("Conv", ["r", "v"], ["y"]),
    ]
    constants = {"w": draw.weights(3, 8, 2, 2), "b": draw.weights(8), "v": draw.weights(4, 8, 1, 1)}
    constants |= {"scale": 1 + draw.weights(8), "shift": draw.weights(8), "mean": draw.weights(8)}
    return network(nodes, constants | {"var": 1 + draw.weights(8)}, {"x": draw.samples(3, 6, 6)})
