"""Draws the layers of a network with dtypes, SQNR and faults, and makes data for a viewer.

`network.svg` is one file without scripts, in the colours of the reader's theme. Networks of more
than `MOST` layers are drawn block by block, see `graph.blocks`.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.core import templates
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.exploration.tensors.comparing import ComparedTensor, TensorComparison
from resnet8ptq.exploration.tensors.findings import Finding
from resnet8ptq.graph.blocks import split_into_blocks
from resnet8ptq.graph.layers import FUSED, MOVING, short_names
from resnet8ptq.graph.links import Links, inputs_of

FILE = "network.svg"
NODE_DATA = "node_data.json"
MOST = 60  # most boxes in a picture
TIMED = 20  # runs that time the layers
RANKS = 14  # boxes below each other in a column
# The size of a box, and the gaps between boxes, in pixels
WIDTH = 190
HEIGHT = 48
GAP_X = 26
GAP_Y = 22
GUTTER = 46  # pixels between two columns
HEAD = 34  # pixels of the title, above the boxes
# The SQNR of a box without colour, and of one in the full colour
GOOD_DB = 40.0
BAD_DB = 5.0
DARKEST = 0.75
# The most characters of the lines in a box
TITLE = 21
LINE = 29
# The colours of the node data, up to a value in dB
_COLOURS = {10.0: "#d55e00", 20.0: "#e8975a", 30.0: "#f5cbaa"}
_JOINS = (*FUSED, *MOVING, "Dropout")  # operators that are drawn with the layer before them


@dataclass
class Box:
    """A layer, or a block of them, with its measurements.

    Attributes:
        nodes: the nodes in the box.
        tensors: the matched tensors that the nodes compute.
        after: indices of the boxes that this box reads.
        faults: names of the findings in the box.
        share: the box's fraction of the summed time of the file's nodes; None if not measured.
        x, y: the upper left corner of the box, in pixels.
    """

    nodes: list[onnx.NodeProto]
    tensors: list[ComparedTensor] = field(default_factory=list)
    after: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    share: float | None = None
    name: str = ""
    x: float = 0.0
    y: float = 0.0

    @property
    def own_db(self) -> float | None:
        """The lowest SQNR of a layer alone in the box; None if no tensor is matched."""
        return min((tensor.own_db for tensor in self.tensors), default=None)

    @property
    def opacity(self) -> float:
        """The opacity of the box's colour, which is higher for a lower SQNR."""
        if self.own_db is None:
            return 0.0
        part = (GOOD_DB - self.own_db) / (GOOD_DB - BAD_DB)
        return round(DARKEST * min(max(part, 0.0), 1.0), 2)

    @property
    def title(self) -> str:
        """The name of the box, cut at the start if it is long."""
        if len(self.name) <= TITLE:
            return self.name
        return f"…{self.name[1 - TITLE :]}"

    @property
    def line(self) -> str:
        """The faults in the box, or else the operators, most frequent first; cut if it is long."""
        listed = []
        counts = Counter(node.op_type for node in self.nodes)
        for kind, count in counts.most_common():
            operator = f"{count} {kind}" if count > 1 else kind
            listed.append(operator)
        text = ", ".join(self.faults or listed)
        if len(text) <= LINE:
            return text
        return f"{text[: LINE - 1]}…"

    @property
    def numbers(self) -> str:
        """The dtypes of weights and outputs, `own_db` and the share of time, as text."""
        weights: dict[str, None] = {}
        outputs: dict[str, None] = {}
        for tensor in self.tensors:
            if tensor.inner.weight_dtype:
                weights[tensor.inner.weight_dtype] = None
            outputs[tensor.inner.dtype or "float32"] = None
        dtypes = filter(None, (" ".join(weights), " ".join(outputs)))
        parts = ["/".join(dtypes) or "not matched"]
        if self.own_db is not None:
            parts.append(f"{_show(self.own_db)} dB")
        if self.share is not None:
            parts.append(f"{self.share:.0%} time")
        return " · ".join(parts)

    @property
    def details(self) -> str:
        """The operators, faults and matched tensors of the box, to be shown on hovering."""
        operators = dict.fromkeys(node.op_type for node in self.nodes)
        lines = [f"{self.name}: {', '.join(operators)}"]
        for fault in self.faults:
            lines.append(f"fault: {fault}")
        for tensor in self.tensors:
            own = _show(tensor.own_db)
            so_far = _show(tensor.sqnr_db)
            line = f"{tensor.name}: {own} dB alone, {so_far} so far"
            if tensor.weights_db is not None:
                line += f", weights {_show(tensor.weights_db)}"
            lines.append(line)
        return "\n".join(lines)


