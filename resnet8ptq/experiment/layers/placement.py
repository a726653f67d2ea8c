"""`precision.placement=measured`: leaves blocks in float where 8 bits are measured to cost time.

Q and DQ around a small layer can cost more than its integer kernel saves. The network is cut into
blocks, in the order of execution. Two files for each cut, quantized before it or after it, are
timed in turns with FP32 and with all blocks in 8 bits. From these times, `solve` estimates how much
time 8 bits save in each block, and how much time each border between 8 bits and float costs. The
best placement with both kinds of blocks is then timed as a whole, because sums of differences are
only an estimate.
"""

import logging
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise, product
from pathlib import Path

import numpy as np
import onnx

from resnet8ptq.config import words
from resnet8ptq.config.schema import LatencyConfig
from resnet8ptq.core import files
from resnet8ptq.core.console import track
from resnet8ptq.core.deadline import TimeUpError
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.evaluation import latency, paired_latency
from resnet8ptq.evaluation.batching import Load
from resnet8ptq.evaluation.evaluator import loader
from resnet8ptq.evaluation.paired_latency import Blocks
from resnet8ptq.experiment.workspace import Prepared, Workspace
from resnet8ptq.graph.blocks import split_into_blocks
from resnet8ptq.graph.links import inputs_of
from resnet8ptq.precision.plan import find_quantized_layers, find_quantized_products

log = logging.getLogger(__name__)

FILE = "placement.csv"
MOST = 10  # most blocks; twice as many files are timed
GAIN = 0.02  # share of the time that 8 bits must save
ALL = "all in 8 bits"
NONE = "FP32"
PLACED = "placement"


@dataclass(frozen=True)
class PlacedBlock:
    """A sequence of nodes that is in 8 bits or in float as a whole.

    Attributes:
        nodes: the names of the block's nodes, in the order of execution.
        layers: the number of the block's quantized layers, see `find_blocks`.
    """

    nodes: tuple[str, ...]
    layers: int


@dataclass(frozen=True)
class Times:
    """The estimated times of blocks and borders, in milliseconds.

    Attributes:
        saved: the time that 8 bits save in each block; negative where float is faster.
        borders: the time of a change between 8 bits and float before each block; the first is 0.
        fp32: the measured time of the whole network in float.
    """

    saved: Sequence[float]
    borders: Sequence[float]
    fp32: float


