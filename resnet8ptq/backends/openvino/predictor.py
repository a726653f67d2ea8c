"""Runs an ONNX file, or an archive of OpenVINO's files, in OpenVINO."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor, Run
from resnet8ptq.backends.openvino import archive
from resnet8ptq.backends.openvino.library import compile_graph, read
from resnet8ptq.core.records import feed
from resnet8ptq.graph.session import end_at_logits

_KEPT = 4  # compiled batch sizes: evaluation, its last batch, and those that are timed


def load(path: Path, threads: int) -> Predictor:
    """Load an ONNX file or an archive; it runs on `threads` threads."""
    return Predictor(open_network(path, threads), partial(_open_logits, path, threads))


def open_network(path: Path, threads: int, timed: bool = False) -> "Network":
    """Compile an ONNX file or an archive; see `compile_graph`."""
    graph = archive.read(path.read_bytes()) if path.suffix == archive.SUFFIX else read(path)
    return make_network(graph, threads, timed)


def make_network(graph: Any, threads: int, timed: bool = False) -> "Network":
    """Compile a graph; see `compile_graph`."""
    names = [value.get_any_name() for value in graph.inputs]
    return Network(graph, names, only_batch_is_free(graph), threads, timed)


def _open_logits(path: Path, threads: int) -> Run | None:
    if path.suffix == archive.SUFFIX:
        graph = archive.end_at_logits(archive.read(path.read_bytes()))
        return None if graph is None else make_network(graph, threads)
    proto = onnx.load(path)
    return make_network(read(proto.SerializeToString()), threads) if end_at_logits(proto) else None


@dataclass(frozen=True)
class Network:
    """A graph that is compiled for each batch size if nothing else is free.

    A graph of fixed sizes takes a seventh less time on a small network. Texts have too many
    lengths: their graph is compiled once, with free sizes.

    Attributes:
        names: of its inputs.
        by_size: the batch size is all that is free.
    """

    graph: Any
    names: Sequence[str]
    by_size: bool
    threads: int
    timed: bool = False
    _requests: OrderedDict[int | None, Any] = field(default_factory=OrderedDict)

    def __call__(self, batch: NDArray[Any]) -> list[NDArray[Any]]:
        """Return each output [n, ...] for network inputs [n, ...]."""
        return self.run(self.request(len(batch)), batch)

    def request(self, size: int) -> Any:
        """Return the compiled graph for a batch size."""
        key = size if self.by_size else None
        if key not in self._requests:
            self.compile(key)
        self._requests.move_to_end(key)
        return self._requests[key]

    def run(self, request: Any, batch: NDArray[Any]) -> list[NDArray[Any]]:
        """Run a batch in a compiled graph."""
        for name, values in feed(batch, self.names).items():
            tensor = request.get_tensor(name)
            tensor.shape = values.shape
            tensor.data[...] = values  # faster than memory of another address in each run
        request.infer()
        outputs = range(len(self.graph.outputs))
        return [request.get_output_tensor(number).data.copy() for number in outputs]

    def compile(self, size: int | None) -> None:
        """Compile the graph for a batch size; None: for every size."""
        graph = self.graph
        if size is not None:
            graph = graph.clone()
            shapes = {}
            for value in graph.inputs:
                shape = value.get_partial_shape()
                shape[0] = size
                shapes[value.get_any_name()] = shape
            graph.reshape(shapes)
        compiled = compile_graph(graph, self.threads, self.timed)
        self._requests[size] = compiled.create_infer_request()
        if len(self._requests) > _KEPT:
            self._requests.popitem(last=False)


def only_batch_is_free(graph: Any) -> bool:
    """Tell whether the first axis of each input is free, and no other."""
    shapes = [value.get_partial_shape() for value in graph.inputs]
    free = [[size.is_dynamic for size in shape] for shape in shapes]
    return all(axes[:1] == [True] and not any(axes[1:]) for axes in free)
