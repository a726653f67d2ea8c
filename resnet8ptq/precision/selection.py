"""Which nodes of a graph stay in float, by name and by operator."""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx

from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.config.schema import PrecisionConfig, QuantizationConfig
from resnet8ptq.core.errors import ConfigError, QuantizationError
from resnet8ptq.graph.layers import FUSED, consumers, find_tail, weight_layers


@dataclass(frozen=True)
class Selection:
    """What is to be quantized: operators and nodes by name; None: all of them.

    Attributes:
        float_tail: nothing behind the last layers is.
        float_layers: layers that are not, by their short names (`weight_layers`).
    """

    op_types: Sequence[str] | None = None
    nodes_to_quantize: Sequence[str] | None = None
    nodes_to_exclude: Sequence[str] = ()
    float_tail: bool = False
    float_layers: Sequence[str] = ()

    @classmethod
    def of(cls, config: QuantizationConfig) -> "Selection":
        """Return what the settings say; `nodes_to_exclude: auto` leaves out none.

        That choice is made by quantizing, see `exclusion`.
        """
        excluded = () if config.nodes_to_exclude == "auto" else config.nodes_to_exclude
        named = config.op_types, config.nodes_to_quantize, excluded
        return cls(*named, bool(config.float_tail), split_plan(config.precision)[1])


def split_plan(config: PrecisionConfig) -> tuple[dict[str, int], list[str]]:
    """Return the bits of the layers that `precision.plan` quantizes, and those left in float."""
    plan = config.plan if isinstance(config.plan, dict) else {}
    bits = {layer: width for layer, width in plan.items() if width != FLOAT_BITS}
    return bits, sorted(plan.keys() - bits.keys())


def find_float_nodes(graph: onnx.GraphProto, selection: Selection) -> list[str]:
    """Return the names of the nodes that stay in float.

    They are left so by `op_types`, `nodes_to_quantize`, `nodes_to_exclude`, `float_tail` and
    `precision.plan`. A Relu or Clip goes along with the chosen layer before it: both frameworks
    fuse the two, and the range of the sum before it would cost the layer half of its levels. Behind
    an excluded layer it stays in float by itself, in both frameworks.

    Raises:
        ConfigError: a name is not in the graph, or an operator neither there nor in ONNX; lists
            the nearest.
        QuantizationError: no node is left to quantize.
    """
    names = [node.name for node in graph.node]
    chosen = set(names)
    if selection.op_types is not None:
        # One list may serve several networks, of which one lacks an operator.
        own = {node.op_type for node in graph.node}
        operators = sorted(own | {schema.name for schema in onnx.defs.get_all_schemas()})
        check_known("op_types", selection.op_types, operators, "ONNX operators")
        chosen = {node.name for node in graph.node if node.op_type in selection.op_types}
        chosen |= _activations_behind(graph, chosen)
    if selection.nodes_to_quantize is not None:
        check_known("nodes_to_quantize", selection.nodes_to_quantize, names)
        named = set(selection.nodes_to_quantize)
        chosen &= named | _activations_behind(graph, named)
    check_known("nodes_to_exclude", selection.nodes_to_exclude, names)
    chosen -= set(selection.nodes_to_exclude)
    layers = weight_layers(graph)
    check_known("precision.plan", selection.float_layers, [*layers], "layers")
    chosen -= {layers[name].name for name in selection.float_layers}
    if selection.float_tail:
        chosen -= {node.name for node in find_tail(graph)[1]} - _activations_behind(graph, chosen)
    if not chosen:
        raise QuantizationError(
            "op_types, nodes_to_quantize, nodes_to_exclude and precision.plan leave no node to "
            "quantize"
        )
    return [name for name in names if name not in chosen]


def find_quantized_layers(
    graph: onnx.GraphProto, selection: Selection
) -> dict[str, onnx.NodeProto]:
    """Return the layers with weights that do not stay in float, by their short names.

    Raises:
        ConfigError, QuantizationError: as `find_float_nodes`.
    """
    in_float = set(find_float_nodes(graph, selection))
    layers = weight_layers(graph)
    return {name: node for name, node in layers.items() if node.name not in in_float}


def _activations_behind(graph: onnx.GraphProto, chosen: set[str]) -> set[str]:
    outputs = {node.output[0] for node in graph.node if node.name in chosen}
    return {
        node.name
        for node in graph.node
        if node.op_type in FUSED
        and node.input[0] in outputs
        and len(consumers(graph, node.input[0])) == 1
    }


def check_known(
    key: str,
    given: Collection[str],
    names: list[str],
    kind: str = "names of the model's ONNX nodes",
) -> None:
    """Check names that a setting gives.

    Raises:
        ConfigError: one is not in `names`; lists the nearest.
    """
    for name in given:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.2) or names[:3]
            raise ConfigError(f"{key}: got {name!r}, takes {kind}; nearest: {', '.join(nearest)}")
