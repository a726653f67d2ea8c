"""Finds the file of the FP32 network, or downloads the default network, and hashes it."""

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pooch

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import files
from resnet8ptq.core.cache import downloads_folder
from resnet8ptq.core.errors import ModelError
from resnet8ptq.data import shapes
from resnet8ptq.models.sources import formats

URL = (
    "https://github.com/mlcommons/tiny/raw/master/benchmark/training/image_classification/"
    "trained_models/pretrainedResnet.h5"
)
MAX_BYTES = 2**31 - 1  # same as the limit of each format
WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")  # suffixes of files with weights alone
QUANTIZED = (".xml", ".pte")  # suffixes of files that only `resnet8ptq judge` takes
MAX_FOLDER_BYTES = 2**33  # largest SavedModel, as an optimizer's variables triple the size
SHA256 = "5f938a8eea605438cc7360aa13c987bc6d7bd0c8d931b2917361ae7ae4eeda2f"


def locate(config: ModelConfig, data_name: str) -> Path:
    """Return the network's file or folder, downloaded if necessary; for a module, its weights.

    Raises:
        ModelError: the file is missing, too large or not a model; the settings of a module are
            incomplete, or name a model's file too; or the default network cannot be downloaded.
    """
    # The settings take precedence over the data set's network and the environment
    if config.module is not None:
        return _state_dict(config)
    if config.path is not None:
        return _checked(files.expand(config.path).absolute(), "model.path")
    if data_name == "shapes":
        return shapes.WEIGHTS
    named = os.environ.get("RESNET8_H5")
    if named:
        return _checked(Path(named).absolute(), "$RESNET8_H5")

    # Download the default network only if nothing else is named
    try:
        downloaded = pooch.retrieve(
            URL,
            known_hash=f"sha256:{SHA256}",
            path=downloads_folder(),
            fname="pretrainedResnet.h5",
            downloader=pooch.HTTPDownloader(progressbar=True, timeout=15),
        )
    except Exception as error:  # requests, urllib and pooch have their own types
        raise ModelError(
            f"model.path: not set, neither is $RESNET8_H5, and {URL} is not available "
            f"({type(error).__name__}); set one to the .h5 file, or use data=shapes"
        ) from error
    return Path(downloaded)


def hash_network(config: ModelConfig, source: Path) -> str:
    """Return a hexadecimal hash of all sources of the network.

    These are the files, `model.inputs` and `model.outputs`; for a module also its dotted path, its
    arguments, and the `.py` files of its top-level package, or the file of its top-level module.

    Args:
        source: the result of `locate`.

    Raises:
        ModelError: the code of a module is not found, the module is built into Python, or
            `model.module` has no dot.
    """
    more: list[Any] = []
    if config.inputs or config.outputs:
        more = [config.inputs, config.outputs]
    if config.module is not None:
        more += [config.module, config.module_args or {}, _hash_code(config.module)]
    content = files.hash_folder(source) if source.is_dir() else files.hash_with_data(source)
    if not more:
        return content
    return hashlib.sha256(json.dumps([content, *more], default=str).encode()).hexdigest()


def _hash_code(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module.split(".")[0])
    except (ImportError, ValueError):
        spec = None
    has_code = spec is not None and (spec.submodule_search_locations or spec.has_location)
    if spec is None or not has_code or "." not in module:
        raise ModelError(
            f"model.module: got {module!r}, which is not found; expected package.module.Class "
            "in the current folder or on PYTHONPATH"
        )
    if spec.submodule_search_locations:
        hashes = []
        for folder in spec.submodule_search_locations:
            hashes.append(files.hash_folder(Path(folder), "*.py"))
        return " ".join(hashes)
    return files.sha256(Path(str(spec.origin)))


def _state_dict(config: ModelConfig) -> Path:
    if config.path is not None:
        raise ModelError("model.path: set together with model.module; expected one of the two")
    if config.state_dict is None:
        raise ModelError("model.state_dict: not set; model.module takes its weights from there")
    path = files.expand(config.state_dict).absolute()
    if not path.is_file():
        raise ModelError(f"model.state_dict: got {path}, no such file")
    return _check_size(path)


def _checked(path: Path, key: str) -> Path:
    if not path.exists():
        near = files.name_nearest(path)
        raise ModelError(f"{key}: got {path}, no such file{near}; {formats.EXPECTED}")
    substitute = files.name_substitute(path) if path.is_file() else ""
    if substitute:
        raise ModelError(f"{key}: {path} {substitute}")

    # Name the command or setting that takes the file
    if formats.find_format(path) is None:
        suffix = path.suffix.lower()
        mend = ""
        if suffix in QUANTIZED:
            mend = f"; a file of another program is scored by: resnet8ptq judge FP32 {path.name}"
        elif suffix in WEIGHTS and key == "model.path":
            mend = "; weights alone: model.module=PACKAGE.CLASS model.state_dict=FILE"
        raise ModelError(f"{key}: {path} is not a model; {formats.EXPECTED}{mend}")
    return _check_size(path)


def _check_size(path: Path) -> Path:
    """Return the path; refuse a file or folder above the limit, because all of it is hashed."""
    if path.is_dir():
        stored = [file for file in path.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in stored)
        most = MAX_FOLDER_BYTES
    else:
        size = path.stat().st_size
        most = MAX_BYTES
    if size > most:
        raise ModelError(f"{path}: larger than {most / 2**30:.0f} GiB, the limit")
    return path
