import torch

from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan
from resnet8ptq.simulation import network
from tests.helpers.product_networks import split_network


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
