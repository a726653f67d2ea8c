"""The nodes of a graph to quantize, and the bits of each layer's weights."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx

from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.core.errors import ConfigError, QuantizationError
from resnet8ptq.graph.attention import attention_products, left_by_attention
from resnet8ptq.graph.layers import (
    MOVING,
    find_tail,
    find_vector_products,
    fused_activations,
    weight_layers,
)
from resnet8ptq.graph.links import Links
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.precision.grid import WeightScheme


@dataclass(frozen=True)
class Plan:
    """The scheme of each layer's weights.

    Attributes:
        default: the scheme of layers that are not in `bits`.
        bits: bits by the short name of a layer (see `graph.layers.weight_layers`) or of a product
            of attention. Those that stay in float are left out, see `split_bits`.
        undecided: whether the bits are still to be chosen.
    """

    default: WeightScheme
    bits: Mapping[str, int] = field(default_factory=dict)
    undecided: bool = False

    @classmethod
    def of(cls, decisions: Decisions, default: WeightScheme) -> "Plan":
        """Return the plan with the decided bits."""
        return cls(default, split_bits(decisions)[0], decisions.bits is None)

    @property
    def is_narrow(self) -> bool:
        """Whether the plan has fewer than 8 bits, its default included, or is undecided."""
        return self.undecided or min(self.default.bits, *self.bits.values(), 8) < 8

    @property
    def most_bits(self) -> int:
        """The largest number of bits in the plan, its default included.

        8 bits with a reduced range count as 7. Undecided layers count as 8 bits.
        """
        bits = max([self.default.bits, *self.bits.values()])
        if self.undecided:
            bits = max(bits, 8)
        return 7 if bits == 8 and self.default.reduce_range else bits

    def describe(self) -> str:
        """Return the dtypes in the plan, its default included, such as `int4, int8`."""
        types = {self.default.dtype}
        for name in self.bits:
            types.add(self.scheme(name).dtype)
        return ", ".join(sorted(types))

    def to_params(
        self, layers: Collection[str], decided: Mapping[str, int], products: Collection[str] = ()
    ) -> dict[str, str]:
        """Return the plan as MLflow params.

        `planned_bits` is `decided` as a setting, without layers that have the bits of the default.

        Args:
            layers: short names of the quantized layers.
            decided: the decided bits, with `FLOAT_BITS` for layers in float.
            products: short names of the products of attention. `planned_bits` keeps these with any
                bits, because by default they stay in float.
        """
        own = []
        for name, width in decided.items():
            if width != self.default.bits or name in products:
                own.append(f"{name}: {width}")

        # Collect the dtypes and bits of the layers
        dtypes = set()
        bits = set()
        for name in layers:
            scheme = self.scheme(name)
            dtypes.add(scheme.dtype)
            has_7_bits = scheme.reduce_range and scheme.bits == 8
            width = 7 if has_7_bits else scheme.bits
            bits.add(width)
        return {
            "planned_bits": "{" + ", ".join(own) + "}",
            "weight_dtype": ", ".join(sorted(dtypes)),
            "weight_bits": ", ".join(map(str, sorted(bits))),
        }

    def scheme(self, layer: str) -> WeightScheme:
        """Return the scheme of a layer's weights; below 8 bits it is symmetric."""
        bits = self.bits.get(layer, self.default.bits)
        if bits == self.default.bits:
            return self.default
        symmetric = bits < 8 or self.default.symmetric
        return replace(self.default, dtype=f"int{bits}", symmetric=symmetric)

    def narrow(
        self, layers: Collection[str], products: Collection[str] = ()
    ) -> dict[str, WeightScheme]:
        """Return the schemes of `layers` below 8 bits, by short name.

        Args:
            layers: short names of the layers with weights.
            products: short names of the products of attention, which the plan may name too.

        Raises:
            ConfigError: the plan names an unknown layer.
        """
        check_known("precision.plan", chosen=self.bits, names=[*layers, *products], kind="layers")
        schemes = {}
        for name in layers:
            scheme = self.scheme(name)
            if scheme.bits < 8:
                schemes[name] = scheme
        return schemes


