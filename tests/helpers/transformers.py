"""A tiny transformer in ONNX: one encoder layer on the rows of a picture, as exporters write it."""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from tests.helpers.assembling import assemble

TOKENS, WIDTH, HIDDEN, CLASSES = 8, 6, 12, 3
LAYERS = ["embed", "query", "key", "value", "out", "up", "down", "head"]
PRODUCTS = ["block.scores", "block.mixed"]


def build(mask: float | None = None, opset: int = 17) -> onnx.ModelProto:
    """Return a network from pictures [N, 3, 8, 6] to logits [N, 3].

    Args:
        mask: constant that is added to the scores of the last token.
    """
    random = np.random.default_rng(0)
    tensors: dict[str, NDArray] = {
        name: random.normal(0, 0.4, shape).astype(np.float32)
        for name, shape in {
            "embed.w": (18, WIDTH),
            **{f"{name}.w": (WIDTH, WIDTH) for name in ("query", "key", "value", "out")},
            "up.w": (WIDTH, HIDDEN),
            "up.b": (HIDDEN,),
            "down.w": (HIDDEN, WIDTH),
            "head.w": (WIDTH, CLASSES),
        }.items()
    }
    for name in ("n1", "n2"):
        tensors[f"{name}.gamma"] = np.array([9, 0.2, 1, 1, 0.1, 1], np.float32)  # outliers
        tensors[f"{name}.beta"] = random.normal(0, 0.1, WIDTH).astype(np.float32)
    tensors |= {
        "rows": np.array([-1, TOKENS, 18]),
        "scale": np.float32(WIDTH**-0.5),
        "root": np.float32(2**0.5),
        "one": np.float32(1),
        "half": np.float32(0.5),
    }
    masked = "scaled"
    nodes = [
        ("Reshape", "rows_of", ["pixels", "rows"]),
        ("MatMul", "embed", ["rows_of", "embed.w"]),
        ("LayerNormalization", "n1", ["embed", "n1.gamma", "n1.beta"]),
        *(("MatMul", name, ["n1", f"{name}.w"]) for name in ("query", "key", "value")),
        ("Transpose", "turned", ["key"]),
        ("MatMul", "block/scores", ["query", "turned"]),
        ("Mul", "scaled", ["block/scores", "scale"]),
    ]
    if mask is not None:
        tensors["mask"] = np.array([0] * (TOKENS - 1) + [mask], np.float32)
        nodes.append(("Add", masked := "masked", ["scaled", "mask"]))
    nodes += [
        ("Softmax", "weights", [masked]),
        ("MatMul", "block/mixed", ["weights", "value"]),
        ("MatMul", "out", ["block/mixed", "out.w"]),
        ("Add", "sum1", ["embed", "out"]),
        ("LayerNormalization", "n2", ["sum1", "n2.gamma", "n2.beta"]),
        ("MatMul", "up", ["n2", "up.w"]),
        ("Add", "biased", ["up.b", "up"]),
        ("Div", "divided", ["biased", "root"]),
        ("Erf", "erf", ["divided"]),
        ("Add", "shifted", ["erf", "one"]),
        ("Mul", "gated", ["biased", "shifted"]),
        ("Mul", "gelu", ["gated", "half"]),
        ("MatMul", "down", ["gelu", "down.w"]),
        ("Add", "sum2", ["sum1", "down"]),
        ("ReduceMean", "mean", ["sum2"]),
        ("Gemm", "head", ["mean", "head.w"]),
    ]
    options = {"turned": {"perm": [0, 2, 1]}, "mean": {"axes": [1], "keepdims": 0}}
    made = [
        helper.make_node(kind, inputs, [name], name, **options.get(name, {}))
        for kind, name, inputs in nodes
    ]
    sides = {"pixels": ["N", 3, 8, 6]}, {"head": ["N", CLASSES]}
    proto = assemble(made, *sides, tensors, opset)
    onnx.checker.check_model(proto)
    return proto
