"""Quantized files that other tools make of ResNet8, and broken ones, for `resnet8ptq judge`.

    python -m studies.judge FOLDER

Needs the real files (CIFAR10_DIR, RESNET8_H5). ONNX Runtime's own functions make most files; NNCF
makes two if it is installed (`pip install nncf`, in a separate environment). Then it prints the
command that judges them. Takes seconds.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import cache
from resnet8ptq.data import registry
from resnet8ptq.models import model

IMAGES = 200  # for calibration


class _Images:
    """ONNX Runtime's reader of calibration samples, one by one."""

    def __init__(self, name: str, images: NDArray[np.float32]) -> None:
        self.feeds: Iterator[Mapping[str, Any]] = iter(
            [{name: image[np.newaxis]} for image in images]
        )

    def get_next(self) -> Mapping[str, Any] | None:
        """Return the next sample."""
        return next(self.feeds, None)


def by_onnxruntime(fp32: Path, images: NDArray[np.float32], folder: Path) -> None:
    """Write the files of `quantize_dynamic`, of `quantize_static`, and one in float16."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.transformers.float16 import convert_float_to_float16

    proto = onnx.load(fp32)
    name = proto.graph.input[0].name
    unsigned = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_dynamic(fp32, folder / "ort_dynamic.onnx", weight_type=QuantType.QUInt8)
    for label, form in (("qdq", QuantFormat.QDQ), ("qoperator", QuantFormat.QOperator)):
        path = folder / f"ort_static_{label}.onnx"
        quantize_static(fp32, path, _Images(name, images), quant_format=form, **unsigned)
    # Calibrated on values in 0..1, run on 0..255.
    path = folder / "broken_calibrated_on_unit.onnx"
    quantize_static(fp32, path, _Images(name, images / np.float32(255)), **unsigned)
    onnx.save(convert_float_to_float16(proto, keep_io_types=True), folder / "ort_float16.onnx")


def by_nncf(fp32: Path, images: NDArray[np.float32], folder: Path) -> None:
    """Write NNCF's ONNX file, and OpenVINO's of the same network."""
    import nncf  # type: ignore[import-not-found, unused-ignore]
    import openvino

    proto = onnx.load(fp32)
    name = proto.graph.input[0].name
    samples = nncf.Dataset([{name: image[np.newaxis]} for image in images])
    onnx.save(nncf.quantize(proto, samples), folder / "nncf.onnx")
    graph = nncf.quantize(openvino.Core().read_model(fp32), samples)
    openvino.save_model(graph, folder / "nncf_openvino.xml", compress_to_fp16=False)


def _before(proto: onnx.ModelProto, *steps: onnx.NodeProto) -> onnx.ModelProto:
    """Return a copy whose input passes these steps first; the last step's output is `changed`."""
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    name = changed.graph.input[0].name
    for node in changed.graph.node:
        node.input[:] = ["changed" if value == name else value for value in node.input]
    nodes = [*steps, *changed.graph.node]
    del changed.graph.node[:]
    changed.graph.node.extend(nodes)
    return changed


def swap_channels(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a file that takes BGR where the network takes RGB."""
    order = numpy_helper.from_array(np.array([2, 1, 0]), "order")
    name, axis = proto.graph.input[0].name, 3
    changed = _before(proto, helper.make_node("Gather", [name, "order"], ["changed"], axis=axis))
    changed.graph.initializer.append(order)
    return changed


def take_unit(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a file that takes pixels from 0 to 1 where the network takes 0 to 255."""
    most = numpy_helper.from_array(np.float32(255), "most")
    name = proto.graph.input[0].name
    changed = _before(proto, helper.make_node("Mul", [name, "most"], ["changed"]))
    changed.graph.initializer.append(most)
    return changed


def clip_range(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a file whose activations have an eighth of their range."""
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    scales = [n.input[1] for n in changed.graph.node if n.op_type == "QuantizeLinear"]
    for tensor in changed.graph.initializer:
        if tensor.name in scales[1:]:  # the first is that of the pixels
            scale = numpy_helper.to_array(tensor) / np.float32(8)
            tensor.CopyFrom(numpy_helper.from_array(scale.astype(np.float32), tensor.name))
    return changed


BROKEN: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "broken_bgr": swap_channels,
    "broken_unit": take_unit,
    "broken_clipped": clip_range,
}


def main(folder: Path) -> None:
    """Write the files and print the command."""
    folder.mkdir(parents=True, exist_ok=True)
    root = cache.folder(None)
    data = registry.load("cifar10", os.environ["CIFAR10_DIR"])
    network = model.load_network(ModelConfig(path=os.environ["RESNET8_H5"]), data, root)
    fp32 = folder / "fp32.onnx"
    fp32.write_bytes(network.onnx_path.read_bytes())
    images = data.train.inputs(slice(IMAGES))
    by_onnxruntime(fp32, images, folder)
    if find_spec("nncf"):
        by_nncf(fp32, images, folder)
    for name, breaks in BROKEN.items():
        onnx.save(breaks(onnx.load(folder / "ort_static_qdq.onnx")), folder / f"{name}.onnx")
    made = sorted(path for path in folder.iterdir() if path.suffix in (".onnx", ".xml"))
    names = " ".join(str(path) for path in made if path != fp32)
    print(f"resnet8ptq judge {fp32} {names} data=cifar10")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
