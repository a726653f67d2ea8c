"""Quantizes by one call of another tool, on the calibration samples of this tool's runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.records import feed
from resnet8ptq.data.dataset import Split

Feeds = Sequence[Mapping[str, NDArray[Any]]]


def make_feeds(split: Split, names: Sequence[str]) -> Feeds:
    """Return each sample by the names of the network's inputs, with a batch of 1."""
    return [feed(split.inputs(np.array([row])), names) for row in range(len(split))]


class _Reader:
    """ONNX Runtime's reader of calibration samples, one by one."""

    def __init__(self, feeds: Feeds) -> None:
        self.feeds: Iterator[Mapping[str, Any]] = iter(feeds)

    def get_next(self) -> Mapping[str, Any] | None:
        """Return the next sample."""
        return next(self.feeds, None)


def ort_static(fp32: Path, feeds: Feeds, target: Path) -> None:
    """`quantize_static` of ONNX Runtime: u8 activations, s8 weights, per channel."""
    from onnxruntime.quantization import QuantType, quantize_static

    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(fp32, target, _Reader(feeds), per_channel=True, **types)


def ort_dynamic(fp32: Path, feeds: Feeds, target: Path) -> None:
    """`quantize_dynamic` of ONNX Runtime, per channel."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(fp32, target, per_channel=True, weight_type=QuantType.QInt8)


def nncf_openvino(fp32: Path, feeds: Feeds, target: Path) -> None:
    """`nncf.quantize` of an OpenVINO network."""
    from resnet8ptq.backends.openvino.library import library, read_graph

    openvino = library()  # before NNCF: disables the telemetry of both
    import nncf

    quantized = nncf.quantize(read_graph(fp32), nncf.Dataset(feeds))
    openvino.save_model(quantized, target, compress_to_fp16=False)


def ai_edge(fp32: Path, feeds: Feeds, target: Path) -> None:
    """ai-edge-quantizer's static recipe, on a `.tflite` network of one input."""
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import quantizer, recipe

    signatures = Interpreter(str(fp32)).get_signature_list()
    [(signature, ports)] = signatures.items()
    [name] = ports["inputs"]
    samples = [{name: array} for feed in feeds for array in feed.values()]
    tool = quantizer.Quantizer(str(fp32), recipe.static_wi8_ai8())
    statistics = tool.calibrate({signature: samples})
    target.write_bytes(tool.quantize(statistics).quantized_model)


ONE_LINERS: dict[str, tuple[str, Callable[[Path, Feeds, Path], None]]] = {
    "ORT quantize_static": (".onnx", ort_static),
    "ORT quantize_dynamic": (".onnx", ort_dynamic),
    "NNCF quantize": (".xml", nncf_openvino),
    "ai-edge-quantizer": (".tflite", ai_edge),
}
