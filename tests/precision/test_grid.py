"""The grids against ONNX Runtime's own quantization of the same weights."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto
from onnxruntime.quantization.quant_utils import get_qmin_qmax_for_qType, quantize_data

from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme, fit_bias
from tests.helpers.configs import make_config

TYPES = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8}
SCHEMES = [
    WeightScheme(dtype, symmetric=symmetric, reduce_range=reduced)
    for dtype, symmetric, reduced in product(TYPES, (True, False), (True, False))
]
scheme = st.sampled_from(SCHEMES)
# float32 tells 256 levels of these apart: nothing between zero and 2**-20.
size = st.floats(2.0**-20, 2.0**20, width=32)
weights = arrays.arrays(
    np.float32, (3, 2, 4), elements=st.one_of(st.just(0.0), size, size.map(lambda x: -x))
)


def test_levels_are_those_of_onnxruntime():
    for scheme in SCHEMES:
        arguments = TYPES[scheme.dtype], scheme.reduce_range, scheme.symmetric
        assert scheme.levels == tuple(map(int, get_qmin_qmax_for_qType(*arguments)))


@given(scheme, weights)
def test_a_grid_is_that_of_onnxruntime(scheme, weights):
    arguments = TYPES[scheme.dtype], scheme.symmetric, scheme.reduce_range
    zero_point, scale, levels = quantize_data(weights, *arguments)
    grid = scheme.grid(weights, 0)
    levels = np.clip(levels, *scheme.levels)  # theirs may leave a reduced range by one
    assert (grid.scale.dtype, grid.zero_point.dtype) == (np.float32, np.int64)
    assert grid.scale.item() == scale
    exact = (levels.astype(np.int64) - zero_point.astype(np.int64)) * scale
    np.testing.assert_array_equal(grid.round(weights), exact.astype(np.float32))
    if weights.any():  # where all are zero, any zero_point will do
        assert grid.zero_point.item() == zero_point
        np.testing.assert_array_equal(grid.quantize(weights), levels)


@pytest.mark.parametrize(("sign", "zero_point"), [(1, 0), (-1, 255)])
def test_weights_of_one_sign_leave_zero_at_the_end(sign, zero_point):
    weights = np.array([[0.5, 0.75]], np.float32) * sign
    grid = WeightScheme("uint8", symmetric=False).grid(weights, 0)
    assert (grid.scale.item(), grid.zero_point.item()) == (np.float32(0.75 / 255), zero_point)


@given(scheme, weights, st.integers(-3, 2))
@settings(max_examples=50)
def test_a_grid_of_channels_is_one_for_each(scheme, weights, axis):
    weight_scheme = WeightScheme(scheme.dtype, True, scheme.symmetric, scheme.reduce_range)
    rounded = weight_scheme.grid(weights, axis).round(weights)
    for result, channel in zip(
        np.moveaxis(rounded, axis, 0), np.moveaxis(weights, axis, 0), strict=True
    ):
        np.testing.assert_array_equal(result, scheme.grid(channel, 0).round(channel))


@given(scheme, weights, st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_a_value_on_the_grid_keeps_its_level(scheme, weights, seed):
    grid = scheme.grid(weights, 0)
    levels = np.random.default_rng(seed).integers(grid.lowest, grid.highest + 1, 50)
    values = grid.dequantize(levels.reshape(5, 5, 2))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(grid.quantize(values), levels.reshape(5, 5, 2))
    beyond = (grid.dequantize(np.array([[[grid.lowest, grid.highest]]])) * 2).astype(np.float32)
    assert grid.lowest <= grid.quantize(beyond).min() <= grid.quantize(beyond).max() <= grid.highest


def test_levels_below_8_bits_are_never_reduced():
    for dtype, lowest, highest in (("int4", -8, 7), ("int3", -4, 3), ("int2", -2, 1)):
        for reduced in (False, True):
            assert WeightScheme(dtype, True, True, reduced).levels == (-highest, highest)
            assert WeightScheme(dtype, True, False, reduced).levels == (lowest, highest)
    schemes = {dtype: WeightScheme(dtype) for dtype in ("int8", "uint8", "int4", "int3", "int2")}
    assert [scheme.bits for scheme in schemes.values()] == [8, 8, 4, 3, 2]
    assert [dtype for dtype, scheme in schemes.items() if scheme.clips] == ["int4", "int3", "int2"]


@given(st.sampled_from(["int4", "int3", "int2"]), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_below_8_bits_the_range_is_the_share_of_least_squared_error(dtype, per_channel, seed):
    """From all of the largest weight to 30% of it, by hundredths."""
    weights = np.random.default_rng(seed).standard_t(3, (3, 40)).astype(np.float32)
    scheme = WeightScheme(dtype, per_channel)
    highest, shares = scheme.levels[1], 1 - np.arange(71) / 100
    grid = scheme.grid(weights, 0)
    assert not grid.zero_point.any()
    for scale, rows in zip(grid.scale, weights if per_channel else [weights], strict=True):
        full = np.abs(rows).max() / highest
        errors = [
            np.square(np.clip(np.round(rows / tried), -highest, highest) * tried - rows).sum()
            for tried in [scale.item(), *(full * shares)]
        ]
        assert errors[0] <= min(errors) * (1 + 1e-5)
        assert np.abs(scale.item() / full - shares).min() < 1e-5


@pytest.mark.parametrize(("steps", "scale"), [(126, 1), (127, np.finfo(np.float32).tiny)])
def test_a_channel_too_small_for_a_scale_counts_as_zeros(steps, scale):
    tiny = np.full((1, 2), steps * np.finfo(np.float32).tiny, np.float32)
    assert WeightScheme("int8").grid(tiny, 0).scale.item() == scale


@pytest.mark.parametrize(
    ("dtype", "per_channel", "asked", "weight_dtype", "symmetric"),
    [
        ("int8", "false", "null", "int8", True),
        ("u8s8", "false", "null", "int8", True),
        ("uint8", "false", "null", "uint8", False),
        ("uint8", "true", "null", "uint8", True),
        ("uint8", "false", "true", "uint8", True),
        ("int8", "false", "false", "int8", False),
        ("int8", "true", "true", "int8", True),
    ],
)
def test_weights_are_symmetric_in_int8_and_by_channel_unless_reported(
    dtype, per_channel, asked, weight_dtype, symmetric
):
    settings = f"dtype={dtype}", f"per_channel={per_channel}", f"symmetric.weights={asked}"
    expected = WeightScheme(weight_dtype, per_channel == "true", symmetric, False)
    assert WeightScheme.of(make_config(*settings)) == expected


def test_no_convolution_takes_affine_channels():
    with pytest.raises(UnsupportedError, match=r"^symmetric\.weights=false with per_channel=true"):
        WeightScheme.of(make_config("per_channel=true", "symmetric.weights=false"))


def test_activations_have_even_steps_around_a_zero_in_the_middle():
    assert WeightScheme("int8") == WeightScheme("int8", False, True, False)
    assert ActivationScheme() == ActivationScheme(8, False)
    steps = [ActivationScheme(bits, symmetric).steps for bits in (8, 7) for symmetric in (0, 1)]
    assert steps == [255, 254, 127, 126]


@given(
    size=st.floats(1e-12, 10),
    bias=st.floats(-100, 100),
    scale=st.floats(1e-4, 1),
    per_channel=st.booleans(),
)
def test_bias_fits_in_32_bits(size, bias, scale, per_channel):
    weights = (size * np.array([[1, -0.5], [0, 0], [3, 2]])).astype(np.float32)
    biases = np.array([bias, -bias, 0], np.float32)
    fitted = fit_bias(weights, biases, scale, per_channel)
    assert fitted.shape == weights.shape
    steps = WeightScheme("int8", per_channel).grid(fitted, 0).scale.reshape(-1) * scale
    assert (np.abs(biases) <= steps * 2**31).all()
    added = np.abs(fitted - weights).max() * 255 * scale
    assert added <= np.abs(bias) * 2**-14
