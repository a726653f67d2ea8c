"""Describes a quantized network of OpenVINO, and runs it in OpenVINO.

The network is an .xml file and a .bin file, or one zip archive of both, which `fetch` returns.
"""

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.file.contents import Contents, Inner, Layer, Port, RawRun, Tensors
from resnet8ptq.backends.openvino import archive
from resnet8ptq.backends.openvino.library import core, library
from resnet8ptq.backends.openvino.predictor import CompiledNetwork, make_network
from resnet8ptq.core import files
from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.core.records import pack

_MAX_BYTES = 2**31 - 1
_LAYERS = ("Convolution", "GroupConvolution", "ConvolutionBackpropData", "MatMul")
_MOVES = ("Convert", "Multiply", "Subtract", "Reshape", "Transpose", "Unsqueeze", "Squeeze")
_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "boolean": "bool"}
for _bits in (1, 2, 3, 4, 8, 16, 32, 64):
    _NAMES[f"i{_bits}"] = f"int{_bits}"
    _NAMES[f"u{_bits}"] = f"uint{_bits}"


def fetch(path: Path) -> bytes:
    """Return an archive of the .xml and .bin files; return an existing archive unchanged.

    Raises:
        ModelError: the .bin file is missing or a link.
        OSError: see `files.read_bytes`; the limit of each file is 2 GiB.
    """
    if path.suffix.lower() == archive.SUFFIX:
        return files.read_bytes(path, _MAX_BYTES)
    weights = path.with_suffix(".bin")
    if not weights.is_file() or weights.is_symlink():
        raise ModelError(f"{path}: its weights are not in {weights.name} beside it")
    return archive.pack(files.read_bytes(path, _MAX_BYTES), files.read_bytes(weights, _MAX_BYTES))


def read(content: bytes, path: Path) -> Contents:
    """Return the description of an archive that `fetch` has returned.

    Raises:
        ModelError: the file is damaged, or has operators that OpenVINO does not define.
    """
    with errors_as(ModelError, f"{path}: OpenVINO cannot read it"):
        graph = archive.read(content)
    for operator in graph.get_ops():
        name = operator.get_type_info().version_id
        if not name.startswith("opset"):
            raise ModelError(f"{path}: operators of {name!r}; expected those of OpenVINO's opsets")

    # The count leaves out constants, inputs and outputs
    operators = Counter(operator.get_type_name() for operator in graph.get_ordered_ops())
    for unseen in ("Constant", "Parameter", "Result"):
        operators.pop(unseen, None)
    producer = "OpenVINO"
    if graph.has_rt_info(["nncf"]):
        producer = "OpenVINO, NNCF"
    return Contents(
        format="OpenVINO IR",
        producer=producer,
        inputs=tuple(map(_port, graph.inputs)),
        outputs=tuple(map(_port, graph.outputs)),
        layers=tuple(_layers(graph)),
        operators=dict(operators.most_common()),
        batch=_batch(graph.inputs),
    )


def open_run(content: bytes, threads: int) -> RawRun:
    """Compile an archive's graph for the CPU."""
    return _open(archive.read(content), threads)


def open_tensors(content: bytes, threads: int) -> Tensors:
    """Compile a file for float arithmetic so that it returns the float32 tensors of its graph.

    These are the first outputs of the operators that depend on an input. A tensor that FakeQuantize
    reads is replaced by its rounded values, under its own name.
    """
    graph = archive.read(content)

    # Names of the operators that depend on an input, and of those whose output is rounded
    varying: set[str] = set()
    rounded_from: set[str] = set()
    for operator in graph.get_ordered_ops():
        sources = [value.get_node() for value in operator.input_values()]
        names = [source.get_friendly_name() for source in sources]
        if operator.get_type_name() == "Parameter" or varying.intersection(names):
            varying.add(operator.get_friendly_name())
            if operator.get_type_name() == "FakeQuantize":
                rounded_from.add(names[0])

    # Keep the float tensors that depend on an input
    inner = []
    values = []
    for operator in graph.get_ordered_ops():
        name = operator.get_friendly_name()
        left_out = operator.get_type_name() in ("Parameter", "Result") or name in rounded_from
        if left_out or name not in varying:
            continue
        value = operator.output(0)
        if value.get_element_type().get_type_name() == "f32":
            if operator.get_type_name() == "FakeQuantize":
                name = operator.input_value(0).get_node().get_friendly_name()
            inner.append(_inner(name, operator))
            values.append(value)

    # The graph dequantizes a layer's weights while it runs: compute them here
    layers = {}
    for number, value in enumerate(values):
        layer = _layer(value, varying)
        if layer is not None:
            layers[number] = layer
    for index, weights in zip(layers, _compute([*layers.values()]), strict=True):
        dtype = layers[index].stored
        inner[index] = replace(inner[index], weights=weights, weight_dtype=dtype)
    exposed = library().Model(values, graph.get_parameters())
    return Tensors(tuple(inner), _as_raw(make_network(exposed, threads, on_integers=False)))


@dataclass(frozen=True)
class _Layer:
    """The weights of a layer in a file.

    Attributes:
        weights: the graph's value that holds the weights, computed from constants only.
        stored: the dtype of the weights, see `_stored`.
        grouped: whether the first axis of the weights counts groups.
    """

    weights: Any
    stored: str
    grouped: bool


