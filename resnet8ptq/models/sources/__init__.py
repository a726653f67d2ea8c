"""One module for each file format that a network may come in, found by what the file is.

Each has `read(source, shape) -> Network`. The modules are imported where they are needed, in the
process that reads one file (see `model.load`): some import TensorFlow, and a file that crashes a
reader takes nothing along.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import onnx

from resnet8ptq.core.errors import ModelError
from resnet8ptq.models.batch import Predict

Shape = tuple[int, ...] | None  # of a sample, as the data has it; None where there is no data


@dataclass(frozen=True)
class Network:
    """A network as its file has it.

    Attributes:
        proto: the graph as ONNX, normalized; its batch is fixed only where the file fixes it.
        predict: the original, in its own framework, on samples in the network's own layout.
        source_opset: of an ONNX file; of others, as exported.
    """

    proto: onnx.ModelProto
    predict: Predict
    source_opset: int


@dataclass(frozen=True)
class Module:
    """A class of the user's own, a `torch.nn.Module`, by its dotted path.

    Attributes:
        arguments: what it is called with.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        takes: what a message calls it.
        reader: the function that reads it, `module:name`.
        suffixes: lower-case ends of the names that such a file may have.
        magic: what it begins with, and from which byte on; None: nothing that it is known by.
        contains: what a folder of this format holds; None: it is a file.
    """

    name: str
    takes: str
    reader: str
    suffixes: tuple[str, ...] = ()
    magic: tuple[int, bytes] | None = None
    contains: str | None = None

    def is_of(self, path: Path) -> bool:
        """Tell whether a file or folder is of this format, by its name and its first bytes."""
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
    Format(
        "keras",
        "a Keras .h5 or .keras file",
        "resnet8ptq.models.sources.keras:read",
        magic=(0, b"\x89HDF\r\n\x1a\n"),
    ),
    Format(
        "keras",
        "a Keras .h5 or .keras file",
        "resnet8ptq.models.sources.keras:read",
        magic=(0, _ZIP),
    ),
)
TAKES = f"takes {', '.join(dict.fromkeys(each.takes for each in FORMATS))}"


def find_format(path: Path) -> Format | None:
    """Return the format of a file or folder; None where it is of none."""
    return next((each for each in FORMATS if each.is_of(path)), None)


def read(
    source: Path,
    shape: Shape,
    module: Module | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Network:
    """Read a network from its file or folder, or from the weights of `module`.

    Args:
        shape: where the file does not say what the network takes, this does.
        inputs: see `onnx.read`.

    Raises:
        ModelError: says what the file is or does, and what is taken.
    """
    if module is not None:
        from resnet8ptq.models.sources import torch_module

        return torch_module.read(source, shape, module)
    found = find_format(source)
    if found is None:
        raise ModelError(f"{source}: is not a model; {TAKES}")
    if inputs and found.name != "onnx":
        raise ModelError(f"model.inputs: takes an .onnx file, and {source} is none")
    more = (inputs,) if inputs else ()
    network: Network = resolve_name(found.reader)(source, shape, *more)
    return network