@dataclass(frozen=True)
class Placement:
    """The chosen placement, timed as a whole.

    Attributes:
        nodes: nodes that stay in float for speed.
        layers: the number of layers that stay in float for speed.
        milliseconds: typical latency of each timed network, by `ALL`, `NONE` and, if a mixed
            placement was timed, `PLACED`.
        seconds: time of the whole choice.
    """

    nodes: tuple[str, ...]
    layers: int
    milliseconds: dict[str, float]
    seconds: float = 0.0

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics under their MLflow names."""
        names = {ALL: "all_ms", NONE: "fp32_ms", PLACED: "ms"}
        metrics = {"placement/layers": float(self.layers)}
        for name, ms in self.milliseconds.items():
            metrics[f"placement/{names[name]}"] = ms
        metrics["system/placement_s"] = self.seconds
        return metrics

    def to_params(self) -> dict[str, str]:
        """Return a param with the nodes, in the form of `nodes_to_exclude` on the command line."""
        return {"placed_in_float": words.as_list(list(self.nodes))}


def choose(work: Workspace, prepared: Prepared) -> Placement:
    """Return the mixed placement if it is proven faster than 8 bits everywhere, see `is_faster`.

    Otherwise, all blocks stay in 8 bits. Nodes that other decisions leave in float stay in float.
    The choice does not measure the loss, because the run measures that of the final file. The
    function writes `placement.csv`, unless the time is up before.

    Raises:
        UnsupportedError: the chosen file is not proven faster than FP32, or it only simulates
            integer kernels.
    """
    start = time.perf_counter()
    quantizer = work.settings.quantizer
    graph = onnx.load(prepared.network.onnx_path).graph
    blocks = find_blocks(graph, _find_layers(work, prepared, graph))
    in_part = prepared.decide(in_float=blocks[0].nodes if len(blocks) > 1 else ())
    if quantizer.resolve(in_part.decisions).execution == "simulated":
        raise UnsupportedError(
            "precision.placement: got measured, expected a file whose integer kernels run on this "
            f"CPU; dtype={work.config.dtype.name} is simulated"
        )

    # Time the blocks, then the best sum as a whole
    with tempfile.TemporaryDirectory() as scratch:
        variants = _Variants(work, prepared, blocks, scratch=Path(scratch))
        chosen = [True] * len(blocks)
        try:
            times = variants.time_blocks()
            chosen = find_fastest(times)
            files.write_text(work.folder / FILE, to_csv(blocks, times, chosen))
        except TimeUpError:
            work.settings.runtime.deadline.cut("placement: all layers stay in 8 bits")
        timed = variants.time_whole(chosen)
    milliseconds = {name: paired_latency.typical(ms) for name, ms in timed.items()}

    # Keep 8 bits everywhere unless a gain is proven
    is_better = PLACED in timed and is_faster(timed[PLACED], timed[ALL])
    best = PLACED if is_better else ALL
    if not is_faster(timed[best], timed[NONE]):
        raise UnsupportedError(
            f"precision.placement: no placement is shown to be {GAIN:.0%} faster than FP32 with "
            f"latency.threads={work.config.latency.threads}: {_say(milliseconds)}; "
            "try dtype=fp32, or precision.placement=null for a smaller file"
        )
    left: list[PlacedBlock] = []
    if is_better:
        left = _find_left(blocks, chosen)
    placement = Placement(
        nodes=_nodes_of(left),
        layers=sum(block.layers for block in left),
        milliseconds=milliseconds,
        seconds=time.perf_counter() - start,
    )
    log.info(
        "precision.placement=measured: %d layers in float: %s", placement.layers, _say(milliseconds)
    )
    return placement


def _find_left(blocks: Sequence[PlacedBlock], in_8_bits: Sequence[bool]) -> list[PlacedBlock]:
    """Return the blocks that a placement leaves in float."""
    return [block for block, kept in zip(blocks, in_8_bits, strict=True) if not kept]


def _nodes_of(blocks: Iterable[PlacedBlock]) -> tuple[str, ...]:
    nodes: list[str] = []
    for block in blocks:
        nodes += block.nodes
    return tuple(nodes)


def find_blocks(graph: onnx.GraphProto, layers: set[str]) -> list[PlacedBlock]:
    """Return the nodes of a network in at most `MOST` blocks, each with a quantized layer.

    A network without quantized layers is one block.

    Args:
        layers: node names of the quantized layers and of attention's quantized products.
    """
    # Each step is a layer with the operators up to the next; the first has all before it too
    steps: list[list[onnx.NodeProto]] = [[]]
    has_layer = False
    for node in graph.node:
        is_layer = node.name in layers
        if is_layer and has_layer:
            steps.append([])
        has_layer = has_layer or is_layer
        steps[-1].append(node)

    # Find the steps whose tensors each step reads
    made: dict[str, int] = {}  # the step that computes each tensor
    sources: list[set[int]] = []
    for number, step in enumerate(steps):
        taken: set[str] = set()
        for node in step:
            taken.update(inputs_of(node))
        sources.append({made[name] for name in taken if name in made})
        for node in step:
            made |= dict.fromkeys(node.output, number)

    # Join steps into few blocks
    blocks = []
    for block in split_into_blocks(sources, MOST):
        names: list[str] = []
        for index in block:
            names += [node.name for node in steps[index]]
        blocks.append(PlacedBlock(tuple(names), len(layers.intersection(names))))
    return blocks


def solve(up_to: Sequence[float], from_on: Sequence[float]) -> Times:
    """Estimate the times of blocks and borders from files with at most one border.

    Args:
        up_to: milliseconds with only the first k blocks in 8 bits, for k from 0 to the number of
            blocks.
        from_on: milliseconds with all but the first k blocks in 8 bits, for the same k.
    """
    # Two pairs of files differ in the same block, so their mean difference is its saving
    first = np.array(up_to)
    rest = np.array(from_on)
    saved = (np.diff(rest) - np.diff(first)) / 2
    borders = (first + rest - first[0] - rest[0]) / 2
    return Times(saved.tolist(), np.maximum(borders[:-1], 0).tolist(), float(first[0]))


def find_fastest(times: Times) -> list[bool]:
    """Return for each block whether it is in 8 bits, in the best mixed placement.

    A mixed placement has blocks in 8 bits and blocks in float; a single block stays in 8 bits. The
    best one has the smallest estimated time. Each block in 8 bits counts as slower by `GAIN` of its
    equal share of FP32's time, so that small gains do not matter.
    """
    count = len(times.saved)
    least = GAIN * times.fp32 / count

    def add(placement: Sequence[bool]) -> float:
        total = sum(least - saved for saved in compress(times.saved, placement))
        changes = [before != after for before, after in pairwise(placement)]
        return total + sum(compress(times.borders[1:], changes))

    placements = product((True, False), repeat=count)
    mixed = [placement for placement in placements if 0 < sum(placement) < count]
    return list(min(mixed, key=add, default=[True] * count))


def to_csv(blocks: Sequence[PlacedBlock], times: Times, chosen: Sequence[bool]) -> str:
    """Return CSV with a row for each block, in the order of execution."""
    rows: list[list[object]] = [["first", "last", "layers", "saved_ms", "border_ms", "in_8_bits"]]
    for block, saved, border, kept in zip(blocks, times.saved, times.borders, chosen, strict=True):
        rows.append([block.nodes[0], block.nodes[-1], block.layers, saved, border, kept])
    return files.to_csv(rows)


def _find_layers(work: Workspace, prepared: Prepared, graph: onnx.GraphProto) -> set[str]:
    selection = work.settings.quantizer.select(prepared.decisions)
    layers = find_quantized_layers(graph, selection) | find_quantized_products(graph, selection)
    return {node.name for node in layers.values()}


def is_faster(model: Blocks, reference: Blocks) -> bool:
    """Return whether a test proves the model faster, and its measured gain is at least `GAIN`."""
    ratio = paired_latency.ratio(model, reference)
    return ratio.faster and ratio.value >= 1 + GAIN


def _say(milliseconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {ms:.3f} ms" for name, ms in milliseconds.items())


@dataclass
class _Variants:
    """Quantizes placements, and times them where the file will run.

    Attributes:
        scratch: folder of the files.
    """

    work: Workspace
    prepared: Prepared
    blocks: Sequence[PlacedBlock]
    scratch: Path

    def time_blocks(self) -> Times:
        """Time FP32, all blocks in 8 bits, and every file with one border; return the estimates.

        Raises:
            TimeUpError: the run's time is up before all files are quantized.
        """
        count = len(self.blocks)
        placements = [[True] * count]
        for border in range(1, count):  # the first blocks in 8 bits
            placements.append([True] * border + [False] * (count - border))
        for border in range(1, count):  # the last blocks in 8 bits
            placements.append([False] * border + [True] * (count - border))
        loads = [self._load_fp32()]
        for placement in track(placements, "Quantizing blocks", "files"):
            self.work.settings.runtime.deadline.check()
            loads.append(self._load(placement))

        # Allow the usual time for each file
        timing = self._timing
        share = replace(timing, max_seconds=timing.max_seconds * len(loads))
        timed = latency.measure(loads, self.work.samples.calibrating.split, share)
        medians = [float(np.median(one.single_ms)) for one in timed]
        none, whole, *cut = medians
        return solve(
            up_to=[none, *cut[: count - 1], whole], from_on=[whole, *cut[count - 1 :], none]
        )

    def time_whole(self, chosen: Sequence[bool]) -> dict[str, Blocks]:
        """Time FP32, all blocks in 8 bits, and the chosen placement if it is mixed, in turns."""
        loads = {NONE: self._load_fp32(), ALL: self._load([True] * len(self.blocks))}
        if not all(chosen):
            loads[PLACED] = self._load(chosen)
        samples = self.work.samples.calibrating.split
        return paired_latency.time_in_blocks(loads, samples, self._timing).single

    @property
    def _timing(self) -> LatencyConfig:
        return replace(self.work.config.latency, batch_size=1, batch_repeats=1)

    def _load_fp32(self) -> Load:
        evaluator = self.work.evaluator
        path = evaluator.baseline(self.work.samples.calibrating.split).path
        return loader(evaluator.fp32_quantizer, path, self.work.settings.target)

    def _load(self, kept: Sequence[bool]) -> Load:
        left = _nodes_of(_find_left(self.blocks, kept))
        in_float = dict.fromkeys([*self.prepared.decisions.in_float, *left])
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        quantized = self.work.quantize(self.prepared.decide(in_float=[*in_float]), folder)
        return loader(self.work.settings.quantizer, quantized.path, self.work.settings.target)
