"""`nodes_to_exclude=auto`: chooses few nodes to leave in float, for a drop of at most `max_drop`.

The choice uses training samples that did not calibrate, never test samples. The drop on all samples
is that of the tie-adjusted metric.
"""

import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from resnet8ptq.backends.onnx import BACKEND as ONNX
from resnet8ptq.calibration.methods import find_method
from resnet8ptq.config import words
from resnet8ptq.config.schema import BackendConfig
from resnet8ptq.core import files
from resnet8ptq.data.sampling import shuffle
from resnet8ptq.evaluation import latency
from resnet8ptq.experiment.layers import noise, sensitivity
from resnet8ptq.experiment.layers.exclusion_search import (
    TESTS,
    Groups,
    Trial,
    Trials,
    join,
    select,
    to_csv,
)
from resnet8ptq.experiment.stopping import try_choice
from resnet8ptq.experiment.workspace import Prepared, Step, Workspace
from resnet8ptq.precision.plan import find_float_nodes, find_quantized_layers
from resnet8ptq.tasks.scoring.comparison import Scores
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE
from resnet8ptq.tasks.task import Task

log = logging.getLogger(__name__)

FILE = "exclusion.csv"
NOISE_FROM = ONNX.name  # QDQ files show the rounding of each tensor
_STATIC = ("static", "qat")  # methods whose files round activations to fixed ranges
LEVEL = SIGNIFICANCE / TESTS  # each test gets an equal share (Bonferroni)


@dataclass(frozen=True)
class Exclusion:
    """The chosen nodes, their cost in bytes and time, and the trials.

    Attributes:
        nodes: ONNX names of the nodes to leave in float, the noisiest groups first.
        steps: all trials, in order; the first has all layers quantized.
        seconds: time of the search.
        excluded_ms: median latency at batch 1 on this machine, minus that of the file with all
            layers quantized; None if not measured.
    """

    nodes: list[str]
    steps: tuple[Trial, ...]
    seconds: float = 0
    excluded_ms: float | None = None

    @property
    def chosen(self) -> Trial:
        """The trial whose float nodes are exactly `nodes`."""
        return next(step for step in self.steps if set(step.nodes) == set(self.nodes))

    @property
    def excluded_bytes(self) -> int:
        """Size of the file in bytes, minus the size with all layers quantized."""
        return self.chosen.size_bytes - self.steps[0].size_bytes

    def to_metrics(self) -> dict[str, float]:
        """Return the measured metrics under their MLflow names."""
        metrics: dict[str, float | None] = {
            "exclusion/layers": len(self.nodes),
            "exclusion/bytes": self.excluded_bytes,
            "exclusion/ms": self.excluded_ms,
            "system/exclusion_s": self.seconds,
            "exclusion/held_out_drop": self.chosen.drop,
        }
        return {key: float(value) for key, value in metrics.items() if value is not None}

    def to_params(self) -> dict[str, str]:
        """Return a param with the nodes, in the form of `nodes_to_exclude` on the command line."""
        return {"excluded_nodes": words.as_list(self.nodes)}

    def summary(self) -> str:
        """Return the outcome in one line."""
        first = self.steps[0]
        chosen = self.chosen
        if not self.nodes:
            return f"no layer stays in float: drop {first.drop:z.2%} on held-out samples"
        costs = f"{self.excluded_bytes / 1000:+.1f} kB"
        if self.excluded_ms is not None:
            costs += f", {self.excluded_ms:+.3f} ms at batch 1"
        stay = "1 node stays" if len(self.nodes) == 1 else f"{len(self.nodes)} nodes stay"
        return (
            f"{stay} in float: drop {first.drop:z.2%} -> {chosen.drop:z.2%} on held-out samples, "
            f"{costs}: {', '.join(self.nodes)}"
        )


def choose(work: Workspace, prepared: Prepared, correct: Step | None = None) -> Exclusion:
    """Choose the nodes to leave in float on the tuning samples, see `exclusion_search.select`.

    The function writes the trials to `exclusion.csv` in the run's folder, even if the search fails.

    Args:
        correct: corrects the network again for each trial with nodes in float, and leaves these
            nodes out; None if every trial uses the network of `prepared`.
    """
    start = time.perf_counter()
    config = work.config
    task = work.evaluator.task

    # In random order, a trial can stop early
    samples = replace(work.samples, tuning=shuffle(work.samples.held_out))
    work = replace(work, samples=samples)
    fp32 = work.evaluator.baseline_scores(work.samples.held_out)
    warn_of_perfection(task, fp32)
    level = LEVEL if can_show(task, fp32, config.max_drop, level=LEVEL) else None

    # Quantize and measure the trials
    with tempfile.TemporaryDirectory() as scratch:
        variants = _Variants(replace(work, scratch=Path(scratch)), prepared, level, correct=correct)
        trials = Trials(variants.measure)
        deadline = work.settings.runtime.deadline
        try:
            nodes = select(variants.rank, trials, config.max_drop, level=level, deadline=deadline)
        finally:
            files.write_text(work.folder / FILE, to_csv(trials.steps, task.metric.ranked_by))
        seconds = time.perf_counter() - start
        exclusion = Exclusion(nodes, tuple(trials.steps), seconds)
        if nodes and config.latency.enabled:
            exclusion = replace(exclusion, excluded_ms=variants.time(exclusion))
    log.info("nodes_to_exclude=auto: %s", exclusion.summary())
    if exclusion.chosen.p > LEVEL:
        warn_of_unproven("nodes_to_exclude=auto", "max_drop", config.max_drop)
    return exclusion


