"""Quantizes, reloads and runs a network, scores it, and compares it with FP32.

No other module scores the artifacts of runs.
"""

import json
import logging
import math
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from resnet8ptq.backends.contract import Artifact, Predictor, Quantizer
from resnet8ptq.backends.registry import BACKENDS, make_quantizer
from resnet8ptq.config.schema import BY_BATCH, FP32, DtypeConfig, QuantizationConfig
from resnet8ptq.core import cache, code, files
from resnet8ptq.core.console import waiting
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation import evaluation_cache, inference
from resnet8ptq.evaluation.batching import Batching, Load, find_batching
from resnet8ptq.evaluation.inference import Evaluation
from resnet8ptq.evaluation.sequential import FAIL, PASS, StoppingPlan
from resnet8ptq.evaluation.stopped_hits import find_outcome, stop
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.target.target import Target
from resnet8ptq.tasks.scoring.comparison import Comparison, Scores
from resnet8ptq.tasks.scoring.outputs import Outputs
from resnet8ptq.tasks.task import Task

log = logging.getLogger(__name__)

DYNAMIC_BATCH_SIZE = 1  # ranges depend on the batch, and the latency metric is for one sample
REMOTE_BATCH_SIZE = 16

Config = TypeVar("Config", bound=QuantizationConfig)


def baseline_config(config: Config) -> Config:
    """Return the settings of the FP32 network in the same framework."""
    backend = config.backend
    if backend.framework != backend.name:
        backend = BACKENDS[backend.framework].schema(backend.framework)
    return replace(config, backend=backend, dtype=DtypeConfig(FP32), method="static")


def loader(quantizer: Quantizer, path: Path, target: Target | None = None) -> Load:
    """Return a function that loads the artifact at `path` with a given number of threads.

    Args:
        target: the machine that runs the artifact; None for this machine.
    """
    if target is None:
        return partial(quantizer.load, path)
    config = quantizer.config
    runtime = config.backend.descriptor.runtime
    return partial(_load_remote, target, path, runtime, config.inference_precision)


def _load_remote(
    target: Target, path: Path, runtime: str, precision: str, threads: int
) -> Predictor:
    file = target.load(path, runtime, threads, precision)
    # Only ONNX Runtime reports where its nodes ran
    find_nodes = None
    if runtime == "onnxruntime":
        find_nodes = file.find_nodes
    return Predictor(
        predict=lambda batch: file.run(batch)[0],
        open_logits=lambda: None,
        time_ms=lambda batch: 1000 * file.time(batch),
        find_nodes=find_nodes,
    )


@dataclass(frozen=True)
class Quantized:
    """An artifact on disk.

    Attributes:
        size_bytes: the file's size when it was written; a later artifact may replace the file.
        seconds: the time of conversion and calibration; cached parts take almost none.
    """

    artifact: Artifact
    size_bytes: int
    seconds: float

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.artifact.path


