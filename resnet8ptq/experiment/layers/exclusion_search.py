"""The search for few layers in float that keep `max_drop`.

By a test, if the samples suffice: the drop of a choice that is accepted is shown to be within
`max_drop`. A measured drop within it shows nothing: of ten choices that all lose more, the luckiest
is within it. Otherwise by the measured drop: forward, then backward.

Knows nothing of models: what it is given measures a choice of nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resnet8ptq.config import words
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
        p: one-sided p-value of "the drop is at `max_drop` or above".
        samples: number of scored samples: a trial stops when its test is decided.
    """

    nodes: tuple[str, ...]
    value: float
    drop: float
    size_bytes: int
    path: Path
    p: float = 1.0
    samples: int = 0


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


Accept = Callable[[Trial], bool]


def select(
    rank: Callable[[], list[str]], trials: Trials, max_drop: float, level: float | None = None
) -> list[str]:
    """Return the nodes to leave in float, of which none could be quantized again by itself.

    Args:
        rank: returns all nodes, most sensitive first; called only where it is needed.
        level: of each test; None: by the measured drop.

    Raises:
        QuantizationError: no choice that leaves a layer quantized keeps `max_drop`.
    """

    def shown(trial: Trial) -> bool:
        return level is not None and trial.p <= level

    def measured(trial: Trial) -> bool:
        return trial.drop <= max_drop

    if shown(trials(())) or (level is None and measured(trials(()))):
        return []
    ranked = rank()
    if level is not None and (kept := _descend(ranked, trials, shown)):
        return _take_back(kept, trials, shown, in_order=True)
    if measured(trials(())):
        return []
    for count in track(range(1, len(ranked)), "Leaving layers in float", "layers"):
        if measured(trials(ranked[:count])):
            return _take_back(ranked[:count], trials, measured)
    best = min(trials.steps, key=lambda step: step.drop)
    raise QuantizationError(
        f"max_drop: got {max_drop}, takes at least {best.drop:.5f} here: the smallest drop on "
        f"held-out images of all that was tried, with {words.as_list(best.nodes)} in float"
    )


def _descend(ranked: list[str], trials: Trials, keeps: Accept) -> list[str]:
    """Return the most sensitive nodes to leave in float; empty if no number of them is accepted.

    From many nodes to few, until a number is not accepted: in this order a wrong acceptance takes
    one wrong test, however many are made (fixed-sequence testing). In halves, then one by one.
    """
    count = len(ranked) - 1
    if count < 1 or not keeps(trials(ranked[:count])):
        return []
    while count > 1 and keeps(trials(ranked[: count // 2])):
        count //= 2
    least = count // 2
    while count - 1 > least and keeps(trials(ranked[: count - 1])):
        count -= 1
    return ranked[:count]


def _take_back(
    nodes: list[str], trials: Trials, keeps: Accept, in_order: bool = False
) -> list[str]:
    """Quantize nodes again while one can be; first the one that costs the most bytes in float.

    Args:
        in_order: end at the first refusal, so that a wrong acceptance takes one wrong test.
    """
    sizes = [trials(nodes[:count]).size_bytes for count in range(len(nodes) + 1)]
    cost = {node: sizes[place + 1] - sizes[place] for place, node in enumerate(nodes)}
    kept, again = nodes, True
    while again:
        again = False
        for node in track(sorted(kept, key=lambda n: -cost[n]), "Quantizing again", "layers"):
            rest = [other for other in kept if other != node]
            if keeps(trials(rest)):
                kept, again = rest, True  # a refused one may be possible now
                break
            if in_order:
                return kept
    return kept


def to_csv(steps: Sequence[Trial], metric: str) -> str:
    """Return one line a trial, in order; the metric of that name is of the held-out images."""
    rows: list[list[object]] = [
        ["step", "layers", metric, "drop", "p", "samples", "size_bytes", "nodes"]
    ]
    for place, step in enumerate(steps):
        figures = [len(step.nodes), step.value, step.drop, step.p, step.samples, step.size_bytes]
        rows.append([place, *figures, " ".join(step.nodes)])
    return files.to_csv(rows)
