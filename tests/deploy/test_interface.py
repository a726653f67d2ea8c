"""What the model card says of the inputs and outputs of a file."""

from pathlib import Path

import numpy as np
import pytest

from resnet8ptq.deploy import interface
from resnet8ptq.deploy.vectors import Vectors


def read(dtype: type, scale: float, zero_point: int) -> interface.FileTensor:
    detail = {"dtype": dtype, "shape": [1, 4], "quantization": (scale, zero_point)}
    return interface._of_tflite(detail, "x")


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_])
def test_a_tensor_that_is_not_quantized_has_no_scale(dtype):
    tensor = read(dtype, 0.0, 0)
    assert (tensor.scale, tensor.zero_point) == (None, None)


@pytest.mark.parametrize(("dtype", "ends"), [(np.int8, "-128, 127"), (np.int16, "-32768, 32767")])
def test_a_quantized_tensor_has_the_ends_of_its_integers(dtype, ends):
    tensor = read(dtype, 0.5, 3)
    assert (tensor.scale, tensor.zero_point, tensor.ends) == (0.5, 3, ends)


def test_an_output_without_a_file_of_names_has_the_dtype_of_its_vectors():
    inputs = np.zeros((2, 4), np.float32)
    vectors = Vectors(inputs, inputs, (np.zeros(2, np.int64),), (0.0,))
    described = interface.read_interface(Path("model.pt"), vectors, ["class"])
    assert [output.dtype for output in described.outputs] == ["int64"]