@dataclass(frozen=True)
class Baseline:
    """The FP32 network in one framework, run over some samples.

    The cache keeps outputs instead of scores, so that another task needs no new run if it has the
    same reduction.

    Attributes:
        outputs: the outputs for the samples.
        path: the network's file in the cache.
    """

    outputs: Outputs
    path: Path

    @property
    def size_bytes(self) -> int:
        """The size of the file on disk."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class Compared:
    """The evaluation of an artifact, which was loaded from disk, and its comparison with FP32."""

    evaluation: Evaluation
    comparison: Comparison

    @property
    def sqnr_db(self) -> float:
        """The SQNR of the outputs in dB, as a number that can be compared.

        If the comparison has no SQNR, it is minus infinity for an output with NaN or infinity, and
        otherwise infinity.
        """
        sqnr_db = self.comparison.sqnr_db
        if sqnr_db is not None:
            return float(sqnr_db)
        for values in self.evaluation.outputs.returned:
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                return -math.inf
        return math.inf


@dataclass(frozen=True)
class Evaluator:
    """Measures the artifacts of one network by one task.

    Attributes:
        quantizer: writes and loads the artifacts; FP32 runs in the same framework.
        network: the FP32 network that artifacts are compared with.
        batch_size: the batch size of evaluations. None for `DYNAMIC_BATCH_SIZE` if ranges depend on
            the batch, `REMOTE_BATCH_SIZE` on a target, and otherwise the fastest.
        before_softmax: whether the sensitivity analysis has cut the network before its softmax, so
            that its outputs are the logits.
        target: the machine that runs the artifacts; None for this machine.
    """

    quantizer: Quantizer
    network: Fp32Model
    task: Task
    batch_size: int | None = None
    before_softmax: bool = False
    target: Target | None = None
    _known_scores: dict[str, Scores] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def runtime(self) -> Runtime:
        """The cache, the threads, the time and the device that the run uses."""
        return self.quantizer.runtime

    @cached_property
    def fp32_quantizer(self) -> Quantizer:
        """The quantizer that writes and loads the FP32 network in the same framework."""
        return make_quantizer(baseline_config(self.quantizer.config), self.runtime)

    @property
    def provider(self) -> str:
        """The execution provider of ONNX Runtime that runs the files, here or on the target."""
        if self.target is not None:
            return self.target.provider
        return self.quantizer.config.backend.provider

    def with_quantizer(self, quantizer: Quantizer) -> "Evaluator":
        """Return this evaluator with another quantizer."""
        return replace(self, quantizer=quantizer)

    def quantize(
        self, network: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Quantized:
        """Quantize `network` into `folder`; with dtype=fp32, only convert it.

        Args:
            network: the evaluator's network, possibly corrected or fine-tuned.
        """
        start = time.perf_counter()
        with waiting("Quantizing"):
            if self.quantizer.config.dtype.is_fp32:
                converted = self._convert(network, calibration)
                artifact = Artifact(folder / converted.name)
                with files.atomic(artifact.path) as temporary:
                    shutil.copyfile(converted, temporary)
            else:
                artifact = self.quantizer.quantize(network, decisions, calibration, folder)
        return Quantized(artifact, artifact.size_bytes, time.perf_counter() - start)

    def _convert(self, network: Fp32Model, samples: Split) -> Path:
        """Return the file of the FP32 network in the framework.

        The cache keeps the file by the network's content, because a conversion may take 20 seconds,
        and each role of samples needs a baseline. The file depends on the shape and dtype of the
        samples, not on their values.
        """
        # Inputs of another shape or dtype need another file
        inputs = samples.zeros
        fields = samples.fields
        form = inputs.dtype, inputs.shape, fields and fields.any_length
        key: cache.Key = {
            "network": network.sha256,
            "graph": files.sha256(network.onnx_path),
            "backend": _backend(self.fp32_quantizer),
            "inputs": str((*form, samples.at_once, samples.within_memory)),
            **cache.made_with(__name__),
        }

        def make(folder: Path) -> None:
            self.fp32_quantizer.quantize(network, Decisions(), samples, folder)

        folder = cache.entry(self.runtime.cache_root, "fp32", key, make)
        [path] = [path for path in folder.iterdir() if path.name != cache.RECORD]
        return path

    def compare(
        self,
        path: Path,
        samples: Split,
        label: str = "Evaluating",
        batch_size: int | None = None,
        logits: bool = True,
    ) -> Compared:
        """Score the artifact at `path` on `samples`, and compare it with FP32, see `run`.

        Args:
            label: the text beside the progress bar.
            batch_size: the batch size; None for that of the evaluator.
            logits: whether to collect the softmax's inputs, for the SQNR.
        """
        evaluation = self.run(path, samples, label, batch_size, logits)
        scores = self._score(evaluation.outputs, samples)
        return Compared(evaluation, self.task.compare(scores, self.baseline_scores(samples)))

    def compare_until(
        self, path: Path, samples: Split, plan: StoppingPlan, search: bool = False
    ) -> Compared:
        """Run and compare block by block, in the order of `samples`, until `plan` stops.

        FP32 runs over all samples, once for all runs.

        Args:
            path: the artifact's file.
            search: whether this is a trial of a search: no stop for futility, no logits.
        """
        fp32 = self.baseline(samples).outputs
        copies, batching = self._open(self.quantizer, path, samples, None)

        # Score one more block at a time
        evaluation = None
        start = 0
        for end in plan.ends:
            block = samples.take(np.arange(start, end))
            seen = samples.take(np.arange(end))
            label = f"Evaluating, to {end:,} of {plan.total:,}"
            part = inference.infer(
                copies, block, batching, label, self.network.final, self.task.scope.reduction
            )
            evaluation = inference.extend(evaluation, part)
            start = end
            reference = self._score(fp32.first(end), seen)
            scores = self._score(evaluation.outputs, seen)
            outcome = find_outcome(stop(self.task.compare(scores, reference), plan))
            if outcome in (PASS, FAIL) or (outcome and not search):
                break

        # Score the samples that were run, with logits
        assert evaluation is not None  # a plan has at least one analysis
        _warn_of_batch(self.quantizer.config, evaluation)
        if not search:
            evaluation = inference.with_logits(evaluation, copies, seen)
        scores = self._score(evaluation.outputs, seen)
        return Compared(evaluation, stop(self.task.compare(scores, reference), plan))

    def baseline_scores(self, samples: Split) -> Scores:
        """Return the scores of the FP32 network in the framework, see `baseline`.

        This evaluator computes the scores of the same samples once.
        """
        key = f"{_backend(self.fp32_quantizer)} {samples.digest}"
        if key not in self._known_scores:
            self._known_scores[key] = self._score(self.baseline(samples).outputs, samples)
        return self._known_scores[key]

    def run(
        self,
        path: Path,
        samples: Split,
        label: str = "Evaluating",
        batch_size: int | None = None,
        logits: bool = False,
    ) -> Evaluation:
        """Load the artifact at `path` and run `samples`, unless the cache has the evaluation.

        Args:
            label, batch_size, logits: see `compare`.
        """
        root = self.runtime.cache_root
        final = self.network.final
        key: cache.Key = {
            "artifact": files.sha256(path),
            "logits": logits,
            "batch_size": str(batch_size or self.batch_size),
            "method": self.quantizer.config.method,
            **self._evaluation_key(self.quantizer, samples),
        }

        # Run the samples unless the cache has the outputs
        evaluation = evaluation_cache.find(root, key, final)
        if evaluation is None:
            evaluation = self._infer(self.quantizer, path, samples, label, batch_size, logits)
            evaluation_cache.keep(root, key, evaluation)
        _warn_of_batch(self.quantizer.config, evaluation)
        return evaluation

    def _infer(
        self,
        quantizer: Quantizer,
        path: Path,
        samples: Split,
        label: str,
        batch_size: int | None = None,
        logits: bool = False,
    ) -> Evaluation:
        copies, batching = self._open(quantizer, path, samples, batch_size)
        evaluation = inference.infer(
            copies, samples, batching, label, self.network.final, self.task.scope.reduction
        )
        if logits:
            evaluation = inference.with_logits(evaluation, copies, samples)
        return evaluation

    def _evaluation_key(self, quantizer: Quantizer, samples: Split) -> cache.Key:
        """Return the part of an evaluation's cache key that does not depend on the file.

        The part describes framework, samples, reduction, target and code.
        """
        reduction = self.task.scope.reduction
        kind = ""
        if reduction:
            kind = f"{reduction} {code.behind(type(reduction).__module__)}"
        about = {"backend": _backend(quantizer), "samples": samples.digest, "reduction": kind}
        if self.target is not None:
            about["target"] = json.dumps(self.target.describe(), sort_keys=True)
        return {**about, **cache.made_with(__name__)}

    def loader(self, quantizer: Quantizer, path: Path) -> Load:
        """Return a function that loads the artifact at `path` where this evaluator runs it."""
        return loader(quantizer, path, self.target)

    def _open(
        self, quantizer: Quantizer, path: Path, samples: Split, batch_size: int | None
    ) -> tuple[list[Predictor], Batching]:
        """Return copies of the artifact at `path`, loaded to run in parallel, and their batching.

        `find_batching` chooses the batching within the settings. On a target, there is one copy,
        and no measurement.
        """
        config = quantizer.config
        size = batch_size or self.batch_size
        if size is None and config.method in BY_BATCH:
            size = DYNAMIC_BATCH_SIZE
        about: cache.Key = {
            "network": self.network.sha256,
            "backend": _backend(quantizer),
            "dtype": config.dtype.name,
            "method": config.method,
            "format": config.format or "",
        }
        load = self.loader(quantizer, path)

        # On a target, one copy runs with the threads of the settings or all cores
        if self.target is not None:  # it is not measured, because that takes many remote runs
            threads = self.target.cores
            if self.runtime.threads_fixed:
                threads = self.runtime.threads
            return [load(threads)], Batching(samples.limit(size or REMOTE_BATCH_SIZE), threads)
        batching = find_batching(load, samples, size, self.runtime, about)
        return [load(batching.threads) for _ in range(batching.at_once)], batching

    def baseline(self, samples: Split) -> Baseline:
        """Return the FP32 network in the framework, with its outputs for `samples`.

        The cache keeps both, see `Baseline`.
        """
        network = files.sha256(self.network.onnx_path)
        key = {"model": network, **self._evaluation_key(self.fp32_quantizer, samples)}
        path = self._convert(self.network, samples)

        def make(folder: Path) -> None:
            evaluation = self._infer(
                self.fp32_quantizer, path, samples, "FP32 baseline", logits=True
            )
            evaluation_cache.save(evaluation, folder)

        folder = cache.entry(self.runtime.cache_root, "baselines", key, make)
        evaluation = evaluation_cache.load(folder, self.network.final)
        _warn_of_batch(self.fp32_quantizer.config, evaluation)
        return Baseline(evaluation.outputs, path)

    def _score(self, outputs: Outputs, samples: Split) -> Scores:
        if self.before_softmax and outputs.logits is None:
            outputs = replace(outputs, logits=outputs.values[0])
        return self.task.score(outputs, inference.targets_of(samples))


def _warn_of_batch(config: QuantizationConfig, evaluation: Evaluation) -> None:
    """Warn if outputs depend on the batch, but ranges do not; see `Evaluation.batch_sqnr_db`."""
    if config.method in BY_BATCH or evaluation.batch_sqnr_db >= inference.BATCH_DB:
        return
    log.warning(
        "backend=%s: the outputs of a sample alone and in a batch of %d differ, by an SQNR of "
        "%.1f dB: a kernel is wrong; try evaluate.batch_size=1, or another backend",
        config.backend.name,
        evaluation.batching.batch_size,
        evaluation.batch_sqnr_db,
    )


def _backend(quantizer: Quantizer) -> str:
    return json.dumps(asdict(quantizer.config.backend), sort_keys=True)
