"""Checks, describes and test-runs an untrusted file, in a separate process.

The cache keeps the description and a copy, which includes external data, or an .xml file's .bin.
The calling process loads only files that passed the check.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.file.contents import Contents, Port, RawRun, Tensors
from resnet8ptq.config.schema import BackendConfig
from resnet8ptq.core import cache, code, files, isolation
from resnet8ptq.core.confinement import MAX_SECONDS
from resnet8ptq.core.console import waiting
from resnet8ptq.core.descriptor import find_readers
from resnet8ptq.core.errors import ConfigError, ModelError, UnsupportedError, errors_as

_FREE = 8  # the length that a test run gives to an axis of free size
_CODE = (".pt", ".pth", ".jit", ".ptl")


@dataclass(frozen=True)
class Admitted:
    """A checked file, which the cache keeps as a single file, and its description."""

    path: Path
    contents: Contents

    def open_run(self, threads: int) -> RawRun:
        """Load the file; see `RawRun`."""
        run: RawRun = reader_of(self.path).open_run(self.path.read_bytes(), threads)
        return run

    def open_tensors(self, threads: int) -> Tensors:
        """Load the file so that it returns its inner tensors.

        Raises:
            UnsupportedError: files of this format do not give their inner tensors.
        """
        if not gives_tensors(self.path.suffix):
            raise UnsupportedError(f"{self.path.suffix} files do not give their inner tensors")
        tensors: Tensors = reader_of(self.path).open_tensors(self.path.read_bytes(), threads)
        return tensors

    def open_logits(self, threads: int) -> RawRun | None:
        """Load a copy that ends before the final softmax.

        Returns None if the reader finds no final softmax, or cannot cut files of this format.
        """
        run: RawRun | None = reader_of(self.path).open_logits(self.path.read_bytes(), threads)
        return run


def find_path(options: BackendConfig) -> Path:
    """Return the path that the settings name, with `~` expanded.

    Raises:
        ConfigError: the settings name no file.
    """
    if options.path is None:
        suffixes = " | ".join(find_readers())
        raise ConfigError(f"backend.path: got null, expected a quantized file: {suffixes}")
    return files.expand(options.path)


def find_suffix(path: Path, key: str = "backend.path") -> str:
    """Return the suffix of a file that can be scored, in lower case.

    Args:
        key: the setting or the command that names the file, for the error.

    Raises:
        ConfigError: the suffix is unknown, or that of a format that holds code.
    """
    suffix = path.suffix.lower()
    takes = f"expected {' | '.join(find_readers())}"
    if suffix in _CODE:
        raise ConfigError(
            f"{key}: got {path}: TorchScript and pickles are code, which no check makes "
            f"safe; {takes}; torch.export.save writes .pt2"
        )
    if suffix not in find_readers():
        if not path.exists():
            raise ConfigError(f"{key}: got {path} (not there), {takes}{files.name_nearest(path)}")
        raise ConfigError(f"{key}: got {path}, {takes}")
    return suffix


def admit(path: Path, cache_root: Path) -> Admitted:
    """Check and describe a file; the cache keeps the file and its description.

    Raises:
        ConfigError: the file is missing, of an unknown format, unsafe, damaged or not quantized, or
            fails its test run, see `_try`; or the reading process crashes or exceeds its limits.
        UnsupportedError: the library that runs the file is not installed, or OpenVINO cannot
            compile the file.
    """
    suffix = find_suffix(path)
    name = "model.zip" if suffix == ".xml" else f"model{suffix}"  # the name in the cache
    module = find_readers()[suffix].reader
    # The key needs the reader's code, because the reader is imported by name
    about = {"suffix": suffix, "reader": code.behind(module)}
    key: cache.Key = {"files": digest(path), **about, **cache.made_with(__name__)}

    def make(folder: Path) -> None:
        crashed = ModelError(f"{path}: reading it crashed, or took too much memory or time")
        with waiting("Reading the file"):
            content, facts = isolation.call(
                _read, path, module, crashed=crashed, seconds=MAX_SECONDS
            )
        (folder / name).write_bytes(content)
        (folder / "contents.json").write_text(json.dumps(facts))

    try:
        folder = cache.entry(cache_root, kind="files", key=key, make=make)
    except ModelError as error:
        raise ConfigError(f"backend.path: {error}") from None
    facts = json.loads((folder / "contents.json").read_text())
    return Admitted(folder / name, Contents.of_json(facts))


def digest(path: Path) -> str:
    """Return hashes of a file with its external data, and of the .bin file beside an .xml file.

    Raises:
        ConfigError: the path is missing or a folder.
    """
    if not path.is_file():
        state = "a folder" if path.is_dir() else f"not there{files.name_nearest(path)}"
        raise ConfigError(f"backend.path: got {path} ({state}), expected a file that exists")
    weights = path.with_suffix(".bin")
    of_weights = ""
    if path.suffix.lower() == ".xml" and weights.is_file():
        of_weights = files.sha256(weights)
    return f"{files.hash_with_data(path)} {of_weights}"


def reader_of(path: Path) -> Any:
    """Return the module that reads files with this path's suffix; the path may be a suffix only."""
    suffix = path.suffix.lower() or path.name
    return import_module(find_readers()[suffix].reader)


