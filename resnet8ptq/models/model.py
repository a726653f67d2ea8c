"""Loads the FP32 network: locates, checks and converts it, and caches the result by content."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import cache, code, files, isolation, machine
from resnet8ptq.core.confinement import MAX_SECONDS
from resnet8ptq.core.console import log_once, waiting
from resnet8ptq.core.errors import ModelError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.models import conversion, gates
from resnet8ptq.models.contract import Contract
from resnet8ptq.models.network_path import hash_network, locate
from resnet8ptq.models.sources import formats
from resnet8ptq.models.sources.formats import format_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fp32Model:
    """A trained network as an ONNX file.

    Attributes:
        source: the user's file or folder; for a module, the weights file.
        sha256: hash of all sources of the network, see `hash_network`.
        onnx_path: the converted graph, folded if `fold` is set; after a correction or fine-tuning,
            the changed graph.
        uncorrected: the converted graph, if `onnx_path` is a corrected or fine-tuned graph.
        is_module: whether the source holds the weights of a torch module.
    """

    name: str
    source: Path
    sha256: str
    onnx_path: Path
    fold: bool
    conversion: conversion.Conversion
    uncorrected: Path | None = None
    is_module: bool = False

    def with_weights_of(self, onnx_path: Path) -> "Fp32Model":
        """Return the network with a corrected or fine-tuned graph in place of its own."""
        return replace(self, onnx_path=onnx_path, uncorrected=self.uncorrected or self.onnx_path)

    @property
    def format(self) -> str:
        """The name of the source's format."""
        return format_name(self.source, self.is_module)

    @property
    def contract(self) -> Contract:
        """Inputs and outputs of the network."""
        return self.conversion.contract

    @property
    def final(self) -> str:
        """The kind of the network's outputs, see `conversion.find_final`."""
        return self.conversion.final

    def describe(self) -> dict[str, str]:
        """Return the opset and, if `fold` is set, the effect of folding, as MLflow params."""
        record = self.conversion
        params = {"opset": str(record.opset)}
        if record.source_opset != record.opset:
            params["opset"] = f"{record.source_opset} -> {record.opset}"
        if self.fold:
            params |= record.preprocessing.describe()
        return params


def check_file(config: ModelConfig, source: Path, cache_root: Path) -> None:
    """Refuse a file that fails the check of its format, before the data are read.

    The weights of a module pass. So does a file in a format without a check, unless `model.inputs`
    is set.

    Args:
        source: the result of `locate`.

    Raises:
        ModelError: the file is refused, its format takes no `model.inputs`, or its check crashed or
            took too much memory or time.
    """
    file_format = None if config.module is not None else formats.find_format(source)
    if file_format is None:
        return
    formats.check_values(source, config.inputs)
    if not file_format.check:
        return

    # A file that has passed is not checked again
    key: cache.Key = {
        "model": hash_network(config, source),
        "format": file_format.name,
        "code": code.behind(__name__),
        **machine.versions(),
    }

    def make(folder: Path) -> None:
        crashed = ModelError(f"{source}: {conversion.CRASHED}")
        arguments = source, file_format.check, config.inputs
        with waiting("Checking the network"):
            isolation.call(gates.check, *arguments, crashed=crashed, seconds=MAX_SECONDS)
        (folder / "checked").touch()

    cache.entry(cache_root, "checks", key, make)


