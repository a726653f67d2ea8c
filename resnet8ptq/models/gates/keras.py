"""An untrusted Keras file: refused where it could run code or read other files.

Keras refuses most of this by itself, and more with each version. All that is refused here is
refused before Keras sees the file.
"""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.text import one_line

CONFIG, WEIGHTS = "config.json", "model.weights.h5"
TRAINING = "compile_config"  # optimizer, loss and metrics: not loaded, see `sources.keras`
MAX_BYTES = 2**31 - 1  # of all weights, as for ONNX files
MAX_CONFIG_BYTES = 2**24
# Where layers come from; `keras.utils` has functions that load and save files.
_PARTS = r"layers|models|engine|activations|initializers|constraints|regularizers|dtype_policies"
_MODULES = re.compile(rf"builtins|keras(\.src)?(\.({_PARTS})(\.\w+)*)?")
_CODE = {"Lambda", "TFSMLayer", "__lambda__"}  # Python's bytecode; a SavedModel by its path


def check(path: Path) -> None:
    """Refuse a .h5 or .keras file that holds more than layers of Keras and their weights.

    Raises:
        ModelError: damaged, or with code, classes of others, or links to other files in it.
    """
    try:
        reason = next(_reasons_against(path), None)
    except Exception as error:  # zipfile's, h5py's and json's own
        raise ModelError(f"{path}: Keras refuses it ({one_line(error)})") from None
    if reason is not None:
        raise ModelError(f"{path}: {reason}")


def read_config(path: Path) -> Any:
    """Return the JSON that describes the layers."""
    if h5py.is_hdf5(path):
        with h5py.File(path) as file:
            return json.loads(file.attrs.get("model_config", "{}"))
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read(CONFIG))


def _reasons_against(path: Path) -> Iterator[str]:
    weights: Path | io.BytesIO | None = path
    if not h5py.is_hdf5(path):
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            if len(sizes) < len(archive.infolist()):
                yield "two of its members have one name"
            if sizes.get(CONFIG, 0) > MAX_CONFIG_BYTES or sum(sizes.values()) > MAX_BYTES:
                yield f"unpacks to {sum(sizes.values())} bytes; takes at most {MAX_BYTES}"
            weights = io.BytesIO(archive.read(WEIGHTS)) if WEIGHTS in sizes else None
    yield from _strange_config(read_config(path))
    if weights is not None:
        with h5py.File(weights) as file:
            yield from _strange_weights(file)


def find_objects(config: Any) -> Iterator[dict[str, Any]]:
    """Yield each JSON object in what `read_config` returned, but for those about training."""
    waiting = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += (part for key, part in value.items() if key != TRAINING)
            yield value


def _strange_config(config: Any) -> Iterator[str]:
    for value in find_objects(config):
        name, module = value.get("class_name"), value.get("module")
        registered = value.get("registered_name")
        for kind in (name, registered, value.get("function_type")):
            if kind in _CODE:
                yield f"its layer {kind!r} contains code; takes layers of Keras without code"
        if module is not None and not _MODULES.fullmatch(str(module)):
            yield f"asks for {name!r} of module {module!r}; takes layers of Keras"
        if ">" in str(registered):
            yield f"asks for {registered!r}; takes layers of Keras"


def _strange_weights(file: h5py.File) -> Iterator[str]:
    """Yield what would read another file, or would take more memory than weights do."""
    groups: list[h5py.Group] = [file]
    seen = {file["/"]}
    count = 0
    while groups:
        group = groups.pop()
        for name in group:
            if isinstance(group.get(name, getlink=True), h5py.ExternalLink | h5py.SoftLink):
                yield f"{name!r} is a link; takes weights in the file itself"
                continue
            item = group[name]
            if isinstance(item, h5py.Dataset):
                if item.external or item.is_virtual:
                    yield f"{name!r} lies in another file; takes weights in the file itself"
                count += item.size * item.dtype.itemsize
            elif isinstance(item, h5py.Group) and item not in seen:
                seen.add(item)
                groups.append(item)
    if count > MAX_BYTES:
        yield f"claims {count} bytes of weights; takes at most {MAX_BYTES}"
