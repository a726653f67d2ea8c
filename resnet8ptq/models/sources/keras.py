"""A Keras file as the source of the FP32 network."""

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.models.batch_axis import Outputs
from resnet8ptq.models.contract import Samples, Tensor, arranged, find_layout
from resnet8ptq.models.gates import keras as gate
from resnet8ptq.models.normalization import OPSET, rename
from resnet8ptq.models.sources import Network, Sample, prepare_tensorflow

# Names that Keras generates.
_GENERATED = re.compile(r"(input|input_layer|keras_tensor)(_\d+)?")
# Keras 2 wrote `groups` for these, always 1; Keras 3 refuses the key.
_UNGROUPED = re.compile(r"(Depthwise|Separable)Conv[12]D|Conv[123]DTranspose")


def read(source: Path, sample: Sample) -> Network:
    """Read a Keras file; raise `ModelError` as `load_keras`, or if its input is not float32."""
    prepare_tensorflow()
    model = load_keras(source)
    sizes = _input_sizes(model, source, sample)
    for weight in model.weights:
        if not np.isfinite(weight.numpy()).all():
            raise ModelError(f"{source}: NaN or infinity in {weight.path}")
    import keras

    def predict(samples: Samples) -> Outputs:
        return [value.numpy() for value in keras.tree.flatten(model(samples, training=False))]

    return Network(_export(model, sizes), predict, OPSET)


def load_keras(source: Path) -> Any:
    """Load a Keras file; raise `ModelError` if it holds code, or Keras refuses it."""
    file = gate.read(source)
    for value in gate.find_objects(file.config):
        layer, name = value.get("config"), str(value.get("class_name"))
        if _UNGROUPED.fullmatch(name) and isinstance(layer, dict) and layer.get("groups") == 1:
            del layer["groups"]
    import keras

    refused = errors_as(ModelError, f"{source}: Keras refuses it")
    with refused, tempfile.TemporaryDirectory() as folder:
        return keras.models.load_model(file.write(Path(folder)), compile=False, safe_mode=True)


def _input_sizes(model: Any, source: Path, sample: Sample) -> tuple[int | None, ...]:
    """Return the sizes of the one input; free sizes are those of the samples."""
    inputs = model.inputs
    if len(inputs) != 1:
        shapes = ", ".join(str(tensor.shape) for tensor in inputs)
        raise ModelError(
            f"{source}: has {len(inputs)} inputs ({shapes}); takes one, and several from an .onnx "
            "file or a torch module"
        )
    [tensor] = inputs
    if tensor.dtype != "float32":
        raise ModelError(f"{source}: its input is {tensor.dtype}; takes float32")
    batch, *sizes = tensor.shape
    if sample is not None:
        shape = sample.shape[1:]
        takes = Tensor(tensor.name, tuple(sizes), "float32")
        sizes = list(arranged(shape, find_layout(shape, takes)))
    return (batch, *sizes)


def _export(model: Any, sizes: tuple[int | None, ...]) -> onnx.ModelProto:
    """Return the model as exported by tf2onnx, with readable names."""
    import tensorflow as tf
    import tf2onnx

    signature = [tf.TensorSpec(sizes, tf.float32, name="input")]
    forward = tf.function(lambda x: model(x, training=False), input_signature=signature)
    # On a busy machine tf2onnx sometimes computes a constant shape in the graph (in 3 of 69
    # conversions of one file). Another try makes the graph reproducible.
    for _ in range(3):
        proto, _ = tf2onnx.convert.from_function(forward, input_signature=signature, opset=OPSET)
        if all(node.op_type != "Shape" for node in proto.graph.node):
            break
    graph = proto.graph
    [input_name] = [tensor.name for tensor in model.inputs]
    outputs = [value.name for value in graph.output]
    keras_names = getattr(model, "output_names", [model.layers[-1].name])  # not in a Sequential
    names = dict(zip(outputs, keras_names, strict=True))
    if [node.op_type for node in graph.node if outputs[0] in node.output] == ["Softmax"]:
        names = {outputs[0]: "probabilities"} if len(outputs) == 1 else names
    names["input"] = "input" if _GENERATED.fullmatch(input_name) else input_name
    rename(graph, names)
    for value in (graph.input[0], *graph.output):
        if sizes[0] is None and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.checker.check_model(proto)
    return proto
