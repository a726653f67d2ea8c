"""A Keras file as the source of the FP32 network."""

import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.core.records import feed, names_of
from resnet8ptq.graph.links import Links, output_names
from resnet8ptq.graph.passes import rename, rewrite
from resnet8ptq.models.batch_axis import Outputs
from resnet8ptq.models.contract import SampleArray, Tensor, arranged, find_layout
from resnet8ptq.models.gates import keras as gate
from resnet8ptq.models.normalization import OPSET
from resnet8ptq.models.sources.contract import Network, Sample, is_record, prepare_tensorflow
from resnet8ptq.models.sources.onnx import check_inputs

# The names that Keras generates for inputs
_GENERATED = re.compile(r"(input|input_layer|keras_tensor)(_\d+)?")
# The dtypes other than float32 of weights and arithmetic, by Keras's names of policies
_WIDENED = {
    "mixed_float16": "float16",
    "mixed_bfloat16": "bfloat16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float64": "float64",
}
# Keras 2 wrote `groups`, always 1, for these layers; Keras 3 refuses the key.
_UNGROUPED = re.compile(r"(Depthwise|Separable)Conv[12]D|Conv[123]DTranspose")


def read(source: Path, sample: Sample) -> Network:
    """Read a Keras file; inputs and outputs get Keras's names, see `_export_model`.

    Raises:
        ModelError: see `load_keras` and `_input_specs`; or the weights have NaN or infinity.
    """
    prepare_tensorflow()
    file = gate.read_keras(source)
    original_dtype = _widen(file.config)
    model = _load(file, source)
    specs = _input_specs(model, source, sample)
    for weight in model.weights:
        if not np.isfinite(weight.numpy()).all():
            raise ModelError(f"{source}: NaN or infinity in {weight.path}")
    import keras

    # Keras takes several inputs in the structure of the model's own
    def call(*values: Any) -> Any:
        inputs = values[0]
        if len(values) > 1:  # a Sequential has one input, and no `input`
            inputs = keras.tree.pack_sequence_as(model.input, values)
        return model(inputs, training=False)

    names = [tensor.name for tensor in model.inputs]

    def predict(samples: SampleArray) -> Outputs:
        outputs = call(*feed(samples, names).values())
        return [value.numpy() for value in keras.tree.flatten(outputs)]

    proto = _export_model(model, call, specs)
    return Network(proto, predict, OPSET, original_dtype=original_dtype)


def load_keras(source: Path) -> Any:
    """Return the model of a Keras file, in float32.

    Raises:
        ModelError: see `gates.keras.read_keras`; or Keras refuses the file.
    """
    file = gate.read_keras(source)
    _widen(file.config)
    return _load(file, source)


def _widen(config: Any) -> str:
    """Make the layers compute in float32, in place; return the first other dtype, or an empty text.

    Keras then reads weights of another dtype as float32, too. The dtypes of inputs stay.
    """
    original = ""
    for value in gate.find_objects(config):
        settings = value.get("config")
        kind = value.get("class_name")
        if kind == "InputLayer" or not isinstance(settings, dict):
            continue
        key = "name" if kind == "DTypePolicy" else "dtype"
        dtype = _WIDENED.get(str(settings.get(key)))
        if dtype is not None:
            settings[key] = "float32"
            original = original or dtype
    return original


def _load(file: gate.KerasFile, source: Path) -> Any:
    """Return the model of a checked file.

    Raises:
        ModelError: Keras refuses the file.
    """
    for value in gate.find_objects(file.config):
        settings = value.get("config")
        if not _UNGROUPED.fullmatch(str(value.get("class_name"))):
            continue
        if isinstance(settings, dict) and settings.get("groups") == 1:
            del settings["groups"]
    import keras

    refused = errors_as(ModelError, f"{source}: Keras refuses it")
    with refused, tempfile.TemporaryDirectory() as folder:
        return keras.models.load_model(file.write(Path(folder)), compile=False, safe_mode=True)


