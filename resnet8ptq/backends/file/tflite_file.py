"""Describes a quantized .tflite file, and runs it in LiteRT."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.schema_py_generated import (
    BlockwiseQuantizationT,
    BuiltinOperator,
    TensorType,
)
from numpy.typing import NDArray

from resnet8ptq.backends.file.contents import (
    Contents,
    Inner,
    Layer,
    Port,
    RawRun,
    Tensors,
    rounded,
)
from resnet8ptq.backends.tflite import contents as tflite
from resnet8ptq.backends.tflite.predictor import (
    LoadedFile,
    end_at_logits,
    open_interpreter,
    read_output,
)
from resnet8ptq.core import files
from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.models.gates.tflite import KEEPS_STATE

_MAX_BYTES = 2**31 - 1  # FlatBuffers' limit
_DEQUANTIZED = ("int2", "int4", "int8", "uint8", "int32", "int64")  # weights and biases
_NAMES = {}
for _name, _code in vars(TensorType).items():
    if not _name.startswith("_"):
        _NAMES[_code] = _name.lower()


def fetch(path: Path) -> bytes:
    """Return the file's content.

    Raises:
        ModelError: the file is damaged, has operators that are not TFLite's own, or keeps a state
            between calls (VAR_HANDLE).
        OSError: see `files.read_bytes`; the limit is 2 GiB.
    """
    content = files.read_bytes(path, _MAX_BYTES)
    with errors_as(ModelError, f"{path}: not a TFLite model"):
        if content[4:8] != b"TFL3":
            raise ValueError("without TFLite's identifier")
        model = tflite.read_model(content)
    for operator in model.operatorCodes or []:
        if operator.customCode:
            raise ModelError(f"{path}: operator {operator.customCode!r}; expected TFLite's own")
        if operator.builtinCode == BuiltinOperator.VAR_HANDLE:
            raise ModelError(f"{path}: {KEEPS_STATE}")
    return content


def read(content: bytes, path: Path) -> Contents:
    """Return the description of a file's content."""
    model = tflite.read_model(content)
    graph = model.subgraphs[0]
    operators = Counter(name for name, _ in tflite.operators(model))

    # Describe the layers, and find those whose inputs are rounded at inference
    unpacked = _unpacked_constants(model)
    layers = []
    rounds_inputs = False
    for layer in tflite.layers(model):
        constant = unpacked.get(id(layer.weights))
        if constant is not None:  # the layer's kernel takes floats
            layers.append(_layer(replace(layer, weights=constant)))
            continue
        stored = _layer(layer)
        layers.append(_at_inference(stored))
        rounds_inputs = rounds_inputs or layers[-1] != stored
    return Contents(
        format=f"TFLite version {model.version}",
        producer=(model.description or b"").decode(errors="replace"),
        inputs=_ports(model, graph.inputs, "inputs"),
        outputs=_ports(model, graph.outputs, "outputs"),
        layers=tuple(layers),
        operators=dict(operators.most_common()),
        dynamic=rounds_inputs,
    )


def _unpacked_constants(model: Any) -> dict[int, Any]:
    """Return the constants that a DEQUANTIZE turns into float32, by the `id` of the float32 tensor.

    TensorFlow's converter stores float16 weights this way, and other tools 8-bit weights.
    """
    tensors = model.subgraphs[0].tensors
    constants = {}
    for name, operator in tflite.operators(model):
        source = tensors[operator.inputs[0]]
        if name == "DEQUANTIZE" and tflite.is_constant(model, source):
            constants[id(tensors[operator.outputs[0]])] = source
    return constants


def open_run(content: bytes, threads: int, reference: bool = False) -> RawRun:
    """Load a file in LiteRT; each call resizes the inputs to the shapes of its values.

    Args:
        reference: whether LiteRT's slow reference kernels run.
    """
    network = open_interpreter(content, threads, reference=reference)

    def read_raw(interpreter: Any, details: dict[str, Any]) -> NDArray[Any]:
        output: NDArray[Any] = interpreter.get_tensor(details["index"])
        return output

    return LoadedFile(network, read_raw).run


