"""Counts and times the kernels that OpenVINO chose, from its runtime information."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from resnet8ptq.backends.contract import Key, NodeTime, Profiler, to_nodes
from resnet8ptq.backends.openvino.predictor import CompiledNetwork, open_network

# OpenVINO's names: Convolution, GroupConvolution, Deconvolution, FullyConnected..., MatMul
_LAYER = re.compile("[Cc]onvolution|FullyConnected|MatMul")
# A kernel's name ends with the type that it computes in: brgconv_avx512_I8, jit_avx512_f32.
_INTEGER = re.compile("_[IiUu]8$")
_FLOAT = re.compile("_(f32|f16|bf16)$")
_CONVERSIONS = {"FakeQuantize", "Convert", "Reorder"}


@contextmanager
def profile(path: Path, threads: int, precision: str) -> Iterator[Profiler]:
    """Load a file, as `predictor.load` does, to time its optimized nodes."""
    yield _Profiler(open_network(path, threads, precision=precision, timed=True))


def count_kernels(path: Path) -> tuple[int, int]:
    """Return the numbers of a file's layers that run on integers and in float.

    The name of the kernel decides. The dtype of the input (`runtimePrecision`) does not, because a
    layer can take u8 and compute in float. A product that OpenVINO fuses into a larger kernel, such
    as one of attention, counts as float.
    """
    network = open_network(path, 1)
    compiled = network.request(1).get_compiled_model()

    # OpenVINO's plugin names the kernel of each node that runs
    kernels: list[str] = []
    for node in compiled.get_runtime_model().get_ops():
        about = node.get_rt_info()
        if _LAYER.search(about["layerType"].astype(str)):
            kernels.append(about["primitiveType"].astype(str))
    on_integers = sum(_INTEGER.search(kernel) is not None for kernel in kernels)

    # A layer that is fused into a larger kernel is only in the graph
    layers = 0
    for operator in network.graph.get_ops():
        if _LAYER.search(operator.get_type_name()):
            layers += 1
    return on_integers, max(layers, len(kernels)) - on_integers


@dataclass(frozen=True)
class _Profiler:
    network: CompiledNetwork
    runs: list[dict[Key, float]] = field(default_factory=list)

    def predict(self, batch: NDArray[Any]) -> Sequence[NDArray[Any]]:
        request = self.network.request(len(batch))
        outputs = self.network.run(request, batch)
        times: dict[Key, float] = {}
        for node in request.get_profiling_info():
            if node.status == node.Status.EXECUTED:
                key = (node.node_name, node.node_type, _kind(node))
                times[key] = node.real_time / timedelta(milliseconds=1)
        self.runs.append(times)
        return outputs

    def nodes(self, runs: int) -> list[NodeTime]:
        return to_nodes(self.runs[-runs:])


def _kind(node: Any) -> str:
    if node.node_type in _CONVERSIONS:
        return "conversion"
    if _INTEGER.search(node.exec_type):
        return "integer"
    return "float" if _FLOAT.search(node.exec_type) else "other"
