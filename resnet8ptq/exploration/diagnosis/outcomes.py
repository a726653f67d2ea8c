"""Outcomes of changed settings on held-out samples, compared with those of unchanged settings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import PtqError
from resnet8ptq.core.text import printable
from resnet8ptq.evaluation.evaluator import Compared
from resnet8ptq.exploration.search.changes import Change
from resnet8ptq.tasks.scoring.metric import DIGITS, Metric
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE
from resnet8ptq.tasks.task import Task

HELPS_DB = 1.0  # gain in the output's SQNR; less may be luck


@dataclass(frozen=True)
class Outcome:
    """The result of one variant of the run on the held-out samples.

    Attributes:
        words: the change, or the half that is rounded; empty for the unchanged settings.
        value: the task's metric; NaN if the change could not be tried.
        won: the loss against FP32 that the change removes, see `Metric.loss`.
        sqnr_db: SQNR of the output, see `Compared.sqnr_db`; NaN if not tried.
        won_db: the gain in SQNR over the unchanged settings; minus infinite if not tried.
        p_value: p-value of the task's paired test against the unchanged settings; None without such
            a test.
        reason: the reason why the change could not be tried; empty if it was tried.
    """

    words: str
    value: float = math.nan
    won: float = 0.0
    sqnr_db: float = math.nan
    won_db: float = -math.inf
    p_value: float | None = None
    reason: str = ""

    @property
    def refusal(self) -> str:
        """The change and the reason why it could not be tried.

        If the reason begins with the change's key, the result is the reason.
        """
        key, _, _ = self.words.partition("=")
        if self.reason.startswith(f"{key}="):
            return self.reason
        return f"{self.words}: {self.reason}"

    @property
    def helps(self) -> bool:
        """Whether the change gains at least `HELPS_DB`, or significantly improves the metric."""
        significant = self.p_value is not None and self.p_value < SIGNIFICANCE
        return self.won_db >= HELPS_DB or (significant and self.won > 0)

    def say(self, before: "Outcome", metric: Metric) -> str:
        """Return the metric and the SQNR before and after the change, as text."""
        return (
            f"{metric.title} {metric.show(before.value)} -> {metric.show(self.value)}, "
            f"SQNR {before.sqnr_db:.1f} -> {self.sqnr_db:.1f} dB"
        )


def weigh(words: str, compared: Compared, reference: Compared, task: Task) -> Outcome:
    """Return the outcome of a variant.

    Args:
        words: see `Outcome`.
        compared: the comparison of the variant with FP32.
        reference: the comparison of the unchanged settings with FP32.
    """
    before = unchanged(reference)
    comparison = compared.comparison
    unvaried = reference.comparison
    value = comparison.model.value
    sqnr_db = compared.sqnr_db
    won = round(unvaried.loss() - comparison.loss(), DIGITS) + 0.0  # turns -0.0 into 0.0
    gain = 0.0
    if sqnr_db != before.sqnr_db:  # inf - inf is NaN
        gain = sqnr_db - before.sqnr_db
    p_value = task.compare(comparison.model, unvaried.model).p_value
    return Outcome(words, value, won, sqnr_db=sqnr_db, won_db=gain, p_value=p_value)


Compare = Callable[[RunConfig], Compared]


def unchanged(compared: Compared) -> Outcome:
    """Return the outcome of the unchanged settings."""
    value = compared.comparison.model.value
    return Outcome("", value, won=0.0, sqnr_db=compared.sqnr_db, won_db=0.0)


def attempt(
    config: RunConfig,
    changes: Sequence[Change],
    reference: Compared,
    task: Task,
    compare: Compare,
) -> list[Outcome]:
    """Try each change alone; return the outcomes, the best first.

    Changes that help come first, and changes that could not be tried come last. Within these
    groups, SQNR decides, because a metric would depend on a few samples.

    Args:
        reference: the comparison of the unchanged settings with FP32.
        compare: quantizes with the settings, and compares with FP32 on the held-out samples.
    """
    outcomes = []
    for change in track(changes, "Trying changes", "changes"):
        try:
            compared = compare(change.apply(config))
        except PtqError as error:
            outcomes.append(Outcome(change.words, reason=printable(str(error))))
            continue
        outcomes.append(weigh(change.words, compared, reference, task))
    return sorted(outcomes, key=lambda outcome: (not outcome.helps, -outcome.won_db))