def load_network(
    config: ModelConfig, data: Dataset, cache_root: Path, torch: bool = True
) -> Fp32Model:
    """Locate, check and convert the network; conversions are cached by content.

    Samples decide the sizes of the graph.

    Args:
        torch: whether to compare torch with ONNX Runtime.

    Raises:
        ModelError: see `locate`, `hash_network` and `conversion.convert`; or folding failed, or a
            separate process crashed or took too much memory or time.
        DataError: see `conversion.convert`.
        ParityError: see `conversion.convert`. Up to 1,000 samples of `data.calibrating` are
            compared; without any, samples of `data.test`.
    """
    source = locate(config, data.name)
    digest = hash_network(config, source)
    is_module = config.module is not None  # a module is the user's code, which may download files

    # Choose the samples on which the frameworks must agree
    split = data.calibrating if len(data.calibrating) else data.test
    affordable = max(conversion.PARITY_BYTES // split.sample_bytes, 1)
    count = min(conversion.PARITY_SAMPLES, affordable, len(split))
    checked = split.take(np.arange(count))

    # Convert once, in a separate process
    key: cache.Key = {
        "model": digest,
        "format": format_name(source, is_module),
        "code": code.behind(conversion.__name__),
        "images": checked.digest,
        **machine.versions(),
    }

    def make(folder: Path) -> None:
        log.info("converting the network: %s", source)
        crashed = ModelError(f"{source}: {conversion.CRASHED}")
        samples = np.asarray(checked.stored[:])
        arguments = source, folder, samples, config, checked.preprocessing
        with waiting("Reading and converting the network"):
            isolation.call(
                conversion.convert,
                *arguments,
                crashed=crashed,
                network=is_module,
                seconds=MAX_SECONDS,
            )

    folder = cache.entry(cache_root, "models", key, make)
    graph = conversion.FOLDED if config.fold else conversion.UNFOLDED
    model = Fp32Model(
        name=config.name,
        source=source,
        sha256=digest,
        onnx_path=folder / graph,
        fold=config.fold,
        conversion=conversion.read_record(folder),
        is_module=is_module,
    )
    if torch and model.onnx_path.exists():
        model = _with_torch(model, checked, cache_root)
    _report(model)
    return model


def _with_torch(model: Fp32Model, checked: Split, cache_root: Path) -> Fp32Model:
    """Return the model with the result of `conversion.check_torch`, which is cached."""
    key: cache.Key = {
        "network": files.sha256(model.onnx_path),
        "code": code.behind(conversion.__name__),
        "images": checked.digest,
        **machine.versions(),
    }

    def make(folder: Path) -> None:
        crashed = ModelError(f"{model.source}: {conversion.CRASHED}")
        samples = np.asarray(checked.stored[:])
        steps = checked.preprocessing
        arguments = (model.onnx_path, samples, steps, model.conversion.final)
        with waiting("Comparing torch with ONNX Runtime"):
            result = isolation.call(
                conversion.check_torch, *arguments, crashed=crashed, seconds=MAX_SECONDS
            )
        (folder / conversion.TORCH_RECORD).write_text(result)

    # Add the result to the record of the conversion
    folder = cache.entry(cache_root, "torch_checks", key, make)
    record = model.conversion
    result = json.loads((folder / conversion.TORCH_RECORD).read_text())
    parity = {**record.parity, **result.get("parity", {})}
    without_torch = result.get("without_torch", {})
    return replace(model, conversion=replace(record, parity=parity, without_torch=without_torch))


def _report(model: Fp32Model) -> None:
    """Log the changes and restrictions of the graph.

    Raises:
        ModelError: `fold` is set, and folding failed.
    """
    record = model.conversion
    if model.fold and record.preprocessing.failure:
        raise ModelError(
            f"{model.source}: ONNX Runtime cannot preprocess it ({record.preprocessing.failure}); "
            "try model.fold=false"
        )

    # Log changes that the results of every run include
    if record.source_opset != record.opset:
        log.info("%s: opset %d converted to %d", model.source, record.source_opset, record.opset)
    if record.original_dtype:
        text = "%s: uses %s; the FP32 network has float32 inputs, weights and arithmetic"
        log_once(log, text, model.source, record.original_dtype)
    if model.fold:
        effect = record.preprocessing.describe()
        log_once(
            log,
            "model.fold: nodes %s, bytes %s; %s",
            effect["preprocess_nodes"],
            effect["preprocess_bytes"],
            effect["preprocess_operators"],
        )
    for name, axis in record.moved.items():
        text = "%s: its axis %d counts the samples; in the quantized file, the first axis does"
        log_once(log, text, name, axis)

    # Warn about restrictions
    if record.emptied:
        log.warning(
            "%s: %s... (%d inputs) are taken as empty, and left out of the quantized file: it "
            "takes whole texts, and cannot continue an earlier one",
            model.source,
            record.emptied[0],
            len(record.emptied),
        )
    if record.why_fixed:
        log.warning(
            "%s: takes batches of %d samples only: %s",
            model.source,
            record.contract.batch,
            record.why_fixed,
        )
    reason = record.without_torch.get(model.onnx_path.name)
    if reason:
        log.warning("%s: backend=torch cannot run it: %s", model.source, reason)
