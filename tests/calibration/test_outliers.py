"""Samples far beyond all others are named, and ordinary ones never are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper, parser

from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.methods import SHARED
from resnet8ptq.calibration.outliers import LEAST, RATIO, Outliers, find_in_inputs, find_outliers
from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core import memory
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.core.records import pack
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.fields import Field, Fields
from resnet8ptq.data.lazy import LazySamples
from tests.helpers.configs import make_config
from tests.helpers.factories import runtime_of

peaks = st.lists(st.floats(1, 15, width=32), min_size=LEAST, max_size=60)
scales = st.sampled_from([1e-30, 1.0, 1e30])


@given(
    ordinary=peaks, factors=st.lists(st.floats(16.1, 1e6), max_size=3), scale=scales, data=st.data()
)
def test_exactly_the_samples_beyond_a_gap_are_named(ordinary, factors, scale, data):
    factors = factors[: max(1, len(ordinary) // 20)]
    damaged = [max(ordinary) * factor for factor in factors]
    every = np.array([*ordinary, *damaged]) * scale
    order = np.array(data.draw(st.permutations(range(len(every)))))
    outliers = find_outliers("x", every[order])
    if not factors:
        assert outliers is None
        return
    assert outliers is not None
    assert sorted(order[list(outliers.samples)]) == [*range(len(ordinary), len(every))]
    assert outliers.ratio == pytest.approx(min(factors))


@given(
    tail=st.lists(st.floats(1, RATIO - 0.1), min_size=LEAST, max_size=60), zeros=st.integers(0, 99)
)
def test_a_heavy_tail_and_black_pictures_are_ordinary(tail, zeros):
    """Each is less than `RATIO` times as large as the next, the largest beyond all float32."""
    every = np.concatenate([np.cumprod(np.array(tail)), np.zeros(zeros)])
    assert find_outliers("x", every) is None


@pytest.mark.parametrize(
    "ordinary",
    [
        np.ones(LEAST - 2),  # too few to compare with
        np.zeros(100),  # no scale to compare with
        np.concatenate([np.zeros(100), np.ones(LEAST - 2)]),
    ],
)
def test_one_sample_is_no_outlier_of_few(ordinary):
    assert find_outliers("x", np.append(ordinary, 1e6)) is None


def test_a_kind_of_sample_is_no_outlier():
    """As padded texts are, which a mask stretches: 6 of 100."""
    assert find_outliers("x", np.append(np.ones(94), np.full(6, 1e4))) is None
    assert find_outliers("x", np.append(np.ones(95), np.full(5, 1e4))) is not None


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_sample_without_numbers_is_named_beside_a_large_one(wrong):
    every = np.ones(100)
    every[[7, 8]] = wrong, 1e6
    outliers = find_outliers("x", every)
    assert outliers is not None
    assert outliers.samples == (7, 8)
    every[8] = 1
    alone = find_outliers("x", every)
    assert alone is not None
    assert alone.samples == (7,)
    assert np.isinf(alone.ratio)


# Messages


def test_a_sample_is_named_by_its_index_in_the_data_or_by_its_file():
    split = Split(np.arange(40), None, "own.npz").take(np.arange(3, 40)).take(np.arange(2, 30))
    assert split.name_of(1) == "sample 6 of own.npz"
    named = replace(split, stored=LazySamples(np.arange(40), np.arange(40)))
    named = replace(named, names=np.array([f"{n}.png" for n in range(40)], np.object_))
    assert named.take(np.arange(5, 9)).name_of(2) == "7.png"


@pytest.mark.parametrize(
    ("ratio", "total", "method", "clip"),
    [
        (100.0, 1000, "minmax", "calib=percentile calib.percentile=99.7"),
        (100.0, 1000, "percentile", "calib=percentile calib.percentile=99.7"),
        (1e4, 1000, "minmax", ""),  # bins of a histogram are too wide
        (np.inf, 1000, "minmax", ""),
        (100.0, 50, "minmax", ""),  # would clip the others
    ],
)
def test_a_percentile_is_advised_where_it_clips_nothing_else(ratio, total, method, clip):
    outliers, calib = Outliers("x", (3,), ratio, total), CalibConfig(name=method)
    assert outliers.clip(calib) == clip
    assert clip in outliers.mend(calib)
    if clip:
        tight = CalibConfig(name="percentile", percentile=99.7)
        assert outliers.clip(tight) == ""


# In the inputs, and in the network


def write_network(path: Path) -> Path:
    """1 / x, which is large where x is small; and a tensor whose first axis is not the samples'."""
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> network (float[N, 4] x) => (float[N, 4] y)
        { inverse = Reciprocal(x)  turned = Transpose <perm = [1, 0]> (inverse)
          apart = Abs(turned)  y = Neg(inverse) }"""
    )
    for node in proto.graph.node:
        node.name = node.op_type
    onnx.save(proto, path)
    return path


def activations_of(folder: Path, samples: np.ndarray, *overrides: str) -> Activations:
    config = make_config("data=shapes", f"cache_dir={folder / 'cache'}", "threads=1", *overrides)
    split = Split(samples, None, "made")
    network = write_network(folder / "network.onnx")
    return Activations(network, split, config.calib, runtime_of(config))


def draw(damaged: Sequence[int], value: float, count: int = 50) -> np.ndarray:
    samples = np.random.default_rng(0).uniform(1, 2, (count, 4)).astype(np.float32)
    samples[damaged, 2] = value
    return samples


@pytest.mark.parametrize("method", SHARED)
@pytest.mark.parametrize("at_once", [1, 4, 7, 50])
def test_calibration_names_the_first_tensor_whose_sample_stands_out(
    tmp_path, method, at_once, monkeypatch
):
    """With 4 at once, the transposed tensor has as many rows as samples, which they are not."""
    if at_once == 1:
        monkeypatch.setattr(memory, "step", lambda: 1)  # byte: one sample at once, in parts
    words = (f"calib={method}", f"calib.batch_size={at_once}")
    activations = activations_of(tmp_path, draw([31], -1e-3, count=52), *words)
    assert activations.outliers() == []  # before calibration
    activations.find_around([])
    [outliers] = activations.outliers()
    assert (outliers.tensor, outliers.samples) == ("inverse", (31,))
    assert outliers.ratio == pytest.approx(1000, rel=0.1)


def test_a_network_of_single_samples_is_observed_one_by_one(tmp_path):
    activations = activations_of(tmp_path, draw([31], 1e-3))
    proto = onnx.load(activations.onnx_path)
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(proto, activations.onnx_path)
    single = replace(activations, calibration=replace(activations.calibration, at_once=1))
    single.find_around([])
    [outliers] = single.outliers()
    assert (outliers.tensor, outliers.samples) == ("inverse", (31,))


@pytest.mark.parametrize("method", SHARED)
def test_ordinary_samples_are_not_named(tmp_path, method):
    activations = activations_of(tmp_path, draw([], 0), f"calib={method}")
    activations.find_around([])
    assert activations.outliers() == []
    assert list(find_in_inputs(activations.calibration, ["x"])) == []


def test_the_error_of_an_infinite_activation_names_the_sample(tmp_path):
    activations = activations_of(tmp_path, draw([31], 0.0))
    with pytest.raises(QuantizationError, match=r"inverse.* in sample 31 of made"):
        activations.find_around([])


def test_the_warning_names_sample_and_tensor(tmp_path, caplog):
    activations_of(tmp_path, draw([31], 1e4)).find_around([])
    [record] = [r for r in caplog.records if r.name == "resnet8ptq.calibration.outliers"]
    assert "x is at least 5," in record.getMessage()
    assert "sample 31 of made" in record.getMessage()


def test_a_sample_of_another_length_is_named_by_its_own_index(tmp_path):
    """Batches hold samples of one length, the longest first."""
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> network
        (float[N, L] x, int64[N, L] mask) => (float[N, L] y, int64[N, L] same)
        { inverse = Reciprocal(x)  y = Neg(inverse)  same = Identity(mask) }"""
    )
    onnx.save(proto, tmp_path / "network.onnx")
    lengths = 1 + np.arange(50) % 4
    mask = (np.arange(4) < lengths[:, None]).astype(np.int64)
    values = draw([], 0)
    values[31, 0] = 1e-3
    inputs = (Field("x", "float32"), Field("mask", "int64"))
    fields = Fields(inputs, mask="mask", any_length=("x", "mask"))
    split = Split(pack({"x": (values * mask).astype(np.float32), "mask": mask}), None, "made")
    config = make_config("data=shapes", f"cache_dir={tmp_path / 'cache'}", "threads=1")
    split = replace(split, fields=fields)
    path = tmp_path / "network.onnx"
    activations = Activations(path, split, config.calib, runtime_of(config))
    activations.find_around([])
    [outliers] = activations.outliers()
    assert (outliers.tensor, outliers.samples) == ("inverse", (31,))


