"""Converts a Keras file or a SavedModel to a float or quantized .tflite file, by TensorFlow.

`quantizer` calls `convert` in a separate process, so that the main process does not import
TensorFlow.
"""

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.console import track
from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.data.dataset import Split
from resnet8ptq.models.gates import saved_model as saved_model_gate
from resnet8ptq.models.sources import saved_model
from resnet8ptq.models.sources.contract import prepare_tensorflow
from resnet8ptq.models.sources.keras import load_keras


def convert(
    source: Path,
    samples: Split | None,
    quantized: bool,
    per_channel: bool,
    integer_io: bool = True,
    wide: bool = False,
) -> bytes:
    """Return the network as the content of a .tflite file.

    Args:
        source: a Keras .h5 or .keras file, or a SavedModel folder.
        samples: calibration samples for full-integer quantization; None for float and dynamic-range
            files.
        quantized: whether to quantize; otherwise the file is float.
        per_channel: whether weights have a scale for each output channel; otherwise one for each
            tensor.
        integer_io: whether inputs and outputs are integers; without effect if `samples` is None.
        wide: whether activations have 16 bits instead of 8; without effect if `samples` is None.

    Raises:
        ModelError: see `load_keras` and `gates.saved_model.read_program`.
        UnsupportedError: TensorFlow's converter fails, for example at an operator that it lacks.
    """
    prepare_tensorflow()
    warnings.simplefilter("ignore")  # TensorFlow calls deprecated functions

    # C++ logs a line on stderr for each quantization: only Python keeps stderr, for the progress
    # bar. The setting lasts for the process, which only converts.
    sys.stderr = _Stderr(os.fdopen(os.dup(2), "wb"), line_buffering=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    # Convert
    logging.getLogger("absl").setLevel(logging.ERROR)  # absl warns that a SavedModel's graph is old
    converter = _from_saved_model(source) if source.is_dir() else _from_keras(source)
    if quantized:
        _set_up(converter, samples, per_channel, integer_io=integer_io, wide=wide)
    why = "backend=tflite: TensorFlow cannot convert the network; try backend=onnx"
    with errors_as(UnsupportedError, why):
        return bytes(converter.convert())


class _Stderr(io.TextIOWrapper):
    """Drops the warning that the converter repeats for each operator of a SavedModel."""

    def write(self, text: str) -> int:
        return 0 if text.startswith("Use '@tf.function' or '@defun'") else super().write(text)


def _from_keras(source: Path) -> Any:
    import keras
    import tensorflow as tf

    model = load_keras(source)
    for layer in model._flatten_layers():  # `model.layers` would leave out nested layers
        if isinstance(layer, keras.layers.RNN):
            layer.unroll = True  # TFLite lacks the lists of TensorFlow's loops
    keras.config.disable_interactive_logging()  # Keras reports each export on stdout
    return tf.lite.TFLiteConverter.from_keras_model(model)


def _from_saved_model(source: Path) -> Any:
    """Return the converter of the folder's inference graph; see `gates.saved_model`."""
    import tensorflow as tf

    # TensorFlow warns of deprecated functions
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    program = saved_model_gate.read_program(source)
    frozen = saved_model.freeze(program, source)
    whole = tf.compat.v1.wrap_function(lambda: tf.import_graph_def(frozen, name=""), [])
    inputs = list(map(whole.graph.as_graph_element, program.inputs.values()))
    outputs = list(map(whole.graph.as_graph_element, program.outputs.values()))
    return tf.lite.TFLiteConverter.from_concrete_functions([whole.prune(inputs, outputs)])


def _set_up(
    converter: Any, samples: Split | None, per_channel: bool, integer_io: bool, wide: bool
) -> None:
    import tensorflow as tf

    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    # The converter has no public option for this; `TfliteQuantizer` checks the effect in the file.
    converter._experimental_disable_per_channel = not per_channel
    converter._experimental_disable_per_channel_quantization_for_dense_layers = not per_channel
    if samples is None:
        return

    def calibration() -> Iterator[list[NDArray[np.float32]]]:
        # One sample at a time: in a batch, convolutions sum in another order.
        for sample in track(samples.batches(1), "Calibrating", "samples"):
            yield [sample]

    converter.representative_dataset = calibration

    # As in MLPerf Tiny, all operators are integers, by default also inputs and outputs.
    sets = tf.lite.OpsSet
    dtype = tf.int8
    operators = sets.TFLITE_BUILTINS_INT8
    if wide:
        operators = sets.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8
        dtype = tf.int16
    converter.target_spec.supported_ops = [operators]
    if integer_io:
        converter.inference_input_type = converter.inference_output_type = dtype
