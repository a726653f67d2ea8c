"""The FP32 network: its conversion to ONNX, checked, and cached by content."""

import functools
import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import cache, files, machine
from resnet8ptq.core.errors import ModelError
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.models import conversion
from resnet8ptq.models.locate import locate

log = logging.getLogger(__name__)

_CONVERTERS = ("models", "graph")  # whose code makes an entry of the cache


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
    conversion: conversion.Conversion

    @property
    def parity(self) -> dict[str, float]:
        """Largest difference of probabilities from the original, by framework and file."""
        return self.conversion.parity

    def describe(self) -> dict[str, str]:
        """Return what import and preprocessing did to the graph, to be logged by these names."""
        converted = self.conversion
        raised = f"{converted.source_opset} -> {converted.opset}"
        return {
            "opset": raised if converted.source_opset != converted.opset else str(converted.opset),
            **(converted.preprocessing.describe() if self.fold else {}),
        }


def load(config: ModelConfig, data: Dataset, cache_root: Path) -> Fp32Model:
    """Locate, check and convert the network; conversions are cached by content.

    Raises:
        ModelError: the file is missing, empty, not a model, unsafe, or does not fit the data.
        ParityError: ONNX or torch disagree with the original on 1,000 training images.
    """
    source = locate(config, data.name)
    digest = files.sha256(source)
    checked = data.train.take(np.arange(len(data.train))[: conversion.PARITY_IMAGES])
    key: cache.Key = {
        "model": digest,
        "onnx": conversion.is_onnx(source),
        "code": cache.code(*_CONVERTERS),
        "images": checked.digest,
        "classes": len(data.class_names),
        **machine.versions(),
    }

    def make(folder: Path) -> None:
        images, classes = checked.images[:], len(data.class_names)
        # A process of its own: TensorFlow's memory and settings go when it ends, and a file that
        # crashes the reader does not end the sweep.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, conversion.limit_process) as pool:
            pool.submit(conversion.convert, source, folder, images, classes).result()

    try:
        folder = cache.entry(cache_root, "models", key, make)
    except BrokenProcessPool as error:
        raise ModelError(
            f"{source}: reading it crashed the converter, or took too much memory or time"
        ) from error
    model = Fp32Model(
        name=config.name,
        source=source,
        sha256=digest,
        onnx_path=folder / (conversion.FOLDED if config.fold else conversion.UNFOLDED),
        fold=config.fold,
        conversion=conversion.read_record(folder),
    )
    _report(model)
    return model


def _report(model: Fp32Model) -> None:
    """Log what was done to the graph.

    Raises:
        ModelError: it is to be folded, and ONNX Runtime could not.
    """
    done = model.conversion
    if model.fold and done.preprocessing.failure:
        raise ModelError(
            f"{model.source}: ONNX Runtime cannot preprocess it ({done.preprocessing.failure}); "
            "model.fold=false leaves it as it is"
        )
    if done.source_opset != done.opset:
        log.info("%s: opset %d converted to %d", model.source, done.source_opset, done.opset)
    if model.fold:
        effect = done.preprocessing.describe()
        names = ("nodes", "bytes", "operators")
        _say("model.fold: nodes {}, bytes {}; {}", *(effect[f"preprocess_{n}"] for n in names))
    reason = done.without_torch.get(model.onnx_path.name)
    if reason:
        log.warning("%s: backend=torch cannot run it: %s", model.source, reason)


@functools.cache  # once a process, not once for each job of a sweep
def _say(text: str, *values: str) -> None:
    log.info(text.format(*values))
