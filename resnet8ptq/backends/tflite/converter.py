"""TensorFlow's converter, from a Keras file or a SavedModel to TFLite.

Runs in a process of its own (see `quantizer`), as `conversion` does and for the same reasons:
nothing that runs in the main process imports TensorFlow.
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
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.core.text import one_line
from resnet8ptq.data.dataset import Split
from resnet8ptq.models.gates import saved_model as saved_model_gate
from resnet8ptq.models.sources import saved_model
from resnet8ptq.models.sources.keras import load_keras
from resnet8ptq.models.sources.tensorflow import prepare


def convert(
    source: Path, samples: Split | None, quantized: bool, per_channel: bool, integer_io: bool = True
) -> bytes:
    """Return the network as the content of a .tflite file.

    Args:
        source: a Keras .h5 or .keras file, or a SavedModel folder.
        samples: calibrate full-integer quantization; None for float and dynamic range.
        quantized: False for float.
        per_channel: one scale of the weights per output channel instead of one per tensor.
        integer_io: with `samples`: inputs and outputs are int8, else floats.

    Raises:
        ModelError: Keras refuses the file, or the folder holds more than inference needs.
        QuantizationError: the converter failed.
    """
    prepare()
    warnings.simplefilter("ignore")  # TensorFlow's own deprecations
    _mute_native_code()
    open_converter = _from_saved_model if source.is_dir() else _from_keras
    opened = open_converter(source)
    try:
        return bytes(_set_up(opened, samples, quantized, per_channel, integer_io).convert())
    except Exception as error:  # TensorFlow's are many, and not all can be pickled
        reason = f"TensorFlow cannot convert it ({one_line(error)})"
        raise QuantizationError(f"{source}: {reason}") from None


def _mute_native_code() -> None:
    """Take stderr away from C++, which writes a line there for each quantization; not from Python.

    For the rest of the process, which is the converter's own.
    """
    sys.stderr = _Stderr(os.fdopen(os.dup(2), "wb"), line_buffering=True)  # for the progress bar
    logging.getLogger("absl").setLevel(logging.ERROR)  # says that a SavedModel's graph is old
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class _Stderr(io.TextIOWrapper):
    """Without what the converter says of a SavedModel once for each of its operators."""

    def write(self, text: str) -> int:
        return 0 if text.startswith("Use '@tf.function' or '@defun'") else super().write(text)


def _from_keras(source: Path) -> Any:
    import keras
    import tensorflow as tf

    model = load_keras(source)
    keras.config.disable_interactive_logging()  # it reports each export on stdout
    return tf.lite.TFLiteConverter.from_keras_model(model)


def _from_saved_model(source: Path) -> Any:
    """Return the converter of the part of the folder that `sources.saved_model` reads too."""
    import tensorflow as tf

    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # says that all of this is old
    program = saved_model_gate.read(source)
    frozen = saved_model.freeze(program, source)
    whole = tf.compat.v1.wrap_function(lambda: tf.import_graph_def(frozen, name=""), [])
    taken, *given = map(whole.graph.as_graph_element, (program.input, *program.outputs.values()))
    return tf.lite.TFLiteConverter.from_concrete_functions([whole.prune(taken, given)])


def _set_up(
    converter: Any, samples: Split | None, quantized: bool, per_channel: bool, integer_io: bool
) -> Any:
    import tensorflow as tf

    if not quantized:
        return converter
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    # There is no public option; whether these two did what they say is read from the file.
    converter._experimental_disable_per_channel = not per_channel
    converter._experimental_disable_per_channel_quantization_for_dense_layers = not per_channel
    if samples is None:
        return converter

    def calibration() -> Iterator[list[NDArray[np.float32]]]:
        # One at a time: in a batch, convolutions sum in another order.
        for sample in track(samples.batches(1), "Calibrating", "samples"):
            yield [sample]

    converter.representative_dataset = calibration
    # As MLPerf Tiny has it: integers throughout, and by default in and out.
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    if integer_io:
        converter.inference_input_type = converter.inference_output_type = tf.int8
    return converter
