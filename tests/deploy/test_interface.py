"""What the model card says of the inputs and outputs of a file."""

import numpy as np
import pytest

from resnet8ptq.deploy import interface


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
