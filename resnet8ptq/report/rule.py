"""The rule that chooses the model to deploy, as a function of plain numbers.

1. Candidates are the models that pass; if none passes, the undecided ones whose measured loss is
   within the limit.
2. A candidate is dropped if another is no worse in loss, bytes and latency, and clearly better in
   one of them. Latency counts only if every candidate has one.
3. `speed` takes the fastest of the candidates that are shown to be faster than FP32.
4. If there are none, it takes the fastest candidate of about the smallest size: the smallest
   candidate has at least 90% of that candidate's bytes. Unless the chosen one is worth its loss
   (rule 7) and, as measured, not slower than FP32, this choice is repeated among the candidates
   that are, if there are any.
5. `size`, and `speed` without latencies, take the smallest candidate. `accuracy` takes the most
   accurate candidate that is not slower than FP32, or else the most accurate one.
6. Of candidates that are equal in speed or size, `speed` and `size` take the smaller, then the
   faster, then the more accurate one.
7. A model that is neither clearly smaller nor clearly faster than FP32 (`evaluation.worth`) is not
   worth its loss. If the chosen model is not, FP32 stays.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from resnet8ptq.evaluation.paired_latency import Ratio
from resnet8ptq.evaluation.worth import MOST_BYTES, saves

T = TypeVar("T")

SAME_SIZE = 0.005  # names and padding change file sizes by this much
SAME_SPEED = 0.05  # latencies of one file differ by this much between two loadings
PREFERENCES = ("speed", "size", "accuracy")

Advice = Literal["deploy", "test", "keep"]


@dataclass(frozen=True)
class Candidate:
    """A model that passes or is undecided, with the values that the rule reads.

    Attributes:
        key: the id of the model's run.
        passes: whether the model has the verdict pass; otherwise, it is undecided.
        loss: measured loss against FP32, in the unit of the limit.
        rank: position in the order from the best model, which has 0, to the worst.
        fp32_bytes: size of the FP32 file in the same framework.
        latency_ms: latency of one sample; None if it was not measured.
        speed: speed relative to the fastest FP32; None if it was not measured.
    """

    key: str
    passes: bool
    loss: float
    rank: int
    size_bytes: float
    fp32_bytes: float
    latency_ms: float | None = None
    speed: Ratio | None = None
    cell: Any = field(default=None, compare=False, repr=False)  # the run, which the rule ignores

    @property
    def is_faster(self) -> bool:
        """Whether the model is shown to be faster than FP32."""
        return self.speed is not None and self.speed.faster

    @property
    def is_slower(self) -> bool:
        """Whether the measured speed is below that of FP32."""
        return self.speed is not None and self.speed.value < 1

    @property
    def gains(self) -> bool:
        """Whether the model is clearly smaller or faster than FP32, see `evaluation.worth`."""
        times = None if self.speed is None else self.speed.value
        return saves(self.size_bytes, self.fp32_bytes, times)


@dataclass(frozen=True)
class Headline:
    """The choice of the rule.

    Attributes:
        advice: `deploy` if the model passes, `test` if it is undecided, `keep` if FP32 stays.
        candidate: the chosen model; with `keep`, it is not worth its loss (rule 7).
        reason: the reason as text; unless FP32 stays, with size and speed, see `_costs`.
        nothing_faster: whether candidates were timed, and none that rule 2 keeps is shown to be
            faster than FP32.
        alone: whether the model passes only if assessed by itself, without a correction for other
            models.
    """

    advice: Advice
    candidate: Candidate
    reason: str
    nothing_faster: bool = False
    alone: bool = False

    @property
    def cell(self) -> Any:
        """The chosen run."""
        return self.candidate.cell


def choose(
    measured: Sequence[Candidate], prefer: str = "speed", loss_error: float = 0.0
) -> Headline | None:
    """Return the choice by the rule; None if `measured` is empty.

    Args:
        measured: the models that pass, and the undecided ones within the limit.
        prefer: one of `PREFERENCES`.
        loss_error: a smaller loss is clearly better only if it differs by more than this.
    """
    # Apply rules 1 and 2
    candidates = [one for one in measured if one.passes]
    if not candidates:
        candidates = list(measured)
    if not candidates:
        return None
    candidates = drop_dominated(candidates, loss_error)

    # Apply rules 3 to 5, by the preference
    faster = [one for one in candidates if one.is_faster]
    timed = any(one.speed is not None for one in candidates)
    if prefer == "accuracy":
        kept = [one for one in candidates if not one.is_slower]
        if not kept:
            kept = candidates
        chosen = min(kept, key=_rank)
        reason = "the most accurate"
    elif prefer == "speed" and faster:
        fastest = min(map(_latency, faster))
        chosen = _first(faster, key=_latency, slack=fastest * SAME_SPEED)
        reason = "the fastest"
    elif prefer == "speed" and timed:
        chosen, reason = _choose_small(candidates)
        # On a busy machine, a model at 1.2 times FP32's speed may not be shown to be faster. A
        # model at half of FP32's speed is not better for a few bytes less.
        as_fast = [one for one in candidates if one.speed and not one.is_slower and one.gains]
        if as_fast and chosen not in as_fast:
            chosen, reason = _choose_small(as_fast)
            reason += " not slower than FP32"
    else:
        smallest = min(map(_size, candidates))
        chosen = _first(candidates, key=_size, slack=smallest * SAME_SIZE)
        reason = "the smallest"

    # Rule 7: FP32 stays if nothing is gained
    nothing_faster = timed and not faster
    if not chosen.gains:
        why = "neither clearly smaller nor faster than FP32"
        return Headline("keep", chosen, why, nothing_faster=nothing_faster)
    advice: Advice = "deploy" if chosen.passes else "test"
    reason = f"{reason}{_among(chosen)}{_costs(chosen)}"
    return Headline(advice, chosen, reason, nothing_faster=nothing_faster)


def _choose_small(candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    """Return the fastest candidate of about the smallest size, and the reason as text.

    A few bytes less would not be worth twice the time.
    """
    smallest = min(map(_size, candidates))
    small = up_to(smallest / MOST_BYTES, candidates, _size)
    fastest = min(map(_latency, small))
    chosen = _first(small, key=_latency, slack=fastest * SAME_SPEED)

    # The chosen one may be larger, within that tenth
    if chosen.size_bytes <= smallest * (1 + SAME_SIZE):
        return chosen, "the smallest"
    return chosen, "the fastest of about the smallest size"


def drop_dominated(candidates: Sequence[Candidate], loss_error: float = 0.0) -> list[Candidate]:
    """Return the candidates that no other dominates; at least one remains.

    Latencies count only if every candidate has one.
    """
    timed = all(one.latency_ms is not None for one in candidates)
    kept = []
    for one in candidates:
        is_dominated = any(dominates(other, one, timed, loss_error) for other in candidates)
        if not is_dominated:
            kept.append(one)
    return kept


def dominates(other: Candidate, one: Candidate, timed: bool, loss_error: float) -> bool:
    """Return whether `other` is nowhere worse than `one`, and clearly better in one respect.

    Args:
        timed: whether latencies count.
        loss_error: see `choose`.
    """
    if other.loss > one.loss or other.size_bytes > one.size_bytes:
        return False
    if timed and _latency(other) > _latency(one):
        return False
    smaller = other.size_bytes < one.size_bytes * (1 - SAME_SIZE)
    quicker = timed and _latency(other) < _latency(one) * (1 - SAME_SPEED)
    return smaller or quicker or other.loss < one.loss - loss_error


def _first(
    candidates: Sequence[Candidate], key: Callable[[Candidate], float], slack: float
) -> Candidate:
    """Return the best by `key`; rule 6 decides among candidates within `slack` of the best."""
    least = min(map(key, candidates))
    equal = up_to(least + slack, candidates, key)
    # Apply rule 6: size, then latency, then rank
    smallest = min(map(_size, equal))
    equal = up_to(smallest * (1 + SAME_SIZE), equal, _size)
    fastest = min(map(_latency, equal))
    equal = up_to(fastest * (1 + SAME_SPEED), equal, _latency)
    return min(equal, key=_rank)


def up_to(most: float, items: Iterable[T], key: Callable[[T], float]) -> list[T]:
    """Return the items whose key is at most `most`.

    >>> up_to(3, ["fp32", "int8", "u8"], len)
    ['u8']
    """
    return [item for item in items if key(item) <= most]


def _size(one: Candidate) -> float:
    return one.size_bytes


def _rank(one: Candidate) -> tuple[int, str]:
    return one.rank, one.key


def _latency(one: Candidate) -> float:
    return math.inf if one.latency_ms is None else one.latency_ms


def _among(chosen: Candidate) -> str:
    return " that passes" if chosen.passes else " within the measured limit"


def _costs(chosen: Candidate) -> str:
    """Return size and speed as text, such as `; 66% smaller, 1.80 times as fast as FP32`.

    A size within `SAME_SIZE` of FP32's, and a speed that was not measured, are left out.
    """
    texts = []
    saved = 1 - chosen.size_bytes / chosen.fp32_bytes
    if abs(saved) >= SAME_SIZE:
        word = "smaller" if saved > 0 else "larger"
        texts.append(f"{abs(saved):.0%} {word}")
    if chosen.speed is not None:
        texts.append(f"{chosen.speed.value:.2f} times as fast as FP32")
    if not texts:
        return ""
    return f"; {', '.join(texts)}"
