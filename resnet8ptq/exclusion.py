"""The choice of layers to leave in float: as few as keep the accuracy within `max_drop`.

Made on training images that did not calibrate, never on test images. Accuracy is the expected one
with ties at the top broken at random, so that no layer is judged by an argmax's luck.
"""

import csv
import io
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from resnet8ptq import data, files, latency, sensitivity
from resnet8ptq.backends import BACKENDS
from resnet8ptq.calibration import Range
from resnet8ptq.config import DtypeConfig, RunConfig
from resnet8ptq.data import CalibrationSet, Dataset, Split
from resnet8ptq.errors import QuantizationError
from resnet8ptq.model import Fp32Model
from resnet8ptq.nodes import find_float_nodes, weight_layers
from resnet8ptq.sensitivity import Figures, Layer
from resnet8ptq.terminal import track

log = logging.getLogger(__name__)

FILE = "exclusion.csv"


@dataclass(frozen=True)
class Step:
    """One model that was tried.

    Attributes:
        nodes: the layers left in float, by ONNX node.
        accuracy: on the held-out images, ties broken at random; a fraction.
        drop: the FP32 network's accuracy minus this one's, a fraction.
        size_bytes, path: of its file.
    """

    nodes: tuple[str, ...]
    accuracy: float
    drop: float
    size_bytes: int
    path: Path


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
        """Return every figure under its MLflow name."""
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
            return f"no layer has to stay in float: drop {first.drop:.2%} on held-out images"
        slower = "" if self.excluded_ms is None else f", {self.excluded_ms:+.3f} ms at batch 1"
        return (
            f"{len(self.nodes)} layers stay in float: drop {first.drop:.2%} -> {chosen.drop:.2%} "
            f"on held-out images, {self.excluded_bytes / 1000:+.1f} kB{slower}: "
            f"{', '.join(self.nodes)}"
        )


def choose(
    config: RunConfig,
    fp32: Fp32Model,
    network: Fp32Model,
    dataset: Dataset,
    calibration: CalibrationSet,
    folder: Path,
    ranges: Mapping[str, Range] | None = None,
) -> Exclusion:
    """Leave the most sensitive layers in float until the drop is within `max_drop`.

    Writes `exclusion.csv` into `folder`, whatever comes out.

    Args:
        config: with `nodes_to_exclude: auto` and a quantized dtype.
        fp32: what accuracy is compared with.
        network: what is quantized: `fp32`, or a corrected one.
        folder: the run's own, existing.
        ranges: see `interfaces.Quantizer.quantize`.

    Raises:
        ConfigError: `held_out_images` does not fit the data.
        QuantizationError: no choice that leaves a layer quantized keeps `max_drop`.
    """
    start = time.perf_counter()
    config = replace(config, nodes_to_exclude=[])
    held_out = data.draw_held_out(dataset, calibration, config.held_out_images, config.seed)
    graph = onnx.load(network.onnx_path).graph
    in_float = find_float_nodes(graph, config)
    layers = {name: n.name for name, n in weight_layers(graph).items() if n.name not in in_float}

    with tempfile.TemporaryDirectory() as scratch:
        bench = _Bench(config, calibration.split, held_out, Path(scratch), ranges)
        trials = Trials(bench.trial(fp32, network))
        ranking: list[Layer] = []

        def rank() -> list[str]:
            ranking.extend(bench.rank(fp32, network, layers))
            return [layer.node for layer in ranking]

        try:
            nodes = select(rank, trials, config.max_drop)
        finally:
            files.write_text(folder / FILE, to_csv(trials.steps))
        seconds = time.perf_counter() - start
        found = Exclusion(nodes, tuple(trials.steps), tuple(ranking), seconds)
        if nodes and config.latency.enabled:
            found = replace(found, excluded_ms=bench.time(found))
    log.info("nodes_to_exclude=auto: %s", found.summary())
    return found


@dataclass
class Trials:
    """What was tried, in order; no choice of nodes is measured twice."""

    measure: Callable[[tuple[str, ...]], Step]
    steps: list[Step] = field(default_factory=list)

    def __call__(self, nodes: Sequence[str]) -> Step:
        """Leave `nodes` in float and measure."""
        for step in self.steps:
            if set(step.nodes) == set(nodes):
                return step
        self.steps.append(self.measure(tuple(nodes)))
        return self.steps[-1]


