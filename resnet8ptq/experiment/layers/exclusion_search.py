"""The search for the fewest layers in float that keep `max_drop`: forward, then backward.

Knows nothing of models: what it is given measures a choice of nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resnet8ptq.core import files
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import QuantizationError


@dataclass(frozen=True)
class Trial:
    """One model that was tried.

    Attributes:
        nodes: the layers left in float, by ONNX node.
        value: the task's metric on the held-out images, without the luck of ties.
        drop: how much worse than the FP32 network's that is, see `Metric.drop`.
        size_bytes, path: of its file.
    """

    nodes: tuple[str, ...]
    value: float
    drop: float
    size_bytes: int
    path: Path


@dataclass
class Trials:
    """The trials in order; each set of nodes is measured once."""

    measure: Callable[[tuple[str, ...]], Trial]
    steps: list[Trial] = field(default_factory=list)

    def __call__(self, nodes: Sequence[str]) -> Trial:
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


def to_csv(steps: Sequence[Trial], metric: str) -> str:
    """Return one line a trial, in order; the metric of that name is of the held-out images."""
    rows: list[list[object]] = [["step", "layers", metric, "drop", "size_bytes", "nodes"]]
    for place, step in enumerate(steps):
        figures = [len(step.nodes), step.value, step.drop, step.size_bytes]
        rows.append([place, *figures, " ".join(step.nodes)])
    return files.to_csv(rows)
