"""An ONNX file as the source of the FP32 network.

Runs in the conversion's process (see `model.load`): a file that crashes ONNX ends that only.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.text import one_line
from resnet8ptq.models.gates.onnx import find_weights, graph_inputs, read, type_name
from resnet8ptq.models.normalization import normalize, opset, raise_opset

Predict = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def import_file(
    source: Path, unfolded: Path, image_shape: tuple[int, ...], classes: int
) -> tuple[Predict, int, int]:
    """Write the file's graph to `unfolded`, as the rest of the package takes it.

    Returns:
        The original as a function of images, its opset, and that of the graph written.

    Raises:
        ModelError: says what the file is or does, and what is taken.
    """
    proto = read(source)
    _check_contract(proto, source, image_shape)
    converted = raise_opset(proto, source)
    fixed = graph_inputs(proto.graph)[0].type.tensor_type.shape.dim[0].dim_value
    try:
        predict = _predictor(proto, fixed)
        probabilities = predict(np.zeros((2, *image_shape), np.float32))
    except Exception as error:  # ONNX Runtime's own, a dozen
        raise ModelError(f"{source}: ONNX Runtime cannot run it ({one_line(error)})") from None
    _check_probabilities(probabilities, source, classes)
    normalize(converted)
    try:
        onnx.checker.check_model(converted)
        _predictor(converted)(np.zeros((2, *image_shape), np.float32))
    except Exception as error:
        batch = f"; its batch dimension is fixed at {fixed}, takes a dynamic one" if fixed else ""
        raise ModelError(
            f"{source}: cannot be run as imported{batch} ({one_line(error)})"
        ) from None
    onnx.save(converted, unfolded)
    return predict, opset(proto), opset(converted)


def _predictor(proto: onnx.ModelProto, fixed: int = 0) -> Predict:
    """Return the graph as a function; a fixed batch dimension is filled up with black images."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong comes as an exception
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    name = graph_inputs(proto.graph)[0].name

    def predict(batch: NDArray[np.float32]) -> NDArray[np.float32]:
        if not fixed:
            return session.run(None, {name: batch})[0]
        missing = -len(batch) % fixed
        padded = np.concatenate([batch, np.zeros((missing, *batch.shape[1:]), np.float32)])
        parts = [padded[i : i + fixed] for i in range(0, len(padded), fixed)]
        outputs = [session.run(None, {name: part})[0] for part in parts]
        return np.concatenate(outputs)[: len(batch)]

    return predict


def _check_probabilities(given: NDArray[np.float32], source: Path, classes: int) -> None:
    if given.shape != (2, classes) or given.dtype != np.float32:
        raise ModelError(
            f"{source}: returns {given.dtype} {list(given.shape)} for two images; "
            f"takes float32 probabilities [2, {classes}], one for each class of the data set"
        )
    if not (given.min() >= 0 and np.allclose(given.sum(1), 1, atol=1e-3)):
        raise ModelError(
            f"{source}: returns values from {given.min():.3g} to {given.max():.3g} that are not "
            "probabilities; takes a graph that ends in a Softmax"
        )


def _check_contract(proto: onnx.ModelProto, path: Path, image_shape: tuple[int, ...]) -> None:
    """Refuse a graph that does not take NHWC float32 images and return one tensor.

    Raises:
        ModelError: says what the graph takes or returns, and what it should.
    """
    inputs, outputs = graph_inputs(proto.graph), proto.graph.output
    if len(inputs) != 1 or len(outputs) != 1:
        raise ModelError(
            f"{path}: has {len(inputs)} inputs and {len(outputs)} outputs; takes one of each"
        )
    tensor = inputs[0].type.tensor_type
    if tensor.elem_type != TensorProto.FLOAT:
        kind = type_name(tensor.elem_type)
        raise ModelError(f"{path}: its input is {kind}; takes float32 raw pixels 0..255")
    takes = tuple(dim.dim_value or None for dim in tensor.shape.dim)
    wanted = (None, *image_shape)
    if len(takes) == 4 and takes[1:] == wanted[-1:] + wanted[1:-1]:
        raise ModelError(
            f"{path}: takes NCHW {takes}, the images are NHWC {wanted}; "
            "put a Transpose (perm 0, 3, 1, 2) after its input"
        )
    if len(takes) != len(wanted) or takes[1:] != image_shape:
        raise ModelError(f"{path}: takes {takes}, the images are {wanted}")
    for _, weights in find_weights(proto.graph):
        if not np.isfinite(numpy_helper.to_array(weights)).all():
            raise ModelError(f"{path}: NaN or infinity in {weights.name!r}")
