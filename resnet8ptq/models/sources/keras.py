"""A Keras file as the source of the FP32 network."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.text import one_line
from resnet8ptq.models.normalization import OPSET
from resnet8ptq.models.sources.onnx import Predict


def _import_keras(
    source: Path, unfolded: Path, image_shape: tuple[int, ...], classes: int
) -> tuple[Predict, int, int]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # plain FP32 sums, and no banner about others
    model = load_keras(source)
    _check_fit(model, source, image_shape, classes)
    _export(model, unfolded)
    return lambda batch: model(batch, training=False).numpy(), OPSET, OPSET


def load_keras(source: Path) -> Any:
    """Load a Keras file without running code that it may hold.

    Raises:
        ModelError: it holds code, or Keras refuses it.
    """
    from resnet8ptq.models.gates import keras as gate

    gate.check(source)
    import keras

    try:
        return keras.models.load_model(source, compile=False, safe_mode=True)
    except Exception as error:  # h5py, zipfile, json and Keras each have their own
        raise ModelError(f"{source}: Keras refuses it ({one_line(error)})") from None


def _check_fit(model: Any, source: Path, image_shape: tuple[int, ...], classes: int) -> None:
    takes, gives = model.input_shape, model.output_shape
    if takes != (None, *image_shape):
        raise ModelError(f"{source}: takes {takes}, the images are {(None, *image_shape)}")
    if gives != (None, classes):
        raise ModelError(f"{source}: returns {gives}, the data set has {classes} classes")
    for weight in model.weights:
        if not np.isfinite(weight.numpy()).all():
            raise ModelError(f"{source}: NaN or infinity in {weight.path}")


def _export(model: Any, path: Path) -> None:
    """Write the model as tf2onnx makes it, with readable names."""
    import onnx
    import tensorflow as tf
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    signature = [tf.TensorSpec((None, *model.input_shape[1:]), tf.float32, name="input")]
    forward = tf.function(lambda x: model(x, training=False), input_signature=signature)
    # On a busy machine tf2onnx sometimes leaves a constant shape to be computed (seen in 3 of 69
    # conversions of one file). A graph that is the same each time is worth another try.
    for _ in range(3):
        proto, _ = tf2onnx.convert.from_function(forward, input_signature=signature, opset=OPSET)
        if all(node.op_type != "Shape" for node in proto.graph.node):
            break
    graph = proto.graph
    old = graph.output[0].name
    for node in graph.node:
        node.output[:] = ["probabilities" if name == old else name for name in node.output]
    graph.output[0].name = "probabilities"
    for value in (graph.input[0], graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.checker.check_model(proto)
    onnx.save(proto, path)