def _input_specs(model: Any, source: Path, sample: Sample) -> list[Any]:
    """Return the `TensorSpec` of each input; with a sample, free sizes are those of the sample.

    Raises:
        ModelError: see `check_inputs` and `find_layout`.
    """
    import tensorflow as tf

    inputs = []
    for declared in model.inputs:
        inputs.append(Tensor(declared.name, tuple(declared.shape[1:]), declared.dtype))
    check_inputs(inputs, source, sample)
    specs = []
    for index, tensor in enumerate(inputs):
        batch = model.inputs[index].shape[0]
        sizes = tensor.shape
        shape = _shape_of(sample, tensor.name)
        if shape is not None:
            sizes = arranged(shape, find_layout(shape, tensor))
        name = "input" if len(inputs) == 1 else f"input__{index}"
        specs.append(tf.TensorSpec((batch, *sizes), tensor.dtype, name))
    return specs


def _shape_of(sample: Sample, name: str) -> tuple[int, ...] | None:
    """Return the shape of a sample for an input, without the batch; None without such a sample."""
    if sample is None:
        return None
    if not is_record(sample):
        return sample.shape[1:]
    if name not in names_of(sample.dtype):
        return None
    return sample.dtype[name].shape


def _export_model(model: Any, call: Callable[..., Any], specs: Sequence[Any]) -> onnx.ModelProto:
    """Return the model exported by tf2onnx, with Keras's names of inputs and outputs.

    A single input with a name that Keras generates becomes `input`; a single output of a Softmax
    becomes `probabilities`.
    """
    import tensorflow as tf
    import tf2onnx

    from resnet8ptq.models import tensorflow_ops  # noqa: F401  tf2onnx lacks them

    # Without this, grouped convolutions become functions for XLA, which tf2onnx lacks.
    tf.config.run_functions_eagerly(True)
    forward = tf.function(call, input_signature=specs)
    # On a busy machine, tf2onnx sometimes lets the graph compute a constant shape (in 3 of 69
    # conversions of one file). Converting again then gives the usual graph.
    for _ in range(3):
        proto, _ = tf2onnx.convert.from_function(forward, input_signature=specs, opset=OPSET)
        if all(node.op_type != "Shape" for node in proto.graph.node):
            break
    tf.config.run_functions_eagerly(False)
    graph = proto.graph
    _keep_constants(graph, forward.get_concrete_function().graph.captures)

    # Give outputs Keras's names, and inputs too if the user has chosen the names
    outputs = output_names(graph)
    # A Sequential lacks output names
    keras_names = getattr(model, "output_names", [model.layers[-1].name])
    names = dict(zip(outputs, keras_names, strict=True))
    last = Links(graph).producers.get(outputs[0])
    if len(outputs) == 1 and last is not None and last.op_type == "Softmax":
        names = {outputs[0]: "probabilities"}
    inputs = [tensor.name for tensor in model.inputs]
    if len(inputs) == 1 and _GENERATED.fullmatch(inputs[0]):
        inputs = ["input"]
    for spec, name in zip(specs, inputs, strict=True):
        names[spec.name] = name
    proto = rewrite(proto, [rename(names)])
    for value in (*proto.graph.input, *proto.graph.output):
        if specs[0].shape[0] is None and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.checker.check_model(proto)
    return proto


def _keep_constants(graph: onnx.GraphProto, captures: Iterable[tuple[Any, Any]]) -> None:
    """Turn graph inputs whose values a layer holds, such as Normalization's mean, into constants.

    Args:
        captures: pairs of a layer's tensor and the graph input that stands for it.
    """
    values = {inner.name: outer for outer, inner in captures}
    for value in list(graph.input):
        if value.name in values:
            array = values[value.name].numpy()
            graph.initializer.append(numpy_helper.from_array(array, value.name))
            graph.input.remove(value)
