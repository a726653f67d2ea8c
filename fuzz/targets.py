"""Readers of untrusted files, each with a valid file.

For any bytes, a reader must return a valid object, or raise an error of the package with one
printable line.
"""

import hashlib
import io
import json
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from resnet8ptq.core.errors import PtqError


@dataclass(frozen=True)
class Target:
    """A valid file, and the reader of such files."""

    seed: bytes
    read: Callable[[Path], object]
    name: str = "file"

    def check(self, content: bytes) -> bool:
        """Read `content` as a file; return whether it is valid.

        An error that is no `PtqError` in one printable line is a finding.
        """
        path = _folder() / self.name
        path.write_bytes(content)
        try:
            self.read(path)
        except PtqError as error:
            assert str(error).isprintable(), repr(str(error))
            assert len(str(error)) < 2000, str(error)
            return False
        return True


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz-"))


def batch() -> Target:
    """A batch of CIFAR-10, and its images."""
    from resnet8ptq.data.sources import cifar10

    images = np.arange(2 * 3072, dtype=np.int64).astype(np.uint8).reshape(2, 3072)
    content = {"batch_label": "testing", "labels": [3, 8], "data": images, "filenames": ["a", "b"]}

    def read(path: Path) -> None:
        found, labels = cifar10.read_split(path.parent, "test")
        assert found[:].shape == (len(labels), 32, 32, 3)

    return Target(pickle.dumps(content, protocol=3), read, "test_batch")


def meta() -> Target:
    """The class names of CIFAR-10."""
    from resnet8ptq.data.sources import cifar10

    content = {"label_names": list(cifar10.CLASS_NAMES), "num_vis": 3072}
    read = cifar10.read_class_names
    return Target(pickle.dumps(content, 2), lambda path: read(path.parent), "batches.meta")


def onnx() -> Target:
    """An ONNX file, with the checks before ONNX Runtime reads it."""
    from onnx import TensorProto, helper, numpy_helper

    from resnet8ptq.models.gates import onnx

    weights = numpy_helper.from_array(np.ones((12, 10), np.float32), "w")
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w"], ["logits"], name="dense"),
        helper.make_node("Softmax", ["logits"], ["y"]),
    ]
    taken = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2, 2, 3])
    given = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "g", [taken], [given], [weights])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Target(proto.SerializeToString(), onnx.read_onnx, "model.onnx")


def quantized() -> Target:
    """A quantized ONNX file of another tool, with the checks before ONNX Runtime reads it."""
    from onnx import TensorProto, helper, numpy_helper

    from resnet8ptq.models.gates import onnx

    levels = numpy_helper.from_array(np.ones((12, 10), np.int8), "levels")
    scale = numpy_helper.from_array(np.float32(0.5), "scale")
    nodes = [
        helper.make_node("DequantizeLinear", ["levels", "scale"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    taken = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 12])
    given = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "g", [taken], [given], [levels, scale])
    levels.external_data.add(key="location", value="model.onnx")
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Target(proto.SerializeToString(), onnx.read_quantized, "model.onnx")


def keras() -> Target:
    """A Keras file, with the checks before Keras reads it."""
    import h5py

    from resnet8ptq.models.gates import keras

    layer = {"class_name": "Dense", "module": "keras.layers", "config": {"units": 10}}
    network = {"class_name": "Sequential", "config": {"name": "small", "layers": [layer]}}
    weights, archive = io.BytesIO(), io.BytesIO()
    with h5py.File(weights, "w") as file:
        file["layers/dense/vars/0"] = np.ones((3, 2), np.float32)
    with zipfile.ZipFile(archive, "w") as whole:
        whole.writestr("config.json", json.dumps(network))
        whole.writestr("model.weights.h5", weights.getvalue())
    return Target(archive.getvalue(), keras.read_keras, "model.keras")


def table() -> Target:
    """A calibration table, with a matching hash for any content."""
    from resnet8ptq.calibration import table

    number = {"data": [1.5], "dtype": "float32", "CLS": "numpy.array"}
    tensor = {"CLS": "TensorData", "lowest": number, "highest": number}

    def read(path: Path) -> None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        record = json.dumps({"sha256": {"calibration.json": digest}, "model": "m"})
        path.with_name(table.PROVENANCE_FILE).write_text(record)
        for low, high in table.load_ranges(path, {"model": "m"}).values():
            assert -(2**128) < low <= high < 2**128

    return Target(json.dumps({"data": {"input": tensor}}).encode(), read, "calibration.json")


def entry() -> Target:
    """The record of a cache entry."""
    from resnet8ptq.core import cache as kept

    text = json.dumps({"model": "m"})

    def read(path: Path) -> None:
        folder = path.parent / "entry"
        folder.mkdir(exist_ok=True)
        (folder / "entry.json").write_bytes(path.read_bytes())
        assert type(kept._is_whole(folder, text)) is bool

    return Target(json.dumps({"key": {"model": "m"}, "sha256": {}}).encode(), read)


def sweep() -> Target:
    """The file that describes a sweep to its jobs."""
    from resnet8ptq.tracking.sweep_file import FILE, SharedSweep

    store = {"uri": "sqlite:///x", "experiment_id": "1", "experiment_name": "x"}
    parallel = {"at_once": 2, "threads": 1, "folder": "x", "variables": {}}
    record = {
        "store": store,
        "parent_id": "0" * 32,
        "resume": False,
        "jobs": None,
        "parallel": parallel,
    }
    return Target(json.dumps(record).encode(), lambda path: SharedSweep.load(path.parent), FILE)


def program() -> Target:
    """An exported program, with the checks before torch reads it."""
    from resnet8ptq.models.gates import exported_program, torch_archive

    node = {"target": "torch.ops.aten.relu.default", "inputs": [{"name": "self"}], "metadata": {}}
    size = {"as_expr": {"expr_str": "Symbol('s6', positive=True, integer=True)", "hint": None}}
    model = {"graph": {"nodes": [node]}, "sizes": [size], "in_spec": '[1, {"type": null}]'}
    records = {"archive/models/model.json": json.dumps(model).encode(), "archive/byteorder": b"l"}
    content = torch_archive.pack(records).getvalue()
    return Target(content, exported_program.read_records, "model.pt2")


TARGETS: dict[str, Callable[[], Target]] = {
    made.__name__: made
    for made in (batch, meta, onnx, quantized, keras, table, entry, sweep, program)
}