def open_tensors(content: bytes, threads: int) -> Tensors:
    """Load a file so that it returns the tensors that its operators compute, dequantized.

    These are the tensors of `_is_value`. Outputs of QUANTIZE and DEQUANTIZE are left out, because
    they repeat a tensor in another dtype or scale. XNNPACK fuses no operators, see
    `open_interpreter`.
    """
    model = tflite.read_model(content)
    tensors = model.subgraphs[0].tensors
    made: list[int] = []
    for name, operator in tflite.operators(model):
        if name not in ("QUANTIZE", "DEQUANTIZE"):
            made += map(int, operator.outputs)
    kept = [index for index in made if _is_value(tensors[index])]

    # Weights and biases of each layer, by the index of its output
    stored: dict[int, dict[str, Any]] = {}
    unpacked = _unpacked_constants(model)
    for layer in tflite.layers(model):
        constant = unpacked.get(id(layer.weights), layer.weights)
        weights = read_constant(model, constant)
        if weights is None or _NAMES[constant.type] == "float32":
            continue
        attributes = {"weights": weights, "weight_dtype": _NAMES[constant.type]}
        if layer.bias is not None:
            bias = read_constant(model, unpacked.get(id(layer.bias), layer.bias))
            if bias is not None:
                attributes["bias"] = bias.reshape(-1)
        stored[int(layer.operator.outputs[0])] = attributes

    # A run may resize the tensors, so their details are read after it
    network = LoadedFile(open_interpreter(content, threads, keeps_all=True), read_output)

    def run(values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        network.run(values)
        details = {detail["index"]: detail for detail in network.interpreter.get_tensor_details()}
        return [read_output(network.interpreter, details[index]) for index in kept]

    inner = []
    for index in kept:
        inner.append(replace(_inner(tensors[index]), **stored.get(index, {})))
    return Tensors(tuple(inner), run)


def read_constant(model: Any, tensor: Any) -> NDArray[np.float32] | None:
    """Return the values of a constant, dequantized.

    Returns None for a computed tensor, for integers without a known scale, for blocks that
    `_scale_blocks` refuses, and for other dtypes.
    """
    if not tflite.is_constant(model, tensor):
        return None
    dtype = _NAMES[tensor.type]
    if dtype in ("float32", "float16"):
        data = np.asarray(model.buffers[tensor.buffer].data, np.uint8)
        return data.view(dtype).reshape(tensor.shape).astype(np.float32)

    # Integers: one scale for each block, each channel, or the whole tensor
    parameters = tensor.quantization
    if dtype not in _DEQUANTIZED or parameters is None:
        return None
    levels = tflite.read_levels(model, tensor).astype(np.float32)
    if isinstance(parameters.details, BlockwiseQuantizationT):
        return _scale_blocks(model, levels, parameters.details)
    if parameters.scale is None:
        return None
    scale = tflite.scales(tensor)
    zero = np.zeros(scale.shape)
    if parameters.zeroPoint is not None:
        zero = np.asarray(parameters.zeroPoint).reshape(scale.shape)
    return np.asarray((levels - zero) * scale, np.float32)


def _scale_blocks(model: Any, levels: NDArray[Any], details: Any) -> NDArray[np.float32] | None:
    """Return weights [channels, inputs], dequantized with one scale for each block of inputs.

    Returns None if the file has zero points, computed scales, or sizes that do not fit.
    """
    of_scales = model.subgraphs[0].tensors[details.scales]
    scales = read_constant(model, of_scales)
    if scales is None or details.zeroPoints >= 0 or scales.ndim != 2:
        return None
    channels, blocks = scales.shape
    if levels.shape != (channels, blocks * details.blockSize):
        return None
    return levels * np.repeat(scales, details.blockSize, axis=1)


def _is_value(tensor: Any) -> bool:
    """Return whether a tensor holds float32, int8, uint8 or int16; integers need one scale."""
    dtype = _NAMES[tensor.type]
    parameters = tensor.quantization
    if dtype == "float32":
        return True
    has_scale = parameters is not None and parameters.scale is not None
    return dtype in ("int8", "uint8", "int16") and has_scale and len(parameters.scale) == 1


def _inner(tensor: Any) -> Inner:
    dtype = _NAMES[tensor.type]
    name = tflite.name_of(tensor)
    if dtype == "float32":
        return Inner(name)
    parameters = tensor.quantization
    return Inner.rounded(
        name,
        scale=float(parameters.scale[0]),
        zero_point=int(parameters.zeroPoint[0]),
        levels=dtype,
    )


def open_logits(content: bytes, threads: int) -> RawRun | None:
    """Load a copy without the final softmax; return None if `end_at_logits` does."""
    cut = end_at_logits(content)
    if cut is None:
        return None
    return LoadedFile(open_interpreter(cut, threads), read_output).run


def _ports(model: Any, indices: Any, kind: str) -> tuple[Port, ...]:
    """Return inputs or outputs, named as in the first signature, or else as their tensors.

    Args:
        kind: `inputs` or `outputs`.
    """
    names = {}
    if model.signatureDefs:
        for item in getattr(model.signatureDefs[0], kind) or []:
            names[item.tensorIndex] = item.name.decode()
    tensors = model.subgraphs[0].tensors
    ports = []
    for index in map(int, indices):
        ports.append(_port(tensors[index], names.get(index, "")))
    return tuple(ports)


def _port(tensor: Any, name: str) -> Port:
    shape = tensor.shape if tensor.shapeSignature is None else tensor.shapeSignature
    sizes: list[int | None] = []
    for size in shape[1:]:
        sizes.append(None if size < 0 else int(size))  # -1 is a free size
    port = Port(name or tflite.name_of(tensor), tuple(sizes), _NAMES[tensor.type])

    # An integer port may have a scale
    parameters = tensor.quantization
    has_scale = parameters is not None and parameters.scale is not None
    if port.dtype not in ("int8", "uint8", "int16") or not has_scale:
        return port
    scale = float(parameters.scale[0])
    zero_point = int(parameters.zeroPoint[0])
    return rounded(port, scale, zero_point, levels=port.dtype)


def _layer(layer: tflite.TfliteLayer) -> Layer:
    weights = _NAMES[layer.weights.type]
    data = _NAMES[layer.input.type]
    return Layer(layer.code, layer.name, weights, activations=data)


def _at_inference(layer: Layer) -> Layer:
    """Return a layer as LiteRT runs it: with integer weights, it rounds float data to int8."""
    if layer.is_quantized and layer.activations == "float32":
        return replace(layer, activations="int8")
    return layer
