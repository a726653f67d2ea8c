"""The search for few nodes in float with a drop of at most `max_drop`.

The caller ranks groups of nodes, the noisiest first. The first 1, 2, 4, ... groups are left in
float until the drop is small enough; then fewer are tried. If the samples suffice, a test decides,
and proves that the accepted drop is within `max_drop`. The measured drop alone would prove nothing:
of ten choices that all lose more, one often measures less by chance. If the samples do not suffice,
or no choice passes the test, the measured drop decides.

This module does not load models; a function of the caller measures each choice of nodes.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resnet8ptq.config import words
from resnet8ptq.core import files
from resnet8ptq.core.console import track
from resnet8ptq.core.deadline import Deadline

log = logging.getLogger(__name__)

COUNTS = (1, 2, 4, 8, 16, 32)  # numbers of groups of nodes that are left in float
# The tests are of no node in float, of each of `COUNTS`, and of two searches that end at the first
# failure.
TESTS = len(COUNTS) + 3


@dataclass(frozen=True)
class Trial:
    """One choice of nodes, with its measurements.

    Attributes:
        nodes: nodes left in float, by ONNX name.
        value: the tie-adjusted metric on the scored held-out samples.
        drop: the loss against FP32, see `stopping.TrialResult`.
        size_bytes, path: size and path of the quantized file.
        p: one-sided p-value of "the drop is at `max_drop` or above".
        samples: number of scored samples, see `stopping.try_choice`.
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
        """Return the trial with `nodes` in float; measure it if it is new."""
        known = self.find(nodes)
        if known is None:
            known = self.measure(tuple(nodes))
            self.steps.append(known)
        return known

    def find(self, nodes: Sequence[str]) -> Trial | None:
        """Return the trial of these nodes; None if they were not tried."""
        wanted = set(nodes)
        for step in self.steps:
            if set(step.nodes) == wanted:
                return step
        return None


Groups = Sequence[Sequence[str]]  # groups of nodes, the noisiest first
Accept = Callable[[Trial], bool]
Keeps = Callable[[Groups], bool]


def select(
    rank: Callable[[], Groups],
    trials: Trials,
    max_drop: float,
    level: float | None,
    deadline: Deadline,
) -> list[str]:
    """Return the nodes to leave in float.

    If no trial has a drop of at most `max_drop`, the function warns, and returns the nodes of the
    trial with the smallest drop.

    Args:
        rank: returns the groups; called only if needed.
        level: level of each test; if None, the measured drop decides without a test.
        deadline: the end of the search; after it, only the first trial may still start.
    """

    def measured(trial: Trial) -> bool:
        return trial.drop <= max_drop

    def shown(trial: Trial) -> bool:
        return level is not None and trial.p <= level

    # Accept first by the test, and if that fails by the measured drop
    groups: Groups | None = None
    first = trials(())
    criteria = (measured,) if level is None else (shown, measured)
    for accept in criteria:

        def keeps(groups: Groups, accept: Accept = accept) -> bool:
            nodes = join(groups)
            possible = trials.find(nodes) is not None or not deadline.is_over
            return possible and accept(trials(nodes))

        def perfect(groups: Groups) -> bool:
            known = trials.find(join(groups))
            return known is not None and known.drop <= 0

        if keeps([]):
            return []
        if groups is None:
            groups = [] if deadline.is_over else rank()
        kept = _double(groups, keeps, perfect)
        if kept:
            return join(_take_back(kept, keeps))

    # No choice is accepted, so take the smallest drop
    best = min(trials.steps, key=lambda trial: (trial.drop, len(trial.nodes)))
    if deadline.is_over:
        deadline.cut(
            f"search for layers in float: {len(trials.steps)} trials, none is within max_drop"
        )
    log.warning(
        "max_drop: got %g, but the smallest drop in the trials is %.5f on the held-out samples, "
        "with %s in float; this choice is used; with all layers quantized the drop is %.5f",
        max_drop,
        best.drop,
        words.as_list(best.nodes),
        first.drop,
    )
    return list(best.nodes)


def join(groups: Groups) -> list[str]:
    """Return the nodes of all groups, each once.

    >>> join([["conv1", "add"], ["add", "conv2"]])
    ['conv1', 'add', 'conv2']
    """
    return list(dict.fromkeys(itertools.chain.from_iterable(groups)))


def _double(groups: Groups, keeps: Keeps, perfect: Keeps) -> Groups:
    """Try the first 1, 2, 4, ... groups; return the accepted ones, see `_shorten`, or none.

    Args:
        perfect: returns whether a trial lost nothing, so that more nodes in float cannot help.
    """
    if not groups:
        return []
    counts = [count for count in COUNTS if count < len(groups)]
    if len(groups) <= COUNTS[-1]:  # all groups are the last step
        counts.append(len(groups))
    low = 0
    for count in track(counts, "Leaving layers in float", "steps"):
        if keeps(groups[:count]):
            return _shorten(groups, low, count, keeps)
        if perfect(groups[:count]):
            break
        low = count
    return []


def _shorten(groups: Groups, low: int, count: int, keeps: Keeps) -> Groups:
    """Return the first `count` groups, which are accepted, or fewer if these are accepted too.

    Each trial halves the distance to `low`, and the first refusal ends the search. The error rate
    of such a sequence is that of one test (fixed-sequence testing).
    """
    while count - low > 1 and keeps(groups[: (low + count) // 2]):
        count = (low + count) // 2
    return groups[:count]


def _take_back(groups: Groups, keeps: Keeps) -> Groups:
    """Return the groups without those that need not stay in float; at least one is left.

    Groups are quantized again one by one, the least noisy first, until the first refusal.
    """
    kept = list(groups)
    for group in reversed(groups):
        rest = [other for other in kept if other is not group]
        if not rest or not keeps(rest):
            break
        kept = rest
    return kept


def to_csv(steps: Sequence[Trial], metric: str) -> str:
    """Return CSV with a row for each trial, in order.

    Args:
        metric: the name of the tie-adjusted metric.
    """
    rows: list[list[object]] = [
        ["step", "nodes_in_float", metric, "drop", "p", "samples", "size_bytes", "nodes"]
    ]
    for number, step in enumerate(steps):
        figures = [len(step.nodes), step.value, step.drop, step.p, step.samples, step.size_bytes]
        rows.append([number, *figures, " ".join(step.nodes)])
    return files.to_csv(rows)
