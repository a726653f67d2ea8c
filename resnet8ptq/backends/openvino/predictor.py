"""Runs an ONNX file, or an archive of OpenVINO's files, in OpenVINO."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predict, Predictor
from resnet8ptq.backends.openvino import archive
from resnet8ptq.backends.openvino.library import compile_graph, read_graph
from resnet8ptq.core.records import feed
from resnet8ptq.graph.session import end_at_logits
from resnet8ptq.target.measure import F32

_KEPT = 4  # compiled batch sizes: evaluation's, its last batch's, and the timed ones


def load(path: Path, threads: int, precision: str = F32) -> Predictor:
    """Load an ONNX file or an archive; float layers compute in `precision`."""
    network = open_network(path, threads, precision=precision)
    return Predictor(network, partial(_open_logits, path, threads, precision))


def open_network(path: Path, threads: int, **options: Any) -> "CompiledNetwork":
    """Read an ONNX file or an archive; for options see `compile_graph`."""
    if path.suffix == archive.SUFFIX:
        return make_network(archive.read(path.read_bytes()), threads, **options)
    return make_network(read_graph(path), threads, **options)


def make_network(graph: Any, threads: int, **options: Any) -> "CompiledNetwork":
    """Return a graph that compiles when it first runs; for options see `compile_graph`."""
    names = [value.get_any_name() for value in graph.inputs]
    return CompiledNetwork(
        graph, names, by_size=only_batch_is_free(graph), threads=threads, options=options
    )


def _open_logits(path: Path, threads: int, precision: str) -> Predict | None:
    if path.suffix == archive.SUFFIX:
        graph = archive.end_at_logits(archive.read(path.read_bytes()))
        if graph is None:
            return None
        return make_network(graph, threads, precision=precision)
    proto = onnx.load(path)
    if not end_at_logits(proto):
        return None
    return make_network(read_graph(proto.SerializeToString()), threads, precision=precision)


@dataclass(frozen=True)
class CompiledNetwork:
    """A graph that is compiled when needed: for each batch size, if only that size is free.

    With fixed sizes, a small network takes a seventh less time. The `_KEPT` sizes used last stay
    compiled. Texts have too many lengths for fixed sizes: their graph is compiled once, with free
    sizes.

    Attributes:
        names: the names of the inputs.
        by_size: whether only the batch size is free.
        options: options of `compile_graph`.
    """

    graph: Any
    names: Sequence[str]
    by_size: bool
    threads: int
    options: Mapping[str, Any] = field(default_factory=dict)
    _requests: OrderedDict[int | None, Any] = field(default_factory=OrderedDict)
    # The memory of input tensors by name, and of outputs, for graphs of fixed sizes. It is kept
    # because asking a request for it takes a tenth of the time of a small network.
    _memory: dict[int | None, tuple[dict[str, NDArray[Any]], list[NDArray[Any]]]] = field(
        default_factory=dict
    )

    def __call__(self, batch: NDArray[Any]) -> list[NDArray[Any]]:
        """Return each output [n, ...] for network inputs [n, ...]."""
        return self.run(self.request(len(batch)), batch)

    def request(self, size: int) -> Any:
        """Return the inference request for a batch size; compile the graph if necessary."""
        key = self._key_of(size)
        if key not in self._requests:
            self.compile(key)
        self._requests.move_to_end(key)
        return self._requests[key]

    def run(self, request: Any, batch: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the outputs of a batch, from the request for its size."""
        memory = self._memory.get(self._key_of(len(batch)))
        if memory is not None:
            inputs, outputs = memory
            for name, values in feed(batch, self.names).items():
                inputs[name][...] = values
            request.infer()
            return [output.copy() for output in outputs]

        # With free sizes, the request's tensors take the shapes of the values
        for name, values in feed(batch, self.names).items():
            tensor = request.get_tensor(name)
            tensor.shape = values.shape
            tensor.data[...] = values  # faster than a new address in each run
        request.infer()
        return [values.copy() for values in self._read_outputs(request)]

    def _key_of(self, size: int) -> int | None:
        return size if self.by_size else None

    def _read_outputs(self, request: Any) -> list[NDArray[Any]]:
        """Return the memory of a request's outputs."""
        numbers = range(len(self.graph.outputs))
        return [request.get_output_tensor(number).data for number in numbers]

    def compile(self, size: int | None) -> None:
        """Compile the graph, and keep its request.

        Args:
            size: the batch size; None leaves the sizes of the graph unchanged.
        """
        graph = self.graph
        if size is not None:
            graph = graph.clone()
            shapes = {}
            for value in graph.inputs:
                shape = value.get_partial_shape()
                shape[0] = size
                shapes[value.get_any_name()] = shape
            graph.reshape(shapes)

        # Keep the request, and the memory of its tensors if their sizes are fixed
        compiled = compile_graph(graph, self.threads, **self.options)
        request = compiled.create_infer_request()
        self._requests[size] = request
        ports = [*compiled.inputs, *compiled.outputs]
        if all(port.get_partial_shape().is_static for port in ports):
            inputs = {name: request.get_tensor(name).data for name in self.names}
            self._memory[size] = inputs, self._read_outputs(request)
        if len(self._requests) > _KEPT:
            oldest, _ = self._requests.popitem(last=False)
            self._memory.pop(oldest, None)


def only_batch_is_free(graph: Any) -> bool:
    """Return whether the first axis of each input is free, and no other."""
    for value in graph.inputs:
        free = [size.is_dynamic for size in value.get_partial_shape()]
        if free[:1] != [True] or any(free[1:]):
            return False
    return True
