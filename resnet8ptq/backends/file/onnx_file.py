"""Describes a quantized ONNX file, and runs it in ONNX Runtime.

The file may hold QDQ or integer operators, or weights alone in fewer bits.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from resnet8ptq.backends.file.contents import (
    FLOATS,
    Contents,
    Inner,
    Layer,
    Port,
    RawRun,
    Tensors,
    rounded,
)
from resnet8ptq.graph.layers import FUSED, attribute
from resnet8ptq.graph.links import find_all, find_computed, input_at
from resnet8ptq.graph.qdq import AT_OUTPUT
from resnet8ptq.graph.session import between, end_at_logits, expose, open_session, session_inputs
from resnet8ptq.models.gates import onnx as gate

# By operator, the input indices of the weights and of the data's zero point (-1 for none).
_LAYERS = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul", "FusedConv", "FusedGemm"), (1, -1)),
    **dict.fromkeys(("FusedMatMul", "LSTM", "GRU", "RNN", "Attention", "NhwcFusedConv"), (1, -1)),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QGemm"), (3, 2)),
    **dict.fromkeys(("ConvInteger", "MatMulInteger"), (1, 2)),
    **dict.fromkeys(("DynamicQuantizeMatMul", "DynamicQuantizeLSTM"), (1, -1)),
    "MatMulIntegerToFloat": (1, 4),
    "QAttention": (1, 6),
    "MatMulNBits": (1, -1),
}
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True)
class _Places:
    """The input indices of an integer operator, and the axis of its output channels.

    Attributes:
        scale, zero: indices of the weights' scale and zero point.
        axis: the axis of the weights that counts output channels if transB is not set.
        bias: index of the bias; None if the operator takes no bias.
        data_scale: index of the data's scale, a factor of the scale of an integer bias. None if the
            operator takes a float bias or no bias.
    """

    weights: int
    scale: int
    zero: int
    axis: int
    bias: int | None = None
    data_scale: int | None = None


_ON_INTEGERS = {
    "QLinearConv": _Places(weights=3, scale=4, zero=5, axis=0, bias=8, data_scale=1),
    "QLinearMatMul": _Places(weights=3, scale=4, zero=5, axis=-1),
    "QGemm": _Places(weights=3, scale=4, zero=5, axis=-1, bias=6, data_scale=1),
    "DynamicQuantizeMatMul": _Places(weights=1, scale=2, zero=3, axis=-1, bias=4),
    "MatMulIntegerToFloat": _Places(weights=1, scale=3, zero=5, axis=-1, bias=6),
}
_BLOCKS = "MatMulNBits"
_DYNAMIC = {"ConvInteger": 0, "MatMulInteger": -1}  # the weights' axis of output channels
# By operator, the input indices of the scale and the zero point, for the data or the output.
_SCALES = {"DequantizeLinear": (1, 2), "QLinearConv": (1, 2), "QLinearMatMul": (1, 2)}
_SCALES |= {"QGemm": (1, 2), "QuantizeLinear": (1, 2)}
_OUTPUT_SCALES = {"QuantizeLinear": (1, 2), "QLinearConv": (6, 7), "QLinearMatMul": (6, 7)}
_OUTPUT_SCALES |= {"QGemm": (7, 8), "QLinearSoftmax": (3, 4), "QLinearAdd": (6, 7)}
_OUTPUT_SCALES |= {"QLinearGlobalAveragePool": (3, 4), "QLinearSigmoid": (3, 4)}
_ROUNDED = ("int8", "uint8", "int16", "uint16")
_INTEGERS = ("tensor(int8)", "tensor(uint8)", "tensor(int16)", "tensor(uint16)")
_NO_TENSORS = ("QuantizeLinear", "DynamicQuantizeLinear", "Constant", "Shape")
_MOVES = ("Identity", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast")


def fetch(path: Path) -> bytes:
    """Check a file, and return its content with the external data inlined.

    Raises:
        ModelError: see `gates.onnx.read_quantized`.
    """
    return gate.read_quantized(path)


def read(content: bytes, path: Path) -> Contents:
    """Return the description of a file's content."""
    proto = onnx.ModelProto.FromString(content)
    graph = _Graph.of(proto.graph)
    versions = [opset.version for opset in proto.opset_import if opset.domain in gate.ONNX_DOMAINS]
    operators = Counter(node.op_type for node in find_all(proto.graph, onnx.NodeProto))

    # Old files list constants among the inputs, too
    inputs = gate.graph_inputs(proto.graph)
    return Contents(
        format=f"ONNX opset {max(versions, default=0)}",
        producer=f"{proto.producer_name} {proto.producer_version}".strip().removesuffix(" None"),
        inputs=tuple(map(graph.input, inputs)),
        outputs=tuple(map(graph.output, proto.graph.output)),
        layers=tuple(graph.layers(proto.graph)),
        operators=dict(operators.most_common()),
        batch=_batch(inputs),
        dynamic=any(name.startswith("DynamicQuantize") for name in operators),
    )