def select(rank: Callable[[], list[str]], trials: Trials, max_drop: float) -> list[str]:
    """Return the nodes to leave in float, of which none could be quantized again by itself.

    Args:
        rank: returns all nodes, most sensitive first; called only where it is needed.

    Raises:
        QuantizationError: no choice that leaves a layer quantized keeps `max_drop`.
    """
    if trials(()).drop <= max_drop:
        return []
    ranked = rank()
    for count in track(range(1, len(ranked)), "Leaving layers in float", "layers"):
        if trials(ranked[:count]).drop <= max_drop:
            return _take_back(ranked[:count], trials, max_drop)
    best = min(trials.steps, key=lambda step: step.drop)
    raise QuantizationError(
        f"max_drop: got {max_drop}, takes at least {best.drop:.5f} here: the smallest drop on "
        f"held-out images of all that was tried, with [{','.join(best.nodes)}] in float"
    )


def _take_back(nodes: list[str], trials: Trials, max_drop: float) -> list[str]:
    """Quantize nodes again while one can be; first the one that costs the most bytes in float."""
    sizes = [trials(nodes[:count]).size_bytes for count in range(len(nodes) + 1)]
    cost = {node: sizes[place + 1] - sizes[place] for place, node in enumerate(nodes)}
    kept, again = nodes, True
    while again:
        again = False
        for node in track(sorted(kept, key=lambda n: -cost[n]), "Quantizing again", "layers"):
            rest = [other for other in kept if other != node]
            if trials(rest).drop <= max_drop:
                kept, again = rest, True  # a refused one may be possible now
                break
    return kept


@dataclass(frozen=True)
class _Bench:
    """Where variants of one run are measured; each keeps its file until the search is over."""

    config: RunConfig
    calibration: Split
    held_out: Split
    folder: Path
    ranges: Mapping[str, Range] | None

    def measure(self, variant: RunConfig, network: Fp32Model) -> Figures:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return sensitivity.measure(
            variant, network, self.calibration, self.held_out, folder, self.ranges
        )

    def trial(self, fp32: Fp32Model, network: Fp32Model) -> Callable[[tuple[str, ...]], Step]:
        """Return what measures a choice of nodes against `fp32`."""
        total = len(self.held_out)
        float_config = replace(self.config, dtype=DtypeConfig("fp32"))
        reference = self.measure(float_config, fp32).scores.expected_correct

        def measure(nodes: tuple[str, ...]) -> Step:
            found = self.measure(replace(self.config, nodes_to_exclude=list(nodes)), network)
            correct = found.scores.expected_correct
            drop = (reference - correct) / total
            return Step(nodes, correct / total, drop, found.size_bytes, found.path)

        return measure

    def rank(self, fp32: Fp32Model, network: Fp32Model, nodes: Mapping[str, str]) -> list[Layer]:
        """Rank by the SQNR of the logits with one layer quantized."""
        cut_fp32, _ = sensitivity.cut_softmax(fp32, self.folder / "fp32_logits.onnx")
        cut, _ = sensitivity.cut_softmax(network, self.folder / "logits.onnx")
        reference = self.measure(replace(self.config, dtype=DtypeConfig("fp32")), cut_fp32)
        return sensitivity.rank_layers(
            self.config, nodes, reference, lambda variant: self.measure(variant, cut)
        )

    def time(self, found: Exclusion) -> float | None:
        """Return `excluded_ms`; None where the artifact only simulates integer kernels."""
        if BACKENDS[self.config.backend.name](self.config).resolve()["execution"] == "simulated":
            return None
        settings = replace(self.config.latency, batch_size=1, batch_repeats=1)
        config = replace(self.config, latency=settings)
        whole = found.steps[0].path
        timed = latency.measure(config, found.chosen.path, whole, self.held_out.images)
        assert timed.baseline is not None  # only quantized dtypes come here
        return float(np.median(timed.model.single_ms) - np.median(timed.baseline.single_ms))


def to_csv(steps: Sequence[Step]) -> str:
    """Return one line a trial, in order; accuracy and drop as fractions, on held-out images."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "layers", "accuracy", "drop", "size_bytes", "nodes"])
    for place, step in enumerate(steps):
        figures = [len(step.nodes), step.accuracy, step.drop, step.size_bytes]
        writer.writerow([place, *figures, " ".join(step.nodes)])
    return text.getvalue()