def _layer(value: Any, varying: Container[str]) -> _Layer | None:
    """Return the layer that computes a tensor; None for other tensors.

    An added constant, Relu, Clamp and FakeQuantize belong to the layer before them. The result is
    also None for a layer with computed weights, or if `_stored` returns float32.

    Args:
        varying: names of the operators that depend on an input.
    """
    node = value.get_node()
    while node.get_type_name() in ("FakeQuantize", "Relu", "Clamp", "Add"):
        if node.get_type_name() == "Add" and not _is_constant(node.input_value(1)):
            return None
        node = node.input_value(0).get_node()
    if node.get_type_name() not in _LAYERS:
        return None

    # float32 weights have no rounding to compare
    weights = node.input_value(1)
    stored = _stored(weights)
    is_computed = weights.get_node().get_friendly_name() in varying
    if is_computed or stored in ("", "float32"):
        return None
    return _Layer(weights, stored, grouped=node.get_type_name().startswith("Group"))


def _is_constant(value: Any) -> bool:
    """Return whether the first inputs, through FakeQuantize and `_MOVES`, lead to a constant.

    Other inputs, such as the shape of a Reshape, may be computed.
    """
    node = value.get_node()
    while node.get_type_name() in ("FakeQuantize", *_MOVES):
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


def _compute(layers: list[_Layer]) -> list[NDArray[np.float32]]:
    """Return the weights of layers, in order.

    Grouped weights [groups, channels, ...] lose the first axis: it is merged into the second.
    """
    if not layers:
        return []
    values = [layer.weights for layer in layers]
    graph = library().Model(values, [])  # without inputs
    made = core().compile_model(graph, "CPU")({})
    arrays = []
    for number, layer in enumerate(layers):
        array = made[number].astype(np.float32)
        if layer.grouped:
            array = array.reshape(-1, *array.shape[2:])
        arrays.append(array)
    return arrays


def _inner(name: str, operator: Any) -> Inner:
    """Return the description of an operator's output, with the range of a FakeQuantize.

    The range is left out unless each of its ends is a constant with one number.
    """
    if operator.get_type_name() != "FakeQuantize":
        return Inner(name)
    least = _read_scalar(operator.input_value(3))
    most = _read_scalar(operator.input_value(4))
    if least is None or most is None:
        return Inner(name)
    steps = operator.get_attributes()["levels"] - 1
    return Inner(name, low=least, high=most, step=(most - least) / steps, dtype=_levels(operator))


def _read_scalar(value: Any) -> float | None:
    """Return the single number of a constant; None for other values."""
    node = value.get_node()
    if node.get_type_name() != "Constant":
        return None
    numbers = node.get_data()
    return float(numbers.item()) if numbers.size == 1 else None


def open_logits(content: bytes, threads: int) -> RawRun | None:
    """Load a copy without the final softmax; return None if no softmax computes the only output."""
    cut = archive.end_at_logits(archive.read(content))
    return None if cut is None else _open(cut, threads)


def _open(graph: Any, threads: int) -> RawRun:
    """Compile a graph with the settings of OpenVINO's FP32 baseline: latencies are comparable."""
    return _as_raw(make_network(graph, threads))


def _as_raw(network: CompiledNetwork) -> RawRun:
    if len(network.names) == 1:
        return lambda values: network(values[0])

    def run(values: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
        inputs = dict(zip(network.names, values, strict=True))
        return network(pack(inputs))

    return run


def _batch(inputs: Any) -> int | None:
    """Return the largest fixed size of the inputs' first axes; None if no input has one."""
    sizes = []
    for value in inputs:
        shape = value.get_partial_shape()
        if len(shape) and not shape[0].is_dynamic:
            sizes.append(shape[0].get_length())
    return max(sizes, default=None)


def _port(value: Any) -> Port:
    sizes: list[int | None] = []
    for size in value.get_partial_shape():
        sizes.append(None if size.is_dynamic else size.get_length())
    kind = value.get_element_type().get_type_name()
    name = value.get_node().get_friendly_name()
    if value.get_names():
        name = value.get_any_name()
    return Port(name, tuple(sizes[1:]), _NAMES.get(kind, kind))


def _layers(graph: Any) -> Iterator[Layer]:
    for operator in graph.get_ordered_ops():
        kind = operator.get_type_name()
        if kind not in _LAYERS:
            continue
        stored = _stored(operator.input_value(1))
        if stored:
            yield Layer(
                operator=kind,
                name=operator.get_friendly_name(),
                weights=stored,
                activations=_computed(operator.input_value(0)),
            )


def _stored(value: Any) -> str:
    """Return the dtype in which weights are stored, or rounded by FakeQuantize.

    FakeQuantize counts even if its input is computed; the result is empty for other computed
    weights.
    """
    node = value.get_node()
    while node.get_type_name() in _MOVES:
        node = node.input_value(0).get_node()
    if node.get_type_name() == "FakeQuantize":
        return _levels(node)
    if node.get_type_name() != "Constant":
        return ""
    name = node.get_output_element_type(0).get_type_name()
    return _NAMES.get(name, name)


def _computed(value: Any) -> str:
    """Return the dtype in which a layer takes its data: after FakeQuantize, that of its levels."""
    node = value.get_node()
    while node.get_type_name() in ("Reshape", "Transpose", "Squeeze", "Unsqueeze"):
        node = node.input_value(0).get_node()
    if node.get_type_name() == "FakeQuantize":
        return _levels(node)
    name = value.get_element_type().get_type_name()
    return _NAMES.get(name, name)


def _levels(node: Any) -> str:
    """Return the dtype that holds the levels of a FakeQuantize; float32 for unusual widths."""
    highest = int(node.get_attributes()["levels"]) - 1
    bits = max(1, highest.bit_length())
    return f"uint{bits}" if bits in (1, 2, 4, 8, 16) else "float32"