@dataclass(frozen=True)
class Selection:
    """The settings and decisions that choose the nodes to quantize; see `find_float_nodes`.

    Attributes:
        op_types: operators to quantize; None for all.
        nodes_to_quantize: names of nodes to quantize; None for all.
        nodes_to_exclude: names of nodes that stay in float.
        float_tail: whether nodes after the last layers stay in float; see `keeps_tail` for None.
        float_layers: short names of the layers and products of attention that stay in float; see
            `weight_layers` and `attention_products`.
        bits: decided bits by short name, without layers and products in float.
        attention: the quantized part of a network with attention: `weights`, `products` or `all`;
            `op_types` and `nodes_to_quantize` take precedence.
    """

    op_types: Sequence[str] | None = None
    nodes_to_quantize: Sequence[str] | None = None
    nodes_to_exclude: Sequence[str] = ()
    float_tail: bool | None = False
    float_layers: Sequence[str] = ()
    bits: Mapping[str, int] = field(default_factory=dict)
    attention: str = "weights"

    @classmethod
    def of(cls, config: QuantizationConfig, decisions: Decisions | None = None) -> "Selection":
        """Return the selection by the settings and the decisions.

        Args:
            decisions: by default, those that the settings contain.
        """
        decisions = decisions or Decisions.of(config)
        bits, float_layers = split_bits(decisions)
        return cls(
            op_types=config.op_types,
            nodes_to_quantize=config.nodes_to_quantize,
            nodes_to_exclude=decisions.in_float,
            float_tail=config.float_tail,
            float_layers=float_layers,
            bits=bits,
            attention=config.attention,
        )


def split_bits(decisions: Decisions) -> tuple[dict[str, int], list[str]]:
    """Return the decided bits by short name, and the names that are decided to stay in float."""
    bits = {}
    in_float = []
    for layer, width in (decisions.bits or {}).items():
        if width == FLOAT_BITS:
            in_float.append(layer)
        else:
            bits[layer] = width
    return bits, sorted(in_float)


def find_float_nodes(graph: onnx.GraphProto, selection: Selection) -> list[str]:
    """Return the names of the nodes that a selection leaves in float.

    Products with a constant vector are always among them. `op_types`, `nodes_to_quantize` and
    `float_tail` choose a fused Relu or Clip together with the node before it. A range
    for the values between the two would waste about half of the levels.

    Raises:
        ConfigError: a node, an operator or a layer in float is unknown (the message has the nearest
            names), or a product of attention has fewer than 8 bits.
        QuantizationError: no node is left to quantize.
    """
    # Find the nodes that the settings choose
    names = [node.name for node in graph.node]
    chosen = set(names) - _names_of(find_left_by_attention(graph, selection))
    if selection.op_types is not None:
        # Any ONNX operator is allowed, so that one list can serve several networks.
        operators = {schema.name for schema in onnx.defs.get_all_schemas()}
        chosen = set()
        for node in graph.node:
            operators.add(node.op_type)
            if node.op_type in selection.op_types:
                chosen.add(node.name)
        check_known("op_types", selection.op_types, sorted(operators), kind="ONNX operators")
        chosen |= _activations_behind(graph, chosen)
    if selection.nodes_to_quantize is not None:
        check_known("nodes_to_quantize", selection.nodes_to_quantize, names)
        named = set(selection.nodes_to_quantize)
        chosen &= named | _activations_behind(graph, named)

    # Remove the nodes and layers that stay in float
    chosen -= {*find_vector_products(graph)}
    check_known("nodes_to_exclude", selection.nodes_to_exclude, names)
    chosen -= set(selection.nodes_to_exclude)
    layers = weight_layers(graph) | attention_products(graph)
    check_known("precision.plan", chosen=selection.float_layers, names=[*layers], kind="layers")
    chosen -= {layers[name].name for name in selection.float_layers}
    if keeps_tail(graph, selection.float_tail):
        _, tail = find_tail(graph)
        chosen -= _names_of(tail) - _activations_behind(graph, chosen)
    if not chosen:
        raise QuantizationError(
            "op_types, nodes_to_quantize, nodes_to_exclude and precision.plan leave no node to "
            "quantize"
        )
    return [name for name in names if name not in chosen]


