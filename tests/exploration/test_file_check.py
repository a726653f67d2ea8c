"""The cause that is named for a file of another program that is far from FP32."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    quantize_dynamic,
    quantize_static,
)

from resnet8ptq.data.dataset import Split
from resnet8ptq.exploration import file_check
from resnet8ptq.exploration.file_check import find_cause
from tests.exploration.test_tensors import SAMPLES, change, input_of, quantize, rename
from tests.helpers import detectors
from tests.helpers.assembling import assemble
from tests.helpers.configs import make_config
from tests.helpers.factories import quantizer_of


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The network, and its quantized file."""
    return quantize(tmp_path_factory.mktemp("check"), QuantFormat.QDQ)


@pytest.fixture
def cause_of(files, tmp_path, cache_root):
    """A function from a file to the cause that is named."""

    def find(proto, network=files[0], stored=SAMPLES):
        fp32 = tmp_path / "fp32.onnx"
        path = tmp_path / "theirs.onnx"
        onnx.save(network, fp32)
        onnx.save(proto, path)
        config = make_config(
            "backend=file",
            f"backend.path='{path}'",
            f"backend.inputs={{x: {{name: '{proto.graph.input[0].name}', axes: null}}}}",
            f"backend.outputs={{y: {{name: '{proto.graph.output[0].name}', axes: null}}}}",
        )
        evaluator: Any = SimpleNamespace(
            runtime=SimpleNamespace(threads=1, cache_root=cache_root),
            network=SimpleNamespace(onnx_path=fp32),
            quantizer=quantizer_of(config),
        )
        samples = Split(stored, None, "made")
        return find_cause(evaluator, samples, path=path, config=config, folder=tmp_path)

    return find


def append(proto, operator):
    """Return a copy of a file with one more operator at its end."""
    changed = copy.deepcopy(proto)
    for node in changed.graph.node:
        node.output[:] = ["before" if name == "y" else name for name in node.output]
    changed.graph.node.append(helper.make_node(operator, ["before"], ["y"]))
    return changed


def scale_of(proto, name):
    return next(
        node.input[1]
        for node in proto.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] == name
    )


def test_a_right_file_has_no_cause(cause_of, files):
    assert cause_of(files[1]) == ""


@pytest.mark.parametrize("operator", ["Softmax", "Sigmoid"])
def test_another_last_step_is_named(cause_of, files, operator):
    assert f"is the {operator.lower()} of the network's" in cause_of(append(files[1], operator))


class _Batch(CalibrationDataReader):
    def __init__(self, samples):
        self.batches = iter([{"x": samples}])

    def get_next(self):
        return next(self.batches, None)


def test_scores_that_share_the_scale_of_boxes_are_named(cause_of, tmp_path):
    random = np.random.default_rng(0)
    network = detectors.boxes_and_scores(random)
    samples = random.normal(size=(30, 8, 3)).astype(np.float32)
    onnx.save(network, tmp_path / "network.onnx")
    quantize_static(tmp_path / "network.onnx", tmp_path / "theirs.onnx", _Batch(samples))
    cause = cause_of(onnx.load(tmp_path / "theirs.onnx"), network, samples)
    assert cause.startswith("its output y joins")
    assert "values 4 to 5 one of" in cause


def test_equal_scores_beside_noisy_boxes_are_not_called_lost():
    random = np.random.default_rng(0)
    boxes = random.uniform(50, 100, (4, 4, 9))
    scores = random.uniform(0, 1, (4, 3, 9))
    exact = np.concatenate([boxes, scores], axis=1)
    noisy = exact.copy()
    noisy[:, :4] += random.normal(0, 5, boxes.shape)
    assert file_check._find_mixed_units(["y"], [noisy], [exact]) == ""


def test_an_input_range_that_cuts_the_samples_is_named(cause_of, files):
    quantized = copy.deepcopy(files[1])
    change(quantized, scale_of(quantized, "x"), lambda scale: scale / np.float32(50))
    cause = cause_of(quantized)
    assert cause.startswith("its input x holds values of -0.") and "calibrated" in cause


def test_an_input_range_that_holds_the_samples_is_no_cause(cause_of, files):
    quantized = copy.deepcopy(files[1])
    change(quantized, scale_of(quantized, "x"), lambda scale: scale * np.float32(2))
    change(quantized, scale_of(quantized, "first"), lambda scale: scale * np.float32(60))
    assert "its input" not in cause_of(quantized)


