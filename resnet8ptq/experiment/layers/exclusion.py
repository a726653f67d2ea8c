"""The choice of layers to leave in float: as few as keep the task's metric within `max_drop`.

Made on training images that did not calibrate, never on test images. Accuracy is the expected one
with ties at the top broken at random, so that ties do not decide between layers.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import files
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation import latency
from resnet8ptq.evaluation.evaluate import targets_of
from resnet8ptq.evaluation.trial import Bench, Trial, as_fp32
from resnet8ptq.experiment.layers import sensitivity
from resnet8ptq.experiment.layers.exclusion_search import Step, Trials, select, to_csv
from resnet8ptq.experiment.layers.ranking import Layer
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.selection import Selection, find_quantized_layers
from resnet8ptq.tasks.contract import Scores, Task

log = logging.getLogger(__name__)

FILE = "exclusion.csv"


@dataclass(frozen=True)
class Exclusion:
    """What was chosen, what it costs against all layers quantized, and how it was found.

    Attributes:
        nodes: left in float, most sensitive first; for `nodes_to_exclude`.
        steps: every model that was tried, in order; the first has all layers quantized.
        ranking: the layers, most sensitive first; empty where nothing had to be left in float.
        seconds: what the search took.
        excluded_ms: median latency at batch 1 minus that of all layers quantized; None where it
            was not measured.
    """

    nodes: list[str]
    steps: tuple[Step, ...]
    ranking: tuple[Layer, ...] = ()
    seconds: float = 0
    excluded_ms: float | None = None

    @property
    def chosen(self) -> Step:
        """The model with just these nodes in float."""
        return next(step for step in self.steps if set(step.nodes) == set(self.nodes))

    @property
    def excluded_bytes(self) -> int:
        """Size of the file minus that of all layers quantized."""
        return self.chosen.size_bytes - self.steps[0].size_bytes

    def to_metrics(self) -> dict[str, float]:
        """Return every metric under its MLflow name."""
        metrics: dict[str, float | None] = {
            "excluded_layers": len(self.nodes),
            "excluded_bytes": self.excluded_bytes,
            "excluded_ms": self.excluded_ms,
            "exclusion_s": self.seconds,
            "held_out_drop": self.chosen.drop,
        }
        return {key: float(value) for key, value in metrics.items() if value is not None}

    def to_params(self) -> dict[str, str]:
        """Return the choice as `nodes_to_exclude` takes it on the command line."""
        return {"excluded_nodes": f"[{','.join(self.nodes)}]"}

    def summary(self) -> str:
        """Return the outcome in one line."""
        first, chosen = self.steps[0], self.chosen
        if not self.nodes:
            return f"no layer has to stay in float: drop {first.drop:z.2%} on held-out images"
        slower = "" if self.excluded_ms is None else f", {self.excluded_ms:+.3f} ms at batch 1"
        return (
            f"{len(self.nodes)} layers stay in float: drop {first.drop:z.2%} -> {chosen.drop:z.2%} "
            f"on held-out images, {self.excluded_bytes / 1000:+.1f} kB{slower}: "
            f"{', '.join(self.nodes)}"
        )


def choose(
    config: RunConfig,
    bench: Bench,
    task: Task,
    fp32: Fp32Model,
    network: Fp32Model,
    calibration: Split,
    held_out: Split,
    folder: Path,
    ranges: Mapping[str, Range] | None = None,
) -> Exclusion:
    """Leave the most sensitive layers in float until the drop is within `max_drop`.

    Writes `exclusion.csv` into `folder`, also where the search fails.

    Args:
        config: with `nodes_to_exclude: auto` and a quantized dtype.
        task: scores the held-out images.
        fp32: what is compared with.
        network: what is quantized: `fp32`, or a corrected one.
        calibration, held_out: images to calibrate with, and to choose by.
        folder: the run's own, existing.
        ranges: see `contract.Quantizer.quantize`.

    Raises:
        QuantizationError: no choice that leaves a layer quantized keeps `max_drop`.
    """
    start = time.perf_counter()
    config = replace(config, nodes_to_exclude=[])
    graph = onnx.load(network.onnx_path).graph
    chosen = find_quantized_layers(graph, Selection.of(config))
    layers = {name: node.name for name, node in chosen.items()}

    with tempfile.TemporaryDirectory() as scratch:
        variants = _Variants(config, bench, task, calibration, held_out, Path(scratch), ranges)
        trials = Trials(variants.trial(fp32, network))
        ranking: list[Layer] = []

        def rank() -> list[str]:
            ranking.extend(variants.rank(fp32, network, layers))
            return [layer.node for layer in ranking]

        try:
            nodes = select(rank, trials, config.max_drop)
        finally:
            files.write_text(folder / FILE, to_csv(trials.steps, task.metric.ranked_by))
        seconds = time.perf_counter() - start
        exclusion = Exclusion(nodes, tuple(trials.steps), tuple(ranking), seconds)
        if nodes and config.latency.enabled:
            exclusion = replace(exclusion, excluded_ms=variants.time(exclusion))
    log.info("nodes_to_exclude=auto: %s", exclusion.summary())
    return exclusion


def warn_of_perfection(task: Task, fp32: Scores) -> None:
    """Warn where FP32 is right on every held-out image."""
    if {task.metric.name: fp32.value, **fp32.more()}.get("accuracy") == 1:
        log.warning(
            "nodes_to_exclude=auto: FP32 is right on all %d held-out images: it was probably "
            "trained on them, and they say little about what quantization costs on others",
            fp32.total,
        )


@dataclass(frozen=True)
class _Variants:
    """Variants of one run; each keeps its file until the search is over."""

    config: RunConfig
    bench: Bench
    task: Task
    calibration: Split
    held_out: Split
    folder: Path
    ranges: Mapping[str, Range] | None

    def measure(self, variant: RunConfig, network: Fp32Model) -> Trial:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return self.bench.run(
            variant, network, self.calibration, self.held_out, folder, self.ranges
        )

    def trial(self, fp32: Fp32Model, network: Fp32Model) -> Callable[[tuple[str, ...]], Step]:
        """Return what measures a choice of nodes against `fp32`."""
        targets = targets_of(self.held_out)

        def score(trial: Trial) -> Scores:
            return self.task.score(trial.evaluation.outputs, targets)

        reference = score(self.measure(as_fp32(self.config), fp32))
        warn_of_perfection(self.task, reference)

        def measure(nodes: tuple[str, ...]) -> Step:
            measured = self.measure(replace(self.config, nodes_to_exclude=list(nodes)), network)
            found, artifact = self.task.compare(score(measured), reference), measured.artifact
            drop = self.task.metric.drop(found.fair_delta, found.baseline.fair)
            return Step(nodes, found.model.fair, drop, artifact.size_bytes, artifact.path)

        return measure

    def rank(self, fp32: Fp32Model, network: Fp32Model, nodes: Mapping[str, str]) -> list[Layer]:
        """Rank by the SQNR of the logits with one layer quantized."""
        cut_fp32, _ = sensitivity.cut_softmax(fp32, self.folder / "fp32_logits.onnx")
        cut, final = sensitivity.cut_softmax(network, self.folder / "logits.onnx")
        cut_off = replace(self, bench=replace(self.bench, final=final))
        reference = cut_off.measure(as_fp32(self.config), cut_fp32)
        judge = sensitivity.Judge(self.task, targets_of(self.held_out), reference)
        return sensitivity.rank_layers(
            self.config, judge, nodes, lambda variant: cut_off.measure(variant, cut)
        )

    def time(self, exclusion: Exclusion) -> float | None:
        """Return `excluded_ms`; None where the artifact only simulates integer kernels."""
        resolved = make_quantizer(self.config, self.bench.runtime).resolve()
        if resolved.execution == "simulated":
            return None
        settings = replace(self.config.latency, batch_size=1, batch_repeats=1)
        paths = (exclusion.chosen.path, exclusion.steps[0].path)
        loads = [self.bench.loader(self.config, path) for path in paths]
        chosen, whole = latency.measure(loads, self.held_out, settings)
        return float(np.median(chosen.single_ms) - np.median(whole.single_ms))
