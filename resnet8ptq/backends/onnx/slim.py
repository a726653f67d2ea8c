"""`slim`: an ONNX file without what inference does not read."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.graph.session import open_session

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def slim(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without descriptions, long names, unused opsets and doubled constants.

    Names of inputs and outputs stay. The graph computes the same, which `check_same` checks.
    """
    small = onnx.ModelProto()
    small.CopyFrom(proto)
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        small.ClearField(field)
    for field in ("metadata_props", "training_info"):
        small.ClearField(field)
    graph = small.graph
    graph.name = "g"
    for field in ("value_info", "doc_string", "metadata_props", "quantization_annotation"):
        graph.ClearField(field)
    _merge_constants(graph)
    _rename(graph)
    used = {node.domain for node in graph.node}
    kept = [opset for opset in small.opset_import if opset.domain in used]
    del small.opset_import[:]
    small.opset_import.extend(kept)
    return small


def check_same(
    proto: onnx.ModelProto, path: Path, batches: Iterable[NDArray[np.float32]], threads: int
) -> None:
    """Run both on batches of images.

    Raises:
        QuantizationError: one bit of one probability differs.
    """
    whole = open_session(proto.SerializeToString(), threads)
    small = open_session(str(path), threads)
    name = whole.get_inputs()[0].name
    for batch in batches:
        expected, got = (session.run(None, {name: batch})[0] for session in (whole, small))
        if not np.array_equal(expected, got):
            raise QuantizationError("slim: the slimmed file predicts differently")


def _merge_constants(graph: onnx.GraphProto) -> None:
    """Keep one of equal constants, in the compact encoding; a zero point of one value once.

    QLinearConv takes one zero point for all channels as well as one for each.
    """
    used = {name for node in graph.node for name in node.input}
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "QLinearConv":
            zero_points = constants[node.input[5]]
            if zero_points.ndim == 1 and (zero_points == zero_points[0]).all():
                constants[node.input[5]] = zero_points[0]
    first: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    names = {}
    for name, values in constants.items():
        values = np.asarray(values)
        key = (str(values.dtype), values.shape, values.tobytes())
        names[name] = first.setdefault(key, name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    del graph.initializer[:]
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(constants[name]), name)
        for name in first.values()
        if name in used
    )


def _rename(graph: onnx.GraphProto) -> None:
    """Give every tensor inside the graph a short name, and the nodes none."""
    fixed = {value.name for value in [*graph.input, *graph.output]}
    short = _short_names(fixed)
    names: dict[str, str] = {"": ""} | {name: name for name in fixed}
    for node in graph.node:
        for field in ("name", "doc_string", "metadata_props"):
            node.ClearField(field)
        for group in (node.input, node.output):
            group[:] = [_lookup(names, name, short) for name in group]
    for tensor in graph.initializer:
        tensor.ClearField("doc_string")
        tensor.name = _lookup(names, tensor.name, short)


def _lookup(names: dict[str, str], name: str, short: Iterator[str]) -> str:
    if name not in names:
        names[name] = next(short)
    return names[name]


def _short_names(taken: set[str]) -> Iterator[str]:
    """Yield a, b, .. Z, aa, ab, .."""
    length = 1
    while True:
        for number in range(len(_LETTERS) ** length):
            digits = []
            for _ in range(length):
                number, digit = divmod(number, len(_LETTERS))
                digits.append(_LETTERS[digit])
            name = "".join(reversed(digits))
            if name not in taken:
                yield name
        length += 1
