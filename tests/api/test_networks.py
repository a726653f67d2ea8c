"""A network of a Python call as the file that a run reads."""

from typing import Any

import numpy as np
import pytest
import torch
from onnx import parser

from resnet8ptq.api.networks import find_network, list_inputs
from resnet8ptq.core.errors import ModelError


@pytest.fixture(scope="module")
def keras() -> Any:
    """Keras, which each process of the tests would take seconds to import at the top."""
    return pytest.importorskip("keras")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras's own, on NumPy 2
def test_a_keras_model_is_written_as_keras_writes_it(keras, tmp_path):
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(2)])
    [word] = find_network(model, None, {}, tmp_path)
    assert word.endswith("model.keras") and len(list_inputs(model)) == 1


@pytest.mark.parametrize("kind", ["weight", "buffer", "tensor"])
def test_modules_of_other_values_are_other_files(kind, tmp_path):
    class Scaled(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            value = torch.tensor([scale])
            if kind == "weight":
                self.scale = torch.nn.Parameter(value)
            elif kind == "buffer":
                self.register_buffer("scale", value, persistent=False)
            else:
                self.scale = value

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    few = {"x": np.zeros((2, 3), np.float32)}
    [first], [second], [again] = (
        find_network(Scaled(scale), None, few, tmp_path) for scale in (1.0, 2.0, 1.0)
    )
    assert first != second
    assert first == again


def test_a_module_in_bfloat16_is_read_in_float32(tmp_path):
    few = {"x": np.zeros((2, 3), np.float32)}
    [word] = find_network(torch.nn.Linear(3, 2).bfloat16(), None, few, tmp_path)
    assert word.endswith("model.pt2")


def test_a_keras_model_with_code_of_the_user_is_refused(keras, tmp_path):
    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    for layer in (Twice(), keras.layers.Lambda(lambda x: 2 * x)):
        model = keras.Sequential([keras.Input((4,)), layer])
        with pytest.raises(ModelError, match=r"not Keras's .* model\.export\(FOLDER\)"):
            find_network(model, None, {}, tmp_path)


def test_constants_among_the_inputs_of_an_onnx_model_are_no_inputs():
    model = parser.parse_model("""
        <ir_version: 3, opset_import: ["" : 11]>
        g (float[2] w = {1, 2}, float[N, 2] x, float[N, 2] y) => (float[N, 2] z) {
            scaled = Mul(x, w)
            z = Add(scaled, y)
        }""")
    assert list_inputs(model) == ["x", "y"]
    assert list_inputs(model.graph) == []  # a part of a model names no inputs
