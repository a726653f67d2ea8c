"""Times or counts the nodes of an ONNX file after ONNX Runtime's optimization."""

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from numpy.typing import NDArray

from resnet8ptq.backends.contract import NodeTime, Profiler, to_nodes
from resnet8ptq.backends.onnx import operators, weight_only
from resnet8ptq.core.records import feed
from resnet8ptq.graph.session import OPTIMIZED, open_session, session_inputs

_CONVERSIONS = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast"}
_KERNEL = "_kernel_time"
Event = Mapping[str, Any]


@contextmanager
def profile(path: Path, threads: int) -> Iterator[Profiler]:
    """Load an ONNX file, as `predictor.load` does for the CPU, to time its optimized nodes."""
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(str(path), threads, Path(folder))
        yield _Profiler(session, Path(folder))


def count_kernels(path: Path) -> tuple[int, int]:
    """Return the numbers of layers on integers and in float on the CPU; see `operators`."""
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(str(path), 1, Path(folder))
        session.end_profiling()
        graph = onnx.load(Path(folder, OPTIMIZED)).graph
    return operators.count_kernels(Counter(node.op_type for node in graph.node))


@dataclass(frozen=True)
class _Profiler:
    session: onnxruntime.InferenceSession
    folder: Path

    def predict(self, batch: NDArray[Any]) -> Sequence[NDArray[Any]]:
        return list(self.session.run(None, feed(batch, session_inputs(self.session))))

    def nodes(self, runs: int) -> list[NodeTime]:
        events = json.loads(Path(self.session.end_profiling()).read_text())
        graph = onnx.load(self.folder / OPTIMIZED).graph
        return read_trace(events, find_unfused(graph), runs)


def read_trace(events: Sequence[Event], unfused: Collection[str], runs: int) -> list[NodeTime]:
    """Return the nodes of a trace with their mean times, see `to_nodes`.

    Args:
        events: events in ONNX Runtime's format, with times in whole microseconds; an event
            `model_run` starts each run, and its nodes follow.
        unfused: the names that `find_unfused` returns.
        runs: the number of runs to use, from the end.
    """
    selected = []
    for event in events:
        if event["name"] == "model_run" or event["name"].endswith(_KERNEL):
            selected.append(event)
    # A run and its first node may begin in the same microsecond.
    selected.sort(key=lambda event: (event["ts"], event["cat"] != "Session"))

    # Sum the time of each node in each run, in ms
    times: list[dict[tuple[str, str, str], float]] = []
    for event in selected:
        if event["name"] == "model_run":
            times.append(defaultdict(float))
            continue
        name = event["name"].removesuffix(_KERNEL)
        kind = "unfused" if name in unfused else _kind(event["args"])
        times[-1][name, event["args"]["op_name"], kind] += event["dur"] / 1000
    return to_nodes(times[-runs:])


def _kind(args: Mapping[str, Any]) -> str:
    if args["op_name"] in _CONVERSIONS:
        return "conversion"
    if args["op_name"] == weight_only.OPERATOR:  # only its weights have 8 bits
        return "float"
    # Each tensor has a dict of dtype to shape
    dtypes = set[str]().union(*args.get("input_type_shape", ()))
    if dtypes & {"int8", "uint8"}:
        return "integer"
    return "float" if dtypes & {"float", "float16", "double"} else "other"


def find_unfused(graph: onnx.GraphProto) -> set[str]:
    """Return the names of nodes that compute in float between DequantizeLinear and QuantizeLinear.

    The quantizer meant these nodes for integer kernels, but ONNX Runtime did not fuse them. A node
    counts if its first input is dequantized, and QuantizeLinear alone reads its first output.

    Args:
        graph: the optimized graph.
    """
    producers: dict[str, str] = {}
    consumers: dict[str, set[str]] = defaultdict(set)
    for node in graph.node:
        producers |= dict.fromkeys(node.output, node.op_type)
        for name in node.input:
            consumers[name].add(node.op_type)

    # Nodes between both conversions
    unfused = set()
    for node in graph.node:
        if node.op_type in _CONVERSIONS or not node.input:
            continue
        behind = producers.get(node.input[0]) == "DequantizeLinear"
        if behind and consumers[node.output[0]] == {"QuantizeLinear"}:
            unfused.add(node.name)
    return unfused