def keeps_tail(graph: onnx.GraphProto, float_tail: bool | None) -> bool:
    """Return whether the nodes after the last layers stay in float.

    Args:
        float_tail: the answer, unless it is None. With None, they stay in float if one of them is a
            Concat of values that different operators compute; operators of `MOVING` do not count.
            Such values, for example coordinates in pixels and the scores of a Sigmoid, share no
            useful 8-bit scale.
    """
    if float_tail is not None:
        return float_tail

    # Find the operators whose values each Concat joins, before any moves
    producers = Links(graph).producers
    _, tail = find_tail(graph)
    for node in tail:
        if node.op_type != "Concat":
            continue
        kinds = set()
        for name in node.input:
            producer = producers.get(name)
            while producer is not None and producer.op_type in MOVING:
                producer = producers.get(producer.input[0])
            if producer is not None:
                kinds.add(producer.op_type)
        if len(kinds) > 1:
            return True
    return False


def find_left_by_attention(graph: onnx.GraphProto, selection: Selection) -> list[onnx.NodeProto]:
    """Return the nodes that `attention` leaves in float; see `left_by_attention`.

    There are none with `attention=all`, nor with `op_types` or `nodes_to_quantize`, which take
    precedence. Products with planned bits are not among these nodes.

    Raises:
        ConfigError: `precision.plan` gives a product of attention fewer than 8 bits.
    """
    # Products that the plan quantizes, whatever `attention` says
    products = attention_products(graph)
    planned = set()
    for name, bits in selection.bits.items():
        if name not in products:
            continue
        if bits < 8:
            raise ConfigError(
                f"precision.plan: got {bits} for {name}, expected 8 or {FLOAT_BITS}: a product of "
                "attention has no weights"
            )
        planned.add(products[name].name)

    # Other settings, and `all`, leave nothing in float
    named = selection.op_types is not None or selection.nodes_to_quantize is not None
    if named or selection.attention == "all":
        return []
    left = left_by_attention(graph, selection.attention == "products")
    return [node for node in left if node.name not in planned]


def find_quantized_products(
    graph: onnx.GraphProto, selection: Selection
) -> dict[str, onnx.NodeProto]:
    """Return the products of attention that are not in float, by short name."""
    return _without_float(attention_products(graph), graph, selection)


def find_quantized_layers(
    graph: onnx.GraphProto, selection: Selection
) -> dict[str, onnx.NodeProto]:
    """Return the layers that are not in float, by short name; see `find_float_nodes`."""
    return _without_float(weight_layers(graph), graph, selection)


def _without_float(
    nodes: Mapping[str, onnx.NodeProto], graph: onnx.GraphProto, selection: Selection
) -> dict[str, onnx.NodeProto]:
    in_float = set(find_float_nodes(graph, selection))
    return {name: node for name, node in nodes.items() if node.name not in in_float}


def _names_of(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    return {node.name for node in nodes}


def _activations_behind(graph: onnx.GraphProto, chosen: set[str]) -> set[str]:
    """Return the names of each Relu and Clip that is fused with a chosen node."""
    outputs = set()
    for node in graph.node:
        if node.name in chosen:
            outputs.add(node.output[0])
    activations = set()
    for node in fused_activations(graph):
        if node.input[0] in outputs:
            activations.add(node.name)
    return activations


def check_known(
    key: str,
    chosen: Collection[str],
    names: list[str],
    kind: str = "names of the model's ONNX nodes",
) -> None:
    """Raise `ConfigError` for the first of `chosen` that is not in `names`, with the nearest names.

    Args:
        key: the setting, for the message.
        kind: a description of `names`, for the message.
    """
    known = {*names}
    for name in chosen:
        if name in known:
            continue
        nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.2)
        if not nearest:
            nearest = names[:3]
        raise ConfigError(f"{key}: got {name!r}, expected {kind}; nearest: {', '.join(nearest)}")
