"""Reports the float operators of networks with attention, and ranges stretched by a mask."""

import logging
from collections import Counter

import onnx

from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.graph.attention import find_attention, stretched_by_masks
from resnet8ptq.precision.plan import Selection, find_float_nodes, find_left_by_attention

log = logging.getLogger(__name__)


def log_attention(config: QuantizationConfig, graph: onnx.GraphProto) -> None:
    """Log the operators left in float because of attention; warn of fixed ranges that masks widen.

    The function does nothing for a float dtype, for `method=weight_only`, or for a network without
    attention. If the backend chooses the operators itself, the function logs at most that
    `attention` has no effect.
    """
    if config.computes_in_float or not find_attention(graph):
        return
    backend = config.backend
    if not backend.descriptor.operators:
        framework = f"backend={backend.name}"
        log.info("attention=%s: has no effect; %s chooses operators", config.attention, framework)
        return
    if backend.takes_every_operator:
        if config.attention != "all":
            log.warning(
                "attention=%s: the converter of backend=%s quantizes every operator, attention's "
                "too",
                config.attention,
                backend.name,
            )
        return

    # Count the operators that the setting leaves in float
    selection = Selection.of(config)
    left = Counter(node.op_type for node in find_left_by_attention(graph, selection))
    if left:
        listed = ", ".join(f"{name} {count}" for name, count in sorted(left.items()))
        log.info(
            "attention=%s: in float: %s; attention=all quantizes them", config.attention, listed
        )
    if config.method != "dynamic":
        _warn_of_masks(graph, selection)


def _warn_of_masks(graph: onnx.GraphProto, selection: Selection) -> None:
    in_float = set(find_float_nodes(graph, selection))
    stretched = []
    for name, around in stretched_by_masks(graph).items():
        readers = {node.name for node in around}
        if not readers <= in_float:
            stretched.append(name)
    if stretched:
        more = ", ..." if len(stretched) > 3 else ""
        log.warning(
            "a mask's constant, such as -10000, stretches the range of %d tensors that are "
            "quantized, so that scores share few levels: %s%s; try attention=weights",
            len(stretched),
            ", ".join(stretched[:3]),
            more,
        )