def _show(ratio: float) -> str:
    if math.isfinite(ratio):
        return f"{ratio:.1f}"
    return "∞" if ratio > 0 else "-∞"


def draw_network(
    compared: TensorComparison,
    faults: Sequence[Finding],
    title: str,
) -> str:
    """Return the picture of a network as SVG."""
    boxes = find_boxes(compared.network, compared.operators)
    if len(boxes) > MOST:
        boxes = _join_blocks(boxes)
    _measure(boxes, compared, faults)
    width, height = _arrange(boxes)

    # Connect each box to the boxes that it reads
    lines = []
    for box in boxes:
        for source in sorted(box.after):
            lines.append(_line(boxes[source], box))
    template = templates.load("resnet8ptq.exploration.tensors", "network.svg.j2")
    sizes = {"width": width, "height": height, "box_width": WIDTH, "box_height": HEIGHT}
    return template.render(
        title=title, boxes=boxes, lines=lines, timed=bool(compared.times), **sizes
    )


def find_boxes(proto: onnx.ModelProto, operators: Mapping[str, str]) -> list[Box]:
    """Return the layers in the order of execution, each with the boxes that it reads.

    Nodes that compute no float tensor are left out. A node of `_JOINS`, such as a Relu, is part of
    the layer before it if it reads no other layer, and nothing else reads that layer's output.
    """
    boxes: list[Box] = []
    made: dict[str, set[int]] = {}  # for each tensor, the boxes that it depends on directly
    links = Links(proto.graph)
    for node in proto.graph.node:
        sources: set[int] = set()
        for name in inputs_of(node):
            sources |= made.get(name, set())
        if operators.keys().isdisjoint(node.output):
            made |= dict.fromkeys(node.output, sources)
            continue

        # Add the node to the only box that it reads, or to a new box
        is_alone = bool(node.input) and links.only_reader(node.input[0]) is not None
        if len(sources) == 1 and is_alone and node.op_type in _JOINS:
            [number] = sources
            boxes[number].nodes.append(node)
        else:
            number = len(boxes)
            boxes.append(Box([node], after=sources))
        for name in node.output:
            made[name] = {number}

    # Name each box by its first node
    names = short_names([box.nodes[0] for box in boxes])
    for box, name in zip(boxes, names, strict=True):
        box.name = name or box.nodes[0].output[0]
    return boxes


def _join_blocks(boxes: Sequence[Box]) -> list[Box]:
    """Return at most `MOST` blocks of boxes, see `split_into_blocks`."""
    block_of: dict[int, int] = {}
    joined = []
    for number, block in enumerate(split_into_blocks([box.after for box in boxes], MOST)):
        block_of |= dict.fromkeys(block, number)
        whole = Box([], name=boxes[block[0]].name)
        for index in block:  # a box may read this block and earlier ones
            whole.nodes += boxes[index].nodes
            whole.after |= {block_of[source] for source in boxes[index].after}
        whole.after.discard(number)
        if len(block) > 1:
            whole.name += f" … {boxes[block[-1]].name.rpartition('/')[2]}"
        joined.append(whole)
    return joined


def _measure(
    boxes: Sequence[Box],
    compared: TensorComparison,
    faults: Sequence[Finding],
) -> None:
    """Add tensors, faults and times to the boxes."""
    by_name = {tensor.name: tensor for tensor in compared.tensors}
    times = compared.times
    total_ms = sum(times.values())
    for box in boxes:
        # Find the box's tensors and weights, which findings may name
        named: set[str] = set()
        for node in box.nodes:
            for name in node.output:
                named.add(name)
                if name in by_name:
                    box.tensors.append(by_name[name])
        for tensor in box.tensors:
            if tensor.weight is not None:
                named.add(tensor.weight.rounded.name)

        # Add the faults and the share of time
        for fault in faults:
            if not named.isdisjoint(fault.tensors):
                box.faults.append(fault.name)
        if total_ms:
            box.share = sum(times.get(node.name, 0.0) for node in box.nodes) / total_ms


