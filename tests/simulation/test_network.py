import numpy as np
import onnx
import torch
from onnx import helper

from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan
from resnet8ptq.simulation import network
from tests.helpers.assembling import assemble


def split_network(path):
    """Two halves of a convolution's channels are added and classified."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("Split", ["c"], ["left", "right"], "split", axis=1),
        helper.make_node("Add", ["left", "right"], ["m"], "add"),
        helper.make_node("GlobalAveragePool", ["m"], ["g"], "pool"),
        helper.make_node("Flatten", ["g"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "v"], ["l"], "dense"),
        helper.make_node("Softmax", ["l"], ["y"], "softmax", axis=-1),
    ]
    constants = {
        "w": random.normal(size=(4, 3, 3, 3)).astype(np.float32) / 5,
        "v": random.normal(size=(2, 5)).astype(np.float32),
    }
    onnx.save(assemble(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5]}, constants), path)
    return random.normal(size=(4, 3, 8, 8)).astype(np.float32)


def build(path, skipped):
    ranges = dict.fromkeys(("x", "c", "left", "right", "m", "g", "f", "l"), (-8.0, 8.0))
    plan = Plan(WeightScheme("int8"))
    return network.build_student(path, skipped, ranges, plan, ActivationScheme(), True)


def test_the_parts_of_a_split_have_the_scale_of_its_input(tmp_path):
    path = tmp_path / "split.onnx"
    samples = torch.from_numpy(split_network(path))
    student = build(path, skipped=[])
    for part in ("left", "right"):
        assert student.quantizers[part] is student.quantizers["c"]
    exact = network.load_logits(path)(samples)
    assert 0 < (student.module(samples) - exact).abs().max() < 0.1


def test_each_part_of_a_split_in_float_has_a_scale_of_its_own(tmp_path):
    path = tmp_path / "split.onnx"
    samples = torch.from_numpy(split_network(path))
    student = build(path, skipped=["split"])
    kept = {id(student.quantizers[name]) for name in ("c", "left", "right")}
    assert len(kept) == 3
    exact = network.load_logits(path)(samples)
    assert 0 < (student.module(samples) - exact).abs().max() < 0.1
