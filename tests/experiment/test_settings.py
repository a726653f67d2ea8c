"""Settings that the network's file decides."""

import numpy as np
import onnx
from onnx import helper

from resnet8ptq.experiment.settings import settle
from tests.helpers.assembling import assemble
from tests.helpers.configs import make_config


def test_arrays_with_the_names_of_the_networks_inputs_fill_them(tmp_path):
    nodes = [
        helper.make_node("Mul", ["x", "mask"], ["masked"]),
        helper.make_node("MatMul", ["masked", "weights"], ["y"]),
    ]
    sides = {"x": ["N", 4], "mask": ["N", 4]}, {"y": ["N", 2]}
    onnx.save(
        assemble(nodes, *sides, {"weights": np.eye(4, 2, dtype=np.float32)}), tmp_path / "a.onnx"
    )
    ones = np.ones((8, 4), np.float32)
    np.savez(tmp_path / "a.npz", x_train=ones, mask_train=ones, x_test=ones, mask_test=ones)
    paths = [f"model.path={tmp_path / 'a.onnx'}", f"data.root={tmp_path / 'a.npz'}"]
    settings = settle(make_config("data=arrays", *paths, f"cache_dir={tmp_path / 'cache'}"))
    assert settings.config.data.inputs == {"x": "x", "mask": "mask"}
