"""The FP32 network: its conversion to ONNX, checked, and cached by content."""

import functools
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import cache, code, isolation, machine
from resnet8ptq.core.errors import ModelError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.models import conversion
from resnet8ptq.models.contract import Contract
from resnet8ptq.models.locate import digest as hash_source
from resnet8ptq.models.locate import locate
from resnet8ptq.models.sources import Module, find_format

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fp32Model:
    """A trained network as an ONNX file, with its own inputs and outputs.

    Attributes:
        source: the file or folder it came as; of a module, its weights. `sha256` is the hash of
            all that it came from.
        onnx_path: the converted graph, folded or not as the config says; corrected or fine-tuned
            where a run has done that.
        conversion: what the conversion found, and what folding changed.
        uncorrected: the converted graph, where `onnx_path` is another one.
    """

    name: str
    source: Path
    sha256: str
    onnx_path: Path
    fold: bool
    conversion: conversion.Conversion
    uncorrected: Path | None = None

    def with_weights_of(self, onnx_path: Path) -> "Fp32Model":
        """Return the network with the weights and biases of another graph, otherwise the same."""
        return replace(self, onnx_path=onnx_path, uncorrected=self.uncorrected or self.onnx_path)

    @property
    def contract(self) -> Contract:
        """What it takes and returns."""
        return self.conversion.contract

    @property
    def final(self) -> str:
        """What it returns: `probabilities`, `logits` or `values` (see `conversion.find_final`)."""
        return self.conversion.final

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
        ModelError: the file is missing, empty, not a model, unsafe, or does not fit the data.
        ParityError: ONNX or torch disagree with the original on up to 1,000 training samples.
    """
    source = locate(config, data.name)
    digest = hash_source(config, source)
    checked = _parity_split(data.calibrating if len(data.calibrating) else data.test)
    module = module_of(config)
    found = None if module else find_format(source)
    key: cache.Key = {
        "model": digest,
        "format": found.name if found else "module",
        "code": code.behind(conversion.__name__),
        "images": checked.digest,
        **machine.versions(),
    }

    crashed = ModelError(f"{source}: {conversion.CRASHED}")

    def make(folder: Path) -> None:
        log.info("converting the network: %s", source)
        samples = np.asarray(checked.images[:])
        taken = (source, folder, samples, module, config.inputs, checked.preprocessing)
        # A module is the user's own code, and may download.
        network = module is not None
        isolation.call(conversion.convert, *taken, crashed=crashed, network=network)

    folder = cache.entry(cache_root, "models", key, make)
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
    if found.why_fixed:
        log.warning(
            "%s: takes %d samples at once, no other number: %s",
            model.source,
            found.contract.batch,
            found.why_fixed,
        )
    reason = found.without_torch.get(model.onnx_path.name)
    if reason:
        log.warning("%s: backend=torch cannot run it: %s", model.source, reason)


def _parity_split(split: Split) -> Split:
    """Return the first samples of a split: what the frameworks must agree on, within a budget."""
    size = 4 * math.prod(split.images.shape[1:])  # of float32
    count = min(conversion.PARITY_SAMPLES, max(conversion.PARITY_BYTES // size, 1), len(split))
    return split.take(np.arange(count))


def module_of(config: ModelConfig) -> Module | None:
    """Return the class of the user's own that the settings name; None where they name a file."""
    return None if config.module is None else Module(config.module, config.module_args or {})


@functools.cache  # once a process, not once for each job of a sweep
def _say(text: str, *values: str) -> None:
    log.info(text.format(*values))
