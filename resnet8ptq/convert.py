"""From a Keras file to ONNX, with the gate that both frameworks then agree with Keras.

Runs in a process of its own (see `model.load`): nothing in the main process imports TensorFlow.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.errors import ModelError, ParityError

OPSET = 17
PARITY_IMAGES = 1000
PARITY_TOLERANCE = 1e-4  # of a probability

UNFOLDED, FOLDED, PARITY = "unfolded.onnx", "folded.onnx", "parity.json"

Predict = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def convert(source: Path, folder: Path, images: NDArray[np.uint8], classes: int) -> None:
    """Write `unfolded.onnx`, `folded.onnx` and `parity.json` into `folder`.

    Args:
        source: a Keras .h5 or .keras file.
        folder: an existing, empty folder.
        images: [n, H, W, C] uint8, on which the frameworks must agree.
        classes: how many outputs the network must have.

    Raises:
        ModelError: not a model, unsafe, NaN in its weights, or shapes that do not fit.
        ParityError: ONNX Runtime or torch disagree with Keras.
    """
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # plain FP32 sums, and no banner about others
    warnings.simplefilter("ignore")  # TensorFlow's and tf2onnx's own deprecations
    model = load_keras(source)
    try:
        parity = _convert(model, source, folder, images, classes)
    except ModelError:
        raise
    except Exception as error:  # Keras, tf2onnx, ONNX and onnx2torch each have their own
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{source}: cannot be converted ({type(error).__name__}: {reason})"
        ) from None
    (folder / PARITY).write_text(json.dumps(parity, indent=2))


def _convert(
    model: Any, source: Path, folder: Path, images: NDArray[np.uint8], classes: int
) -> dict[str, float]:
    _check_fit(model, source, images.shape[1:], classes)
    _export(model, folder / UNFOLDED)
    _fold(folder / UNFOLDED, folder / FOLDED)

    pixels = images.astype(np.float32)
    expected = _in_batches(lambda batch: model(batch, training=False).numpy(), pixels)
    parity = {}
    for name in (UNFOLDED, FOLDED):
        for framework, predict in _frameworks(folder / name).items():
            label = f"{framework}, {Path(name).stem}"
            parity[label] = _compare(_in_batches(predict, pixels), expected, label)
    return parity


def load_keras(source: Path) -> Any:
    """Load a Keras file without running code that it may hold.

    Raises:
        ModelError: Keras refuses it.
    """
    import keras

    try:
        return keras.models.load_model(source, compile=False, safe_mode=True)
    except Exception as error:  # h5py, zipfile, json and Keras each have their own
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{source}: Keras refuses it ({type(error).__name__}: {reason})") from None


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
    """Write the model as tf2onnx makes it, with names that a person would give."""
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


def _fold(unfolded: Path, folded: Path) -> None:
    """Fold batch normalization into the convolutions, by ONNX Runtime's own preprocessing.

    Keras 3 exports it as Mul and Add, which quantization would otherwise leave as they are.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(unfolded, folded)


def _frameworks(onnx_path: Path) -> dict[str, Predict]:
    import onnxruntime
    import torch

    from resnet8ptq.torch_module import load_torch_module

    session = onnxruntime.InferenceSession(onnx_path, providers=["CPUExecutionProvider"])
    module = load_torch_module(onnx_path)

    def run_torch(batch: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.inference_mode():
            return np.asarray(module(torch.from_numpy(batch)).numpy())

    return {"onnx": lambda batch: session.run(None, {"input": batch})[0], "torch": run_torch}


def _in_batches(predict: Predict, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([predict(pixels[i : i + 100]) for i in range(0, len(pixels), 100)])


def _compare(got: NDArray[np.float32], expected: NDArray[np.float32], label: str) -> float:
    difference = float(np.abs(got - expected).max())
    flipped = int((got.argmax(1) != expected.argmax(1)).sum())
    if flipped or not difference <= PARITY_TOLERANCE:  # `not <=` catches NaN
        raise ParityError(
            f"{label}: differs from Keras on {flipped} of {len(expected)} top-1 classes, "
            f"probabilities by up to {difference:.2e} (allowed: 0 and {PARITY_TOLERANCE:.0e})"
        )
    return difference