def can_show(task: Task, fp32: Scores, max_drop: float, level: float) -> bool:
    """Return whether the samples can prove the limit for a model with the same scores as FP32.

    The result is also true if the test decides nothing for such a model: the samples may still
    prove the limit for other models.
    """
    values = fp32.per_sample
    margin = values.margin(values, task.metric, max_drop, fp32.total)
    return margin.p_within <= level or math.isinf(margin.correction)


def warn_of_unproven(choice: str, key: str, limit: float) -> None:
    """Warn that no test proves a choice within the limit, so that the measured loss decides."""
    log.warning(
        "%s: the held-out samples do not prove of any choice that it loses at most %s=%g; this is "
        "chosen by its measured loss, and may lose more on other samples; try a larger %s or "
        "held_out_images",
        choice,
        key,
        limit,
        key,
    )


def warn_of_perfection(task: Task, fp32: Scores) -> None:
    """Warn if FP32's accuracy on the held-out samples is 1."""
    if {task.metric.name: fp32.value, **fp32.more()}.get("accuracy") == 1:
        log.warning(
            "nodes_to_exclude=auto: FP32 is right on all %d held-out samples: it was probably "
            "trained on them, so quantization may cost more on other samples",
            fp32.total,
        )


@dataclass(frozen=True)
class _Variants:
    """Quantizes variants of one run; their files stay until the search ends.

    Attributes:
        work: the run; `scratch` has the files.
        prepared: the network and its decisions, with all layers quantized.
        level: level of the test that can end a trial early, see `stopping.try_choice`.
        correct: see `choose`.
    """

    work: Workspace
    prepared: Prepared
    level: float | None
    correct: Step | None

    def measure(self, nodes: tuple[str, ...]) -> Trial:
        """Quantize with these nodes in float, and compare with FP32."""
        work = replace(self.work, scratch=self._make_folder())
        prepared = self.prepared.decide(in_float=nodes)
        if self.correct and nodes:
            prepared = replace(prepared, network=self.correct(work, prepared).network)
        quantized = work.quantize(prepared, work.scratch)

        # Score as many held-out samples as the test needs
        tried = try_choice(
            evaluator=work.evaluator,
            path=quantized.path,
            samples=work.samples.held_out,
            limit=work.config.max_drop,
            level=self.level,
        )
        return Trial(
            nodes,
            tried.value,
            tried.drop,
            size_bytes=quantized.size_bytes,
            path=quantized.path,
            p=tried.p,
            samples=tried.samples,
        )

    def rank(self) -> Groups:
        """Return the nodes in groups, the noisiest first; together they never hold all layers."""
        groups = self._by_noise() if self.work.config.method in _STATIC else self._by_layer()

        # A network with all layers in float would not be quantized
        graph = onnx.load(self.prepared.network.onnx_path).graph
        selection = self.work.settings.quantizer.select(self.prepared.decisions)
        layers = {node.name for node in find_quantized_layers(graph, selection).values()}
        kept: list[Sequence[str]] = []
        for group in groups:
            if layers <= set(join([*kept, group])):
                break
            kept.append(group)
        return kept

    def _by_noise(self) -> Groups:
        """Rank by the noise of rounded tensors in a QDQ file of ONNX Runtime, for any backend."""
        config = self.work.config
        decisions = self.prepared.decisions
        if config.backend.name != NOISE_FROM:
            calib = config.calib
            if find_method(calib.name).choose is None:  # the method is a framework's own
                calib = replace(calib, name="minmax")
            config = replace(config, backend=BackendConfig(NOISE_FROM), calib=calib)
        in_onnx = self.work.vary(config, format="qdq", slim=False)
        quantized = in_onnx.quantize(self.prepared, self._make_folder())

        # Measure the noise on held-out samples
        fp32 = onnx.load(self.prepared.network.onnx_path)
        in_qdq = onnx.load(quantized.path)
        in_float = find_float_nodes(fp32.graph, in_onnx.settings.quantizer.select(decisions))
        threads = self.work.evaluator.runtime.threads
        held_out = self.work.samples.held_out
        sources = noise.rank(fp32, in_qdq, in_float, samples=held_out, threads=threads)
        return [source.nodes for source in sources]

    def _by_layer(self) -> Groups:
        """Return each layer as a group, ranked by `sensitivity.Layers.rank`."""
        layers = sensitivity.Layers(self.work, self.prepared)
        return [[layer.node] for layer in layers.rank()]

    def time(self, exclusion: Exclusion) -> float | None:
        """Return `excluded_ms`; None if the artifact only simulates integer kernels."""
        quantizer = self.work.settings.quantizer
        if quantizer.resolve(self.prepared.decisions).execution == "simulated":
            return None
        timing = replace(self.work.config.latency, batch_size=1, batch_repeats=1)
        paths = (exclusion.chosen.path, exclusion.steps[0].path)
        loads = [partial(quantizer.load, path) for path in paths]
        chosen, whole = latency.measure(loads, self.work.samples.held_out, timing)
        return float(np.median(chosen.single_ms) - np.median(whole.single_ms))

    def _make_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.work.scratch))