def gives_tensors(suffix: str) -> bool:
    """Return whether files of this suffix give their inner tensors."""
    if suffix not in find_readers():
        return False
    return hasattr(reader_of(Path(suffix)), "open_tensors")


def _read(path: Path, module: str) -> tuple[bytes, dict[str, Any]]:
    """Return the content as a single file, and its description; called in a separate process.

    Args:
        module: the name of the reader's module.

    Raises:
        ModelError: the file is damaged or unsafe, `Contents.narrowed` is empty, or the test run
            fails.
        UnsupportedError: see `admit`.
    """
    substitute = files.name_substitute(path)
    if substitute:
        raise ModelError(f"{path} {substitute}")
    reader = import_module(module)
    with errors_as(ModelError, f"{path}: cannot be read"):
        content: bytes = reader.fetch(path)
        contents: Contents = reader.read(content, path)

    # A float32 file is a mistake, such as the path of the FP32 network
    if not contents.narrowed:
        raise ModelError(
            f"{path}: none of its {len(contents.layers)} layers has integer or float16 weights; "
            "expected a quantized file"
        )
    with errors_as(ModelError, f"{path}: cannot be run"):
        tried = _try(contents, lambda: reader.open_run(content, 1))
    return content, asdict(tried)


def _try(contents: Contents, opened: Any) -> Contents:
    """Return the description, completed by a run on zeros.

    The run shows whether the batch size is fixed, and the shapes of the outputs. With free sizes in
    the inputs, the shapes stay as declared; if the run then fails, the batch size stays, too.

    Args:
        opened: loads the file as a `RawRun`.

    Raises:
        Exception: the run fails although the inputs have fixed sizes.
    """
    free = any(None in port.shape for port in contents.inputs)
    sizes: tuple[int, ...] = (2, 1)
    if contents.batch is not None and contents.batch != 1:
        sizes = (contents.batch,)

    # A batch of two shows whether the file takes any size
    failure: Exception | None = None
    for size in sizes:
        zeros = [_zeros(port, size) for port in contents.inputs]
        try:
            outputs: Sequence[NDArray[Any]] = opened()(zeros)
            shapes = [array.shape for array in outputs]
            if any(shape[:1] != (size,) for shape in shapes):
                raise ValueError(f"returned {shapes} for {size} samples")
        except Exception as error:
            failure = error
            continue

        # Free sizes stay free: the zeros have a size that this function chose
        shaped = []
        for port, array in zip(contents.outputs, outputs, strict=True):
            if not free:
                port = replace(port, shape=tuple(array.shape[1:]))
            shaped.append(port)
        fixed = contents.batch
        if fixed in (None, 1):  # the run with two samples decides
            fixed = None if size == 2 else 1
        return replace(contents, batch=fixed, outputs=tuple(shaped))
    if free:
        return contents
    raise failure or ValueError("it has no inputs")


def _zeros(port: Port, size: int) -> NDArray[Any]:
    shape = [size]
    for length in port.shape:
        if length is None:
            length = _FREE
        shape.append(length)
    return np.zeros(shape, port.dtype)
