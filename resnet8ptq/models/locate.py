"""Where the FP32 network's file lies: named, in the environment, or downloaded."""

import os
from pathlib import Path

import pooch

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core.cache import downloads_folder
from resnet8ptq.core.errors import ModelError
from resnet8ptq.data import shapes
from resnet8ptq.models import conversion

URL = (
    "https://github.com/mlcommons/tiny/raw/master/benchmark/training/image_classification/"
    "trained_models/pretrainedResnet.h5"
)
SHA256 = "5f938a8eea605438cc7360aa13c987bc6d7bd0c8d931b2917361ae7ae4eeda2f"
_TAKES = "takes a Keras .h5 or .keras file, or an .onnx file"
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"  # .h5
_ZIP_MAGIC = b"PK\x03\x04"  # .keras


def locate(config: ModelConfig, data_name: str) -> Path:
    """Return the network's file, downloaded where it must be.

    Raises:
        ModelError: it is missing, empty or not a model.
    """
    if config.path is not None:
        return _checked(Path(config.path).expanduser().absolute(), "model.path")
    if data_name == "shapes":
        return shapes.WEIGHTS
    named = os.environ.get("RESNET8_H5")
    if named:
        return _checked(Path(named).absolute(), "$RESNET8_H5")
    try:
        downloaded = pooch.retrieve(
            URL,
            known_hash=f"sha256:{SHA256}",
            path=downloads_folder(),
            fname="pretrainedResnet.h5",
            downloader=pooch.HTTPDownloader(progressbar=True, timeout=15),
        )
    except Exception as error:  # requests, urllib and pooch each have their own
        raise ModelError(
            f"model.path: not set, neither is $RESNET8_H5, and {URL} is not available "
            f"({type(error).__name__}); set one to the .h5 file, or use data=shapes"
        ) from error
    return Path(downloaded)


def _checked(path: Path, key: str) -> Path:
    if not path.is_file():
        raise ModelError(f"{key}: got {path}, no such file; {_TAKES}")
    with path.open("rb") as file:
        magic = file.read(len(_HDF5_MAGIC))
    if not magic:
        raise ModelError(f"{key}: {path} is empty")
    keras = magic == _HDF5_MAGIC or magic.startswith(_ZIP_MAGIC)
    if not keras and not conversion.is_onnx(path):
        raise ModelError(f"{key}: {path} is not a model; {_TAKES}")
    return path