def test_another_training_is_named_instead_of_a_layer(cause_of, files):
    quantized = copy.deepcopy(files[1])
    random = np.random.default_rng(0)
    for tensor in quantized.graph.initializer:
        levels = numpy_helper.to_array(tensor)
        if levels.dtype == np.int8 and levels.ndim > 1:
            change(quantized, tensor.name, lambda levels: random.permuted(levels).copy())
    assert cause_of(quantized).startswith("4 layers have other weights")


@pytest.mark.parametrize("names", ["kept", "others"])
def test_no_layer_behind_a_fault_is_blamed(cause_of, files, names):
    """The values that the first fault makes too large are cut by right ranges."""
    quantized = copy.deepcopy(files[1])
    scale = input_of(quantized, "left", 1)[1]
    change(quantized, scale, lambda values: values * np.float32(30))
    if names == "others":
        rename(quantized)
    cause = cause_of(quantized)
    assert "left" in cause
    assert "clipped activation in" not in cause and "error in" not in cause


@pytest.mark.parametrize(
    ("to_scales", "says"),
    [
        (lambda scales: np.where(np.arange(len(scales)) == 3, np.nan, scales), r"channel 3"),
        (np.zeros_like, "all zero"),
    ],
)
def test_weights_that_are_lost_are_named(cause_of, files, to_scales, says):
    quantized = copy.deepcopy(files[1])
    scale = input_of(quantized, "left", 1)[1]
    change(quantized, scale, lambda values: to_scales(values).astype("f4"))
    cause = cause_of(quantized)
    assert "its weights in the file are" in cause and says in cause


def test_a_range_that_is_far_too_wide_is_named(cause_of, files):
    quantized = copy.deepcopy(files[1])
    change(quantized, scale_of(quantized, "first"), lambda scale: scale * np.float32(60))
    assert "is far wider than its values" in cause_of(quantized)


PICTURES = np.random.default_rng(1).integers(0, 256, (60, 8, 8, 3), np.uint8)


@pytest.fixture(scope="module")
def of_pictures(tmp_path_factory):
    """A network of pictures, whose weights differ from place to place, and its quantized file."""
    folder = tmp_path_factory.mktemp("pictures")
    weights = np.random.default_rng(0).normal(size=(192, 4)).astype("f4")
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["y"]),
    ]
    takes = {"x": ["N", 8, 8, 3]}
    onnx.save(assemble(nodes, takes, {"y": ["N", 4]}, {"weights": weights}), folder / "fp32.onnx")
    quantize_dynamic(folder / "fp32.onnx", folder / "int8.onnx")
    return onnx.load(folder / "fp32.onnx"), onnx.load(folder / "int8.onnx")


def prepend(proto, *nodes, **constants):
    """Return a copy of a file with more operators before it, from `x` to `changed`."""
    changed = copy.deepcopy(proto)
    for node in changed.graph.node:
        node.input[:] = ["changed" if name == "x" else name for name in node.input]
    for node in reversed(nodes):
        changed.graph.node.insert(0, node)
    for name, values in constants.items():
        changed.graph.initializer.append(numpy_helper.from_array(np.float32(values), name))
    return changed


def normalized(proto, mean, std):
    """Return a copy of a file that takes `(pixels / 255 - mean) / std`."""
    return prepend(
        proto,
        helper.make_node("Mul", ["x", "factor"], ["multiplied"]),
        helper.make_node("Add", ["multiplied", "offset"], ["changed"]),
        factor=np.multiply(std, 255),
        offset=np.multiply(mean, 255),
    )


def test_exchanged_height_and_width_are_named(cause_of, of_pictures):
    network, quantized = of_pictures
    theirs = prepend(
        quantized, helper.make_node("Transpose", ["x"], ["changed"], perm=[0, 2, 1, 3])
    )
    cause = cause_of(theirs, network, PICTURES)
    assert cause.startswith("the file fits with height and width exchanged")
    assert cause.endswith("try 'backend.inputs={x: {name: x, axes: [1, 0, 2]}}'")
    assert cause_of(quantized, network, PICTURES) == ""


def test_the_normalization_of_cifar10_is_named(cause_of, of_pictures):
    network, quantized = of_pictures
    mean = [0.4914, 0.4822, 0.4465]
    std = [0.247, 0.2435, 0.2616]
    cause = cause_of(normalized(quantized, mean, std), network, PICTURES)
    assert "the file fits best with preprocess=cifar10 (" in cause


def test_a_preprocessing_that_is_only_near_is_named_so(cause_of, of_pictures):
    network, quantized = of_pictures
    theirs = normalized(quantized, [0.5, 0.45, 0.4], [0.2, 0.2, 0.2])
    cause = cause_of(theirs, network, PICTURES)
    near = "of the usual preprocessings, the file fits best with preprocess=torchvision_imagenet"
    assert cause.startswith(near)
