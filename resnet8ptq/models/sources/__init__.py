"""Readers of network file formats, one module for each, and the table of formats.

Each reader has `read(source, sample) -> Network`. It is imported only in the separate process that
reads one file (see `model.load`), because some readers import TensorFlow, and a crash ends only
that process.
"""

import copy
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import onnx
from numpy.typing import NDArray

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.records import names_of
from resnet8ptq.core.text import no_such_name
from resnet8ptq.graph.pruning import prune
from resnet8ptq.models.batch_axis import Predict

Sample = NDArray[Any] | None  # [1, ...], as the data has it, maybe a record; None without data


def is_record(sample: Sample) -> bool:
    """Return whether a sample has several inputs."""
    return sample is not None and bool(names_of(sample.dtype))


@dataclass(frozen=True)
class Network:
    """The content of a network's file.

    Attributes:
        proto: the graph as ONNX, normalized; its batch size is fixed only if the file fixes it.
        predict: runs the original in its framework, on network inputs.
        source_opset: opset of an ONNX file, or of the export from another format.
        moved: the original batch axis of each input and output whose batch axis was moved to the
            front.
    """

    proto: onnx.ModelProto
    predict: Predict
    source_opset: int
    moved: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Module:
    """A user's `torch.nn.Module` class, by dotted path, with constructor arguments."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ModelConfig) -> "Module | None":
        """Return the user's module class in the settings; None if they name a file."""
        return None if config.module is None else cls(config.module, config.module_args or {})


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        takes: its description in messages.
        reader: the function that reads it, `module:name`, as full text because `core.code` searches
            for it.
        suffixes: allowed file suffixes, in lower case; empty: any.
        magic: position and bytes that identify the format; None: only the suffix identifies it.
        contains: a file that identifies a folder of this format; None: the format is a single file.
    """

    name: str
    takes: str
    reader: str
    suffixes: tuple[str, ...] = ()
    magic: tuple[int, bytes] | None = None
    contains: str | None = None

    def is_of(self, path: Path) -> bool:
        """Return whether a file or folder has this format, by name and first bytes."""
        if self.contains is not None:
            return (path / self.contains).is_file()
        if not path.is_file() or (self.suffixes and path.suffix.lower() not in self.suffixes):
            return False
        if self.magic is None:
            return True
        start, magic = self.magic
        with path.open("rb") as file:
            return file.read(start + len(magic))[start:] == magic


_ZIP = b"PK\x03\x04"
_KERAS = ("keras", "a Keras .h5 or .keras file", "resnet8ptq.models.sources.keras:read")
FORMATS = (
    Format(
        "saved_model",
        "a TensorFlow SavedModel folder",
        "resnet8ptq.models.sources.saved_model:read",
        contains="saved_model.pb",
    ),
    Format("onnx", "an .onnx file", "resnet8ptq.models.sources.onnx:read", (".onnx",)),
    Format(
        "exported_program",
        "a torch .pt2 file",
        "resnet8ptq.models.sources.exported_program:read",
        (".pt2",),
        (0, _ZIP),
    ),
    Format(
        "tflite",
        "a float .tflite file",
        "resnet8ptq.models.sources.tflite:read",
        magic=(4, b"TFL3"),
    ),
    Format(*_KERAS, magic=(0, b"\x89HDF\r\n\x1a\n")),
    Format(*_KERAS, magic=(0, _ZIP)),
)
EXPECTED = f"expected {', '.join(dict.fromkeys(item.takes for item in FORMATS))}"
TFLITE_FORMATS = ("keras", "saved_model")  # that TensorFlow's converter takes


def find_format(path: Path) -> Format | None:
    """Return the format of a file or folder; None if it is unknown."""
    return next((item for item in FORMATS if item.is_of(path)), None)


def takes_values(path: Path) -> bool:
    """Return whether `model.inputs` may set inputs of a file."""
    file_format = find_format(path)
    return file_format is not None and file_format.name == "onnx"


def format_name(path: Path, is_module: bool = False) -> str:
    """Return a network's format; `module` marks a weights file, which may look like Keras's."""
    file_format = None if is_module else find_format(path)
    return file_format.name if file_format else "module"


def is_tflites(name: str, fp32: bool) -> bool:
    """Return whether TensorFlow converts a format to .tflite; for FP32, .tflite itself counts."""
    return name in TFLITE_FORMATS or (fp32 and name == "tflite")


def read(
    source: Path,
    sample: Sample,
    module: Module | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Network:
    """Read a network from its file or folder, or from the weights of `module`.

    Args:
        sample: a sample, for files that do not declare the inputs; records have several inputs.
        inputs: see `onnx.read`.

    Raises:
        ModelError: the file is not a network of a supported kind.
    """
    if module is not None:
        from resnet8ptq.models.sources import torch_module

        return torch_module.read(source, sample, module)
    file_format = find_format(source)
    if file_format is None:
        raise ModelError(f"{source}: is not a model; {EXPECTED}")
    if inputs and not takes_values(source):
        raise ModelError(f"model.inputs: got {source}, expected an .onnx file")
    reader = resolve_name(file_format.reader)
    network: Network = reader(source, sample, *((inputs,) if inputs else ()))
    return network


def select_outputs(network: Network, names: Collection[str]) -> Network:
    """Return the network with only the outputs `names`, in the order of the file.

    Raises:
        ModelError: an output does not exist.
    """
    every = [value.name for value in network.proto.graph.output]
    if unknown := [name for name in names if name not in every]:
        raise ModelError(no_such_name("model.outputs", unknown[0], every))
    kept = [index for index, name in enumerate(every) if name in names]
    proto = copy.deepcopy(network.proto)
    del proto.graph.output[:]
    proto.graph.output.extend(network.proto.graph.output[index] for index in kept)
    prune(proto.graph)

    def predict(batch: NDArray[Any]) -> list[NDArray[Any]]:
        outputs = network.predict(batch)
        return [outputs[index] for index in kept]

    return replace(network, proto=proto, predict=predict)


def prepare_tensorflow() -> None:
    """Silence TensorFlow and tf2onnx, and disable oneDNN; call it before importing TensorFlow."""
    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # plain FP32 sums, without a banner