def test_padding_that_a_mask_hides_is_no_outlier(tmp_path):
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> network
        (float[N, 3, 4] x, float[N, 1, 3] kept) => (float[N, 3, 3] y)
        { turned = Transpose <perm = [0, 2, 1]> (x)  scores = MatMul(x, turned)
          dropped = Sub(one, kept)  bias = Mul(dropped, large)
          masked = Add(scores, bias)  y = Softmax(masked) }"""
    )
    constants = {"one": np.float32(1), "large": np.float32(-1e4)}
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    onnx.save(proto, tmp_path / "network.onnx")
    kept = np.ones((50, 1, 3), np.float32)
    kept[7, 0, 2] = 0
    x = np.random.default_rng(0).normal(size=(50, 3, 4)).astype(np.float32)
    fields = Fields((Field("x", "float32"), Field("kept", "float32")))
    split = Split(pack({"x": x, "kept": kept}), None, "made", fields=fields)
    config = make_config("data=shapes", f"cache_dir={tmp_path / 'cache'}", "threads=1")
    path = tmp_path / "network.onnx"
    activations = Activations(path, split, config.calib, runtime_of(config))
    activations.find_around([])
    assert activations.outliers() == []


def test_each_float_input_is_looked_at():
    arrays = {"a": draw([4], 1e6), "b": draw([5], -1e6), "ids": np.arange(50)[:, None] ** 9}
    fields = Fields(tuple(Field(name, str(values.dtype)) for name, values in arrays.items()))
    split = Split(pack(arrays), None, "made", fields=fields)
    named = list(find_in_inputs(split, ["ids", "b", "a"]))
    assert [(one.tensor, one.samples) for one in named] == [("b", (5,)), ("a", (4,))]


def test_pictures_of_bytes_are_not_read():
    class Unread:
        dtype = np.dtype(np.uint8)

    assert list(find_in_inputs(Split(Unread(), None, "made"), ["x"])) == []