def _arrange(boxes: Sequence[Box]) -> tuple[float, float]:
    """Place the boxes by their distance from the inputs; return the picture's width and height.

    A row holds the boxes of one distance. After `RANKS` rows, a new column begins.
    """
    # Make a row for each distance from the inputs
    ranks: list[int] = []
    rows: dict[int, list[Box]] = {}
    for box in boxes:
        rank = max((ranks[source] + 1 for source in box.after), default=0)
        ranks.append(rank)
        rows.setdefault(rank, []).append(box)

    def leftmost(box: Box) -> float:
        return min((boxes[source].x for source in box.after), default=0.0)

    for rank in range(max(ranks, default=0) + 1):  # places boxes near those that they read
        rows[rank].sort(key=leftmost)
        for position, box in enumerate(rows[rank]):
            box.x = float(position)

    # Place columns of at most `RANKS` rows
    left = 16.0
    for first in range(0, len(rows), RANKS):
        column = [rows[rank] for rank in range(first, min(first + RANKS, len(rows)))]
        most = max(map(len, column))
        span = most * WIDTH + (most - 1) * GAP_X
        for depth, row in enumerate(column):
            start = left + (span - len(row) * WIDTH - (len(row) - 1) * GAP_X) / 2
            for position, box in enumerate(row):
                box.x = start + position * (WIDTH + GAP_X)
                box.y = HEAD + 12 + depth * (HEIGHT + GAP_Y)
        left += span + GUTTER
    depth = min(len(rows), RANKS)
    return max(left, 620.0), HEAD + 12 + depth * (HEIGHT + GAP_Y) + 28


def _line(source: Box, target: Box) -> str:
    """Return the path from the bottom of a box to the top of another."""
    x = source.x + WIDTH / 2
    y = source.y + HEIGHT
    to_x = target.x + WIDTH / 2
    to_y = target.y
    if to_y > y and (to_x != x or to_y - y <= GAP_Y):
        start = to_y - GAP_Y
        half = to_y - GAP_Y / 2
        return f"M{x:g} {y:g}V{start:g}C{x:g} {half:g} {to_x:g} {half:g} {to_x:g} {to_y:g}"
    if to_y > y:  # the line goes past the boxes between
        side = x + (WIDTH + GAP_X) / 2
        return f"M{x:g} {y:g}v6H{side:g}V{to_y - 6:g}H{to_x:g}V{to_y:g}"
    gutter = target.x - GUTTER / 2  # the line leads to another column
    return f"M{x:g} {y:g}v8H{gutter:g}V{to_y - 10:g}H{to_x:g}V{to_y:g}"


def to_node_data(compared: TensorComparison) -> dict[str, Any]:
    """Return the SQNR of matched layers alone, in the node data format of Model Explorer.

    Model Explorer finds the nodes of an ONNX file by their names, and those of a TFLite file by
    their outputs. A viewer shows the values on FP32's graph, and on a quantized graph that keeps
    the names.
    """
    made = Links(compared.network.graph).producers
    results: dict[str, Any] = {}
    for tensor in compared.tensors:
        if tensor.name in made and math.isfinite(tensor.own_db):
            value = {"value": round(tensor.own_db, 1)}
            for name in (made[tensor.name].name, tensor.name, tensor.inner.name):
                results[name] = value
    thresholds = []
    for most_db, colour in _COLOURS.items():
        thresholds.append({"value": most_db, "bgColor": colour})
    return {"name": "SQNR of the layer alone, dB", "results": results, "thresholds": thresholds}


def time_nodes(quantizer: Quantizer, path: Path, split: Split) -> dict[str, float]:
    """Return the time of the file's nodes in ms for one sample, by name.

    The dict is empty if the framework does not time nodes. A suffix that ONNX Runtime adds to make
    a name unique is removed.
    """
    times: dict[str, float] = {}
    sample = split.inputs(np.arange(1))
    with suppress(UnsupportedError), quantizer.profile(path, 1) as profiler:
        for _ in range(TIMED):
            profiler.predict(sample)
        for node in profiler.nodes(TIMED):
            name = re.sub(r"_token_\d+$", "", node.name)
            times[name] = times.get(name, 0.0) + node.ms
    return times
