"""Where the FP32 network comes from, and its conversion to ONNX, checked and cached."""

import functools
import logging
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pooch

from resnet8ptq import convert
from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import cache, files, machine
from resnet8ptq.core.cache import downloads_folder
from resnet8ptq.core.errors import ModelError
from resnet8ptq.data import shapes
from resnet8ptq.data.dataset import Dataset

URL = (
    "https://github.com/mlcommons/tiny/raw/master/benchmark/training/image_classification/"
    "trained_models/pretrainedResnet.h5"
)
SHA256 = "5f938a8eea605438cc7360aa13c987bc6d7bd0c8d931b2917361ae7ae4eeda2f"

log = logging.getLogger(__name__)

_CONVERTERS = (
    *("convert", "keras_file", "onnx_file", "onnx_source", "normalization", "preprocessing"),
    *("torch_module", "nodes"),
)
_TAKES = "takes a Keras .h5 or .keras file, or an .onnx file"
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"  # .h5
_ZIP_MAGIC = b"PK\x03\x04"  # .keras


@dataclass(frozen=True)
class Fp32Model:
    """A trained network as an ONNX file: NHWC float32 `input`, `probabilities` [N, classes].

    Attributes:
        source: the Keras or ONNX file; `sha256` is its hash.
        onnx_path: the converted graph, folded or not as the config says.
        conversion: what the conversion found, and what folding changed.
    """

    name: str
    source: Path
    sha256: str
    onnx_path: Path
    fold: bool
    conversion: convert.Conversion

    @property
    def parity(self) -> dict[str, float]:
        """Largest difference of probabilities from the original, by framework and file."""
        return self.conversion.parity

    def describe(self) -> dict[str, str]:
        """Return what import and preprocessing did to the graph, to be logged by these names."""
        found = self.conversion
        raised = f"{found.source_opset} -> {found.opset}"
        return {
            "opset": raised if found.source_opset != found.opset else str(found.opset),
            **(found.preprocessing.describe() if self.fold else {}),
        }


def load(config: ModelConfig, data: Dataset, cache_root: Path) -> Fp32Model:
    """Locate, check and convert the network; conversions are cached by content.

    Raises:
        ModelError: the file is missing, empty, no model, unsafe, or does not fit the data.
        ParityError: ONNX or torch disagree with the original on 1,000 training images.
    """
    source = locate(config, data.name)
    digest = files.sha256(source)
    checked = data.train.take(np.arange(len(data.train))[: convert.PARITY_IMAGES])
    key: cache.Key = {
        "model": digest,
        "onnx": convert.is_onnx(source),
        "code": cache.code(*_CONVERTERS),
        "images": checked.digest,
        "classes": len(data.class_names),
        **machine.versions(),
    }

    def make(folder: Path) -> None:
        images, classes = checked.images[:], len(data.class_names)
        # A process of its own: TensorFlow's memory and settings go when it ends, and a file that
        # crashes the reader does not take the sweep along.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, convert.limit_process) as pool:
            pool.submit(convert.convert, source, folder, images, classes).result()

    try:
        folder = cache.entry(cache_root, "models", key, make)
    except BrokenProcessPool as error:
        raise ModelError(
            f"{source}: reading it crashed the converter, or took more than this machine has"
        ) from error
    model = Fp32Model(
        name=config.name,
        source=source,
        sha256=digest,
        onnx_path=folder / (convert.FOLDED if config.fold else convert.UNFOLDED),
        fold=config.fold,
        conversion=convert.read_record(folder),
    )
    _report(model)
    return model


def _report(model: Fp32Model) -> None:
    """Log what was done to the graph.

    Raises:
        ModelError: it is to be folded, and ONNX Runtime could not.
    """
    found = model.conversion
    if model.fold and found.preprocessing.failure:
        raise ModelError(
            f"{model.source}: ONNX Runtime cannot preprocess it ({found.preprocessing.failure}); "
            "model.fold=false leaves it as it is"
        )
    if found.source_opset != found.opset:
        log.info("%s: opset %d converted to %d", model.source, found.source_opset, found.opset)
    if model.fold:
        effect = found.preprocessing.describe()
        names = ("nodes", "bytes", "operators")
        _say("model.fold: nodes {}, bytes {}; {}", *(effect[f"preprocess_{n}"] for n in names))
    reason = found.without_torch.get(model.onnx_path.name)
    if reason:
        log.warning("%s: not for backend=torch: %s", model.source, reason)


@functools.cache  # once a process, not once for each job of a sweep
def _say(text: str, *values: str) -> None:
    log.info(text.format(*values))


def locate(config: ModelConfig, data_name: str) -> Path:
    """Return the network's file, downloaded where it must be.

    Raises:
        ModelError: it is missing, empty or no model.
    """
    if config.path is not None:
        return _checked(Path(config.path).expanduser().absolute(), "model.path")
    if data_name == "shapes":
        return shapes.WEIGHTS
    named = os.environ.get("RESNET8_H5")
    if named:
        return _checked(Path(named).absolute(), "$RESNET8_H5")
    try:
        found = pooch.retrieve(
            URL,
            known_hash=f"sha256:{SHA256}",
            path=downloads_folder(),
            fname="pretrainedResnet.h5",
            downloader=pooch.HTTPDownloader(progressbar=True, timeout=15),
        )
    except Exception as error:  # requests, urllib and pooch each have their own
        raise ModelError(
            f"model.path: not set, neither is $RESNET8_H5, and {URL} cannot be had "
            f"({type(error).__name__}); set one to the .h5 file, or use data=shapes"
        ) from error
    return Path(found)


def _checked(path: Path, key: str) -> Path:
    if not path.is_file():
        raise ModelError(f"{key}: got {path}, no such file; {_TAKES}")
    with path.open("rb") as file:
        magic = file.read(len(_HDF5_MAGIC))
    if not magic:
        raise ModelError(f"{key}: {path} is empty")
    keras = magic == _HDF5_MAGIC or magic.startswith(_ZIP_MAGIC)
    if not keras and not convert.is_onnx(path):
        raise ModelError(f"{key}: {path} is not a model; {_TAKES}")
    return path
