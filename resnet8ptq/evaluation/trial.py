"""Quantize, reload, score: the one place where an artifact is made to be measured."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from resnet8ptq.backends.contract import Artifact
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import DtypeConfig, QuantizationConfig
from resnet8ptq.core import cache
from resnet8ptq.core.console import waiting
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.evaluate import Evaluation, evaluate
from resnet8ptq.evaluation.pace import Load, find_pace
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.contract import PROBABILITIES, Reduction

DYNAMIC_BATCH_SIZE = 256

Config = TypeVar("Config", bound=QuantizationConfig)


def as_fp32(config: Config) -> Config:
    """Return the settings of the FP32 network in the same framework."""
    return replace(config, dtype=DtypeConfig("fp32"), method="static")


@dataclass(frozen=True)
class Trial:
    """An artifact, and what it does on some images after it was loaded from disk.

    Attributes:
        size_bytes: of the artifact's file as it was made: the next trial may replace it.
        quantize_s: conversion, and calibration where the cache has nothing to offer, in seconds.
    """

    artifact: Artifact
    size_bytes: int
    quantize_s: float
    evaluation: Evaluation


@dataclass(frozen=True)
class Bench:
    """Where the artifacts of one run are made and measured.

    Attributes:
        network: SHA-256 of the FP32 network's file: paces are kept under it.
        runtime: threads and cache.
        batch_size: of evaluations, as set; None: the fastest of a few.
        final: what the network returns, see `Outputs`.
        reduction: what is kept of the outputs of a batch; None: the outputs themselves.
    """

    network: str
    runtime: Runtime
    batch_size: int | None = None
    final: str = PROBABILITIES
    reduction: Reduction | None = None

    def run(
        self,
        config: QuantizationConfig,
        network: Fp32Model,
        calibration: Split,
        scored: Split,
        folder: Path,
        ranges: Mapping[str, Range] | None = None,
        label: str = "Evaluating",
    ) -> Trial:
        """Quantize `network` into `folder`, reload the artifact from there and run `scored`.

        Args:
            calibration, folder, ranges: see `contract.Quantizer.quantize`.
            label: of the progress bar.
        """
        quantizer = make_quantizer(config, self.runtime)
        start = time.perf_counter()
        with waiting("Quantizing"):
            artifact = quantizer.quantize(network, calibration, folder, ranges)
        seconds = time.perf_counter() - start
        size_bytes = artifact.size_bytes
        evaluation = self.evaluate(config, artifact.path, scored, label)
        return Trial(artifact, size_bytes, seconds, evaluation)

    def evaluate(
        self,
        config: QuantizationConfig,
        path: Path,
        scored: Split,
        label: str = "Evaluating",
        batch_size: int | None = None,
    ) -> Evaluation:
        """Load the artifact at `path` and run `scored`, `batch_size` at once where it is given."""
        size = batch_size or self.batch_size
        if size is None and config.method == "dynamic":
            size = DYNAMIC_BATCH_SIZE  # its ranges depend on the batch: not tuned
        about: cache.Key = {
            "network": self.network,
            "backend": json.dumps(asdict(config.backend), sort_keys=True),
            "dtype": config.dtype.name,
            "method": config.method,
            "format": config.format or "",
        }
        load = self.loader(config, path)
        pace = find_pace(load, scored, size, self.runtime, about)
        return evaluate(load, scored, pace, label, self.final, self.reduction)

    def loader(self, config: QuantizationConfig, path: Path) -> Load:
        """Return what loads the artifact at `path`, for a number of threads."""
        return partial(make_quantizer(config, self.runtime).load, path)