def open_run(
    content: bytes, threads: int, optimized: bool = True, without: Sequence[str] = ()
) -> RawRun:
    """Load a file's content in ONNX Runtime; for the other arguments see `open_session`."""
    session = open_session(content, threads, optimized=optimized, without=without)
    names = session_inputs(session)

    def run(values: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
        inputs = dict(zip(names, values, strict=True))
        outputs: Sequence[NDArray[Any]] = session.run(None, inputs)
        return outputs

    return run


def open_tensors(content: bytes, threads: int) -> Tensors:
    """Load a file so that it returns the tensors of its graph; see `_Graph.inner`.

    These are float32 tensors, and integers with one constant scale. The file is loaded twice:
    `Tensors.run` computes without graph optimization, `Tensors.run_kernels` with it.
    """
    proto = onnx.ModelProto.FromString(content)
    graph = _Graph.of(proto.graph)
    inner = dict(graph.inner(proto))
    exposed = expose(proto, [*inner]).SerializeToString()
    defined = open_session(exposed, threads, optimized=False, arena=False)

    # Only float tensors, and integers whose scale is known
    types = {value.name: value.type for value in defined.get_outputs()}
    kept = {}
    for name, tensor in inner.items():
        has_scale = types.get(name) in _INTEGERS and tensor.step is not None
        if types.get(name) == "tensor(float)" or has_scale:
            kept[name] = tensor

    # With the outputs of DequantizeLinear exposed, integer kernels still run, except some with int8
    # activations.
    kernels = open_session(exposed, threads, arena=False)
    return Tensors(tuple(kept.values()), partial(_run, defined, kept), partial(_run, kernels, kept))


def _run(
    session: Any, kept: dict[str, Inner], values: Sequence[NDArray[Any]]
) -> list[NDArray[Any]]:
    """Run the graph, and return the tensors in `kept`, dequantized."""
    names = session_inputs(session)
    outputs = session.run([*kept], dict(zip(names, values, strict=True)))
    return [*map(_dequantize, outputs, kept.values())]


def _dequantize(values: NDArray[Any], tensor: Inner) -> NDArray[Any]:
    """Return values as floats; floats, and integers without a known scale, stay unchanged."""
    if values.dtype.kind == "f" or tensor.step is None or tensor.low is None:
        return values
    least = np.iinfo(values.dtype).min
    return (values.astype(np.float32) - least) * np.float32(tensor.step) + np.float32(tensor.low)


def open_logits(content: bytes, threads: int) -> RawRun | None:
    """Load a copy that ends before the final softmax; see `graph.session.end_at_logits`.

    Returns None if no softmax computes the only output.
    """
    proto = onnx.ModelProto.FromString(content)
    if not end_at_logits(proto):
        return None
    return open_run(proto.SerializeToString(), threads)


def _batch(inputs: list[onnx.ValueInfoProto]) -> int | None:
    """Return the largest fixed size of the inputs' first axes; None if no input has one."""
    most = 0
    for value in inputs:
        if _dims(value):
            most = max(most, _dims(value)[0].dim_value)
    return most or None


def _dims(value: onnx.ValueInfoProto) -> Any:
    return value.type.tensor_type.shape.dim


@dataclass(frozen=True)
class _Graph:
    constants: dict[str, onnx.TensorProto]
    producers: dict[str, onnx.NodeProto]
    consumers: dict[str, list[onnx.NodeProto]]
    types: dict[str, int]  # of constants, and of the outer graph's inputs

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> "_Graph":
        """Link the nodes of a graph and of its inner graphs, such as the branches of an If."""
        constants: dict[str, onnx.TensorProto] = {}
        for part in (graph, *find_all(graph, onnx.GraphProto)):
            for tensor in part.initializer:
                constants[tensor.name] = tensor

        # A constant may also be the output of a node
        producers: dict[str, onnx.NodeProto] = {}
        consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in find_all(graph, onnx.NodeProto):
            if node.op_type == "Constant":
                value = gate.read_constant(node)
                if value is not None:
                    constants[node.output[0]] = value
            producers |= dict.fromkeys(node.output, node)
            for name in node.input:
                consumers.setdefault(name, []).append(node)
        types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        types |= {name: tensor.data_type for name, tensor in constants.items()}
        return cls(constants, producers, consumers, types)

    def input(self, value: onnx.ValueInfoProto) -> Port:
        """Return the port of an input, with its quantization if all readers use the same one."""
        triples = set()
        for node, name in self._takers(value.name):
            places = _SCALES.get(node.op_type)
            if node.input[0] != name:  # `_SCALES` is about the first input
                places = None
            triples.add(self._scale(node, places))
        triple = None
        if len(triples) == 1:
            triple = triples.pop()
        return _port(value, triple)

    def _takers(self, name: str) -> list[tuple[onnx.NodeProto, str]]:
        """Return the nodes that read a tensor, directly or after nodes that move its values.

        Each comes with the name of the tensor that it reads.
        The moving nodes themselves, those of `_MOVES` except Cast, are left out.
        """
        takers: list[tuple[onnx.NodeProto, str]] = []
        for node in self.consumers.get(name, []):
            if node.op_type in _MOVES and node.op_type != "Cast":
                takers += self._takers(node.output[0])
            else:
                takers.append((node, name))
        return takers

    def output(self, value: onnx.ValueInfoProto) -> Port:
        """Return the port of an output, with the scale of an integer output if it is known.

        `_OUTPUT_SCALES` has the producers whose scale is known. Nodes that only move the values do
        not count as producers.
        """
        node = self.producers.get(value.name)
        while node is not None and node.op_type in _MOVES and node.op_type != "Cast":
            node = self.producers.get(node.input[0])
        port = _port(value, None)
        if node is None or port.dtype not in _ROUNDED:
            return port
        return _port(value, self._scale(node, _OUTPUT_SCALES.get(node.op_type)))

    def inner(self, proto: onnx.ModelProto) -> Iterator[tuple[str, Inner]]:
        """Yield the name and the description of tensors that the outer graph's nodes compute.

        A tensor that only QuantizeLinear reads is left out; the dequantized tensor is described
        under its name. Other outputs of DequantizeLinear, such as weights, and those of
        `_NO_TENSORS` are left out too.
        """
        stored = self.stored_weights(proto)
        for node in proto.graph.node:
            if node.op_type in _NO_TENSORS:
                continue
            if node.op_type == "DequantizeLinear":
                maker = self.producers.get(node.input[0])
                if maker is None or maker.op_type != "QuantizeLinear":
                    continue  # weights, or the output of an operator on integers
                name = maker.input[0].removesuffix(AT_OUTPUT)
                layer = self._layer(self.producers.get(maker.input[0]))
                weights = stored.get(layer, {})
                yield node.output[0], replace(self._inner(name, maker), **weights)
                continue

            # Any other node: its outputs, unless only QuantizeLinear reads them
            for index, name in enumerate(node.output):
                takers = {taker.op_type for taker in self.consumers.get(name, [])}
                if not name or takers == {"QuantizeLinear"}:
                    continue
                named = name.removesuffix("_quantized")
                inner = Inner(named)
                if index == 0:  # other outputs have no scale
                    inner = self._inner(named, node)
                yield name, replace(inner, **stored.get(self._layer(node), {}))

    def stored_weights(self, proto: onnx.ModelProto) -> dict[str, dict[str, Any]]:
        """Return the attributes of `Inner` for stored weights and biases, by a layer's output.

        If an Add is the only reader of this output, the output of the Add has them too.
        """
        computed = find_computed(proto.graph)
        layers: dict[str, tuple[str, str, str]] = {}  # dtype, weights and bias, by output
        names: set[str] = set()
        for node in proto.graph.node:
            if node.op_type not in _PRODUCTS or node.input[1] in computed:
                continue
            stored = self._stored(node.input[1])
            if stored not in ("", "float32"):
                bias = node.input[2] if len(node.input) > 2 else ""
                layers[node.output[0]] = (stored, node.input[1], bias)
                names |= {node.input[1], bias}

        # Float operators take dequantized weights: run the part of the graph that computes them
        names -= computed | {""}
        values = {}
        if names:
            part = between(proto, "", [*names]).SerializeToString()
            arrays = open_session(part, 1, optimized=False).run([*names], {})
            for name, array in zip(names, arrays, strict=True):
                values[name] = array.astype(np.float32)
        attributes: dict[str, dict[str, Any]] = {}
        for output, (dtype, weights, bias) in layers.items():
            attributes[output] = {"weights": values[weights], "weight_dtype": dtype}
            if bias in values:
                attributes[output]["bias"] = values[bias].reshape(-1)

        # Operators on integers take constants
        for node in proto.graph.node:
            if node.op_type in _ON_INTEGERS:
                attributes[node.output[0]] = self._dequantized(node)
            elif node.op_type in _DYNAMIC:
                attributes |= self._dequantized_dynamic(node)
            elif node.op_type == _BLOCKS:
                attributes[node.output[0]] = self._dequantized_blocks(node)

        # The bias of a product may be in an Add after it
        for output, stored_attributes in [*attributes.items()]:
            biased = self._only_taker(output, "Add")
            if biased is not None:
                bias_attributes = self._read_added(biased)
                attributes[biased.output[0]] = {**stored_attributes, **bias_attributes}
        return attributes

    def _dequantized(self, node: onnx.NodeProto) -> dict[str, Any]:
        """Return the attributes of `Inner` for the weights and the bias of an integer operator.

        The result is empty if `_scaled_levels` returns nothing. It lacks a bias that is not a
        constant, and an integer bias if the data's scale is not one constant number.
        """
        places = _ON_INTEGERS[node.op_type]
        axis = places.axis
        if attribute(node, "transB", 0):
            axis = 0
        scale_name = input_at(node, places.scale)
        weights = self._scaled_levels(
            input_at(node, places.weights), scale_name, input_at(node, places.zero), axis
        )
        if not weights or places.bias is None:
            return weights

        # An integer bias has a scale of its own, and `alpha` scales the sum
        bias_name = input_at(node, places.bias)
        if bias_name not in self.constants:
            return weights
        bias = self._constant(bias_name).reshape(-1)
        if places.data_scale is not None:
            data_scale = self._scalar(input_at(node, places.data_scale))
            if not data_scale:
                return weights
            scale = self._constant(scale_name).reshape(-1)
            bias = bias * scale * data_scale * attribute(node, "alpha", 1.0)
        return {**weights, "bias": bias.astype(np.float32)}

    def _scaled_levels(
        self, name: str, scale_name: str, zero_name: str, axis: int
    ) -> dict[str, Any]:
        """Return the attributes of `Inner` for weights that are stored as integers.

        The result is empty if the levels, the scales or the zero points are not constants. It is
        also empty if there are several scales or zero points, but not one for each channel.

        Args:
            name: the name of the levels.
            scale_name: the name of the scales.
            zero_name: the name of the zero points; empty for zero points of 0.
            axis: the axis of the levels that counts channels.
        """
        if not self.constants.keys() >= {name, scale_name, zero_name or name}:
            return {}
        levels = self._constant(name)
        scale = self._constant(scale_name)
        zero = self._constant(zero_name) if zero_name else np.zeros(1)

        # Scale and zero point hold one value, or one for each channel
        shape = [1] * levels.ndim
        shape[axis] = -1
        if {scale.size, zero.size} - {1, levels.shape[axis]}:
            return {}
        centred = levels.astype(np.float32) - zero.astype(np.float32).reshape(shape)
        return {"weights": centred * scale.reshape(shape), "weight_dtype": str(levels.dtype)}

    def _dequantized_blocks(self, node: onnx.NodeProto) -> dict[str, Any]:
        """Return the attributes of `Inner` for MatMulNBits, whose weights are stored in blocks.

        The file stores weights [channels, blocks, bytes]; the attribute `weights` is [channels,
        inputs]. The result is empty for widths other than 4 and 8 bits, for reordered inputs, or
        without constants.
        """
        bits = attribute(node, "bits", 4)
        channels = attribute(node, "N", 0)
        name = input_at(node, 1)
        scale_name = input_at(node, 2)
        zero_name = input_at(node, 3)
        is_reordered = bool(input_at(node, 4))  # the operator's g_idx
        if bits not in (4, 8) or is_reordered:
            return {}
        if not self.constants.keys() >= {name, scale_name, zero_name or name}:
            return {}

        # Zero points are packed like the levels, or floats; by default the middle level
        levels = _unpack(self._constant(name).reshape(channels, -1), bits)
        scales = self._constant(scale_name).reshape(channels, -1).astype(np.float32)
        blocks = scales.shape[1]
        zeros = np.full(scales.shape, 2 ** (bits - 1), np.float32)
        if zero_name:
            stored_zeros = self._constant(zero_name).reshape(channels, -1)
            if stored_zeros.dtype == np.uint8:
                stored_zeros = _unpack(stored_zeros, bits)[:, :blocks]
            zeros = stored_zeros.astype(np.float32)

        # The last block is filled up beyond the K inputs
        levels = levels.reshape(channels, blocks, -1).astype(np.float32)
        weights = (levels - zeros[..., np.newaxis]) * scales[..., np.newaxis]
        whole = weights.reshape(channels, -1)[:, : attribute(node, "K", 0)]
        attributes = {"weights": whole.astype(np.float32), "weight_dtype": f"int{bits}"}
        bias_name = input_at(node, 5)
        if bias_name in self.constants:
            attributes["bias"] = self._constant(bias_name).reshape(-1).astype(np.float32)
        return attributes

    def _dequantized_dynamic(self, node: onnx.NodeProto) -> dict[str, dict[str, Any]]:
        """Return the attributes of `Inner` for ConvInteger or MatMulInteger, by its float output.

        ONNX Runtime's `quantize_dynamic` writes a Cast after the node, then a Mul by the product of
        the scales of data and weights. The result is empty if other nodes follow, if none or both
        of these scales are constants, or if `_scaled_levels` returns nothing.
        """
        cast = self._only_taker(node.output[0], "Cast")
        scaled = self._only_taker(cast.output[0], "Mul") if cast else None
        if cast is None or scaled is None:
            return {}

        # The scale of the weights is the constant factor of the scales
        scales = None
        for name in scaled.input:
            maker = self.producers.get(name)
            if name != cast.output[0] and maker is not None and maker.op_type == "Mul":
                scales = maker
        if scales is None:
            return {}
        constants = [name for name in scales.input if name in self.constants]
        if len(constants) != 1:
            return {}
        axis = _DYNAMIC[node.op_type]
        weights = self._scaled_levels(node.input[1], constants[0], input_at(node, 3), axis)
        if not weights:
            return {}
        return {scaled.output[0]: weights}

    def _read_added(self, node: onnx.NodeProto) -> dict[str, Any]:
        """Return the attributes of `Inner` for an Add's constant; empty without a constant.

        The constant may pass through one node of `_MOVES`, such as a Reshape.
        """
        for name in node.input:
            maker = self.producers.get(name)
            if maker is not None and maker.op_type in _MOVES:
                name = maker.input[0]
            if name in self.constants:
                return {"bias": self._constant(name).reshape(-1).astype(np.float32)}
        return {}

    def _only_taker(self, name: str, operator: str) -> onnx.NodeProto | None:
        """Return the only consumer of a tensor if it is this operator; otherwise None."""
        takers = self.consumers.get(name, [])
        if len(takers) != 1 or takers[0].op_type != operator:
            return None
        return takers[0]

    def _constant(self, name: str) -> NDArray[Any]:
        return numpy_helper.to_array(self.constants[name])

    def _layer(self, node: onnx.NodeProto | None) -> str:
        """Return the output of the node that may end a layer; empty if there is none.

        This is the node itself, or the one before it if the node is a Relu or Clip.
        """
        if node is not None and node.op_type in FUSED:
            node = self.producers.get(node.input[0])
        ends = (*_PRODUCTS, *_ON_INTEGERS, _BLOCKS, "Mul", "Add")  # Mul and Add end dynamic layers
        if node is None or node.op_type not in ends:
            return ""
        return node.output[0]

    def _inner(self, name: str, maker: onnx.NodeProto) -> Inner:
        triple = self._scale(maker, _OUTPUT_SCALES.get(maker.op_type))
        if triple is None or triple[2] not in _ROUNDED:
            return Inner(name)
        return Inner.rounded(name, *triple)

    def layers(self, graph: onnx.GraphProto) -> Iterator[Layer]:
        for node in find_all(graph, onnx.NodeProto):
            if node.op_type not in _LAYERS:
                continue
            weights, zero = _LAYERS[node.op_type]
            # Blocks are packed in bytes, so an attribute has their width
            stored = ""
            if node.op_type == _BLOCKS:
                stored = f"int{attribute(node, 'bits', 4)}"
            elif len(node.input) > weights:
                stored = self._stored(node.input[weights])
            if stored:
                yield Layer(
                    operator=node.op_type,
                    name=node.name or node.output[0],
                    weights=stored,
                    activations=self._computed(node, weights, zero),
                )

    def _stored(self, name: str) -> str:
        """Return the dtype in which weights are stored, or rounded by QuantizeLinear.

        QuantizeLinear counts even if its input is computed; the result is empty for other computed
        weights.
        """
        while name not in self.constants:
            node = self.producers.get(name)
            if node is not None and node.op_type == "QuantizeLinear":
                return self._zero_dtype(node, 2)
            if node is None or not self._keeps_levels(node):
                return ""
            name = node.input[0]
        return _dtype(self.constants[name].data_type)

    def _keeps_levels(self, node: onnx.NodeProto) -> bool:
        """Return whether a node moves, casts or dequantizes stored weights."""
        scaled = node.op_type == "Mul" and node.input[1] in self.constants
        return scaled or node.op_type in (*_MOVES, "DequantizeLinear")

    def _computed(self, node: onnx.NodeProto, weights: int, zero: int) -> str:
        """Return the dtype in which a layer takes its data.

        Args:
            weights: the input index of the weights.
            zero: the input index of the data's zero point; -1 if the operator has none.
        """
        if node.op_type.startswith("DynamicQuantize"):
            return "uint8"
        if zero >= 0:
            return self._zero_dtype(node, zero)
        maker = self.producers.get(node.input[0])
        while maker is not None and maker.op_type in _MOVES:
            maker = self.producers.get(maker.input[0])
        if maker is not None and maker.op_type == "DequantizeLinear":
            return self._zero_dtype(maker, 2)
        return self._float_dtype(node.input[weights])

    def _float_dtype(self, name: str) -> str:
        """Return the float dtype in which a layer takes its weights; float32 if it is unknown."""
        while name not in self.constants:
            node = self.producers.get(name)
            if node is None or not self._keeps_levels(node):
                return "float32"
            if node.op_type == "Cast":
                return _dtype(attribute(node, "to", onnx.TensorProto.FLOAT))
            name = node.input[0]
        stored = _dtype(self.constants[name].data_type)
        return stored if stored in FLOATS else "float32"

    def _zero_dtype(self, node: onnx.NodeProto, index: int) -> str:
        """Return the dtype of a zero point, which is that of the levels.

        Without a constant zero point, it is the dtype that QuantizeLinear names, or the type of the
        levels that another node takes; uint8 if neither is known.
        """
        zero = self.constants.get(input_at(node, index))
        if zero is not None:
            return _dtype(zero.data_type)
        if node.op_type == "QuantizeLinear":
            return _dtype(attribute(node, "output_dtype", 0) or onnx.TensorProto.UINT8)

        # The node takes levels, as its first input
        levels = node.input[0]
        if levels in self.types:
            return _dtype(self.types[levels])
        maker = self.producers.get(levels)
        if maker is not None and maker.op_type == "QuantizeLinear":
            return self._zero_dtype(maker, 2)
        return "uint8"

    def _scale(
        self, node: onnx.NodeProto, places: tuple[int, int] | None
    ) -> tuple[float, int, str] | None:
        """Return a tensor's scale, its zero point, and the dtype of the zero point.

        Returns None for an operator without a scale, or if scale or zero point is not one constant
        number.

        Args:
            places: the input indices of the scale and the zero point; None if there are none.
        """
        if places is None or len(node.input) <= places[0]:
            return None
        scale = self._scalar(node.input[places[0]])
        zero = 0
        if len(node.input) > places[1]:
            zero = self._scalar(node.input[places[1]])
        if scale is None or zero is None:
            return None
        return float(scale), int(zero), self._zero_dtype(node, places[1])

    def _scalar(self, name: str) -> Any:
        """Return the number in a constant; 0 for an omitted input, None for other tensors."""
        if not name:
            return 0
        tensor = self.constants.get(name)
        if tensor is None or int(np.prod(tensor.dims)) != 1:
            return None
        return numpy_helper.to_array(tensor).reshape(()).item()


def _unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return the levels in rows of bytes [rows, bytes].

    A byte holds one level of 8 bits, or two of 4 bits, of which the low half is the first.
    """
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _dtype(code: int) -> str:
    name = gate.type_name(code)
    return {"float": "float32", "double": "float64"}.get(name, name)


def _port(value: onnx.ValueInfoProto, triple: tuple[float, int, str] | None) -> Port:
    shape: list[int | None] = []
    for dim in _dims(value):
        shape.append(dim.dim_value if dim.dim_value > 0 else None)
    dtype = _dtype(value.type.tensor_type.elem_type)
    port = Port(value.name, tuple(shape[1:]), dtype)
    if triple is None or triple[2] not in _ROUNDED:
        return port
    scale, zero_point, levels = triple
    if dtype in _ROUNDED:  # the port itself holds the levels
        levels = dtype
    return rounded(port, scale, zero_point, levels=levels)
