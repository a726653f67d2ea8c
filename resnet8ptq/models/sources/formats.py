"""The table of file formats for networks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resnet8ptq.core.errors import ModelError


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        takes: a description of the format, for messages.
        reader: the function that reads the format, as `module:name`, written out because
            `core.code` searches for it.
        suffixes: allowed file suffixes, in lower case; empty for any.
        magic: position and bytes that each file of the format has; None for any content.
        check: the function, as `module:name`, that refuses damaged and unsafe files before the
            data set is read; empty if only the reader refuses them.
        contains: a file that identifies a folder of this format; None if the format is a single
            file.
    """

    name: str
    takes: str
    reader: str
    check: str = ""
    suffixes: tuple[str, ...] = ()
    magic: tuple[int, bytes] | None = None
    contains: str | None = None

    def is_of(self, path: Path) -> bool:
        """Return whether a path has this format.

        A file is recognized by suffix and first bytes, a folder by the file `contains` in it.
        """
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
_KERAS = (
    "keras",
    "a Keras .h5 or .keras file",
    "resnet8ptq.models.sources.keras:read",
    "resnet8ptq.models.gates.keras:read_keras",
)
FORMATS = (
    Format(
        "saved_model",
        "a TensorFlow SavedModel folder",
        "resnet8ptq.models.sources.saved_model:read",
        contains="saved_model.pb",
    ),
    Format(
        "onnx",
        "an .onnx file",
        "resnet8ptq.models.sources.onnx:read",
        check="resnet8ptq.models.sources.onnx:check",
        suffixes=(".onnx",),
    ),
    Format(
        "exported_program",
        "a torch .pt2 file",
        "resnet8ptq.models.sources.exported_program:read",
        check="resnet8ptq.models.gates.exported_program:read_network",
        suffixes=(".pt2",),
        magic=(0, _ZIP),
    ),
    Format(
        "tflite",
        "a float .tflite file",
        "resnet8ptq.models.sources.tflite:read",
        check="resnet8ptq.models.gates.tflite:check",
        magic=(4, b"TFL3"),
    ),
    Format(*_KERAS, magic=(0, b"\x89HDF\r\n\x1a\n")),
    Format(*_KERAS, magic=(0, _ZIP)),
)
_TAKEN = dict.fromkeys(item.takes for item in FORMATS)  # each once; two formats are Keras's
EXPECTED = f"expected {', '.join(_TAKEN)}"
TFLITE_FORMATS = ("keras", "saved_model")  # formats that TensorFlow's converter takes


def find_format(path: Path) -> Format | None:
    """Return the format of a file or folder, see `Format.is_of`; None if unknown.

    The format's check and reader decide whether the content is sound.
    """
    for file_format in FORMATS:
        if file_format.is_of(path):
            return file_format
    return None


def takes_values(path: Path) -> bool:
    """Return whether `model.inputs` may set inputs of a file."""
    file_format = find_format(path)
    return file_format is not None and file_format.name == "onnx"


def check_values(path: Path, inputs: Mapping[str, Any] | None) -> None:
    """Raise `ModelError` if the setting `model.inputs` is set, and the file is not ONNX."""
    if inputs and not takes_values(path):
        raise ModelError(f"model.inputs: got {path}, expected an .onnx file")


def format_name(path: Path, is_module: bool = False) -> str:
    """Return the name of a network's format; `module` for a torch module or an unknown file.

    Args:
        is_module: whether the file has the weights of a torch module.
    """
    file_format = None if is_module else find_format(path)
    if file_format is None:
        return "module"
    return file_format.name


def is_tflites(name: str, is_float: bool) -> bool:
    """Return whether a network of this format can become a .tflite file without ONNX.

    TensorFlow's converter takes the formats of `TFLITE_FORMATS`. A .tflite file counts only if
    `is_float` is set: the artifact then computes in float.
    """
    return name in TFLITE_FORMATS or (is_float and name == "tflite")
