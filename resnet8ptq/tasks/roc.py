"""What tasks share that rank samples: scores of positives and negatives, and their ROC curve."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state
from numpy.typing import NDArray

from resnet8ptq.core.text import plain
from resnet8ptq.tasks import contract
from resnet8ptq.tasks.contract import Array, Arrays, Metric
from resnet8ptq.tasks.statistics import Auc, Interval, Margin, auc, delong, delong_error

DELONG = "DeLong's test (1988)"
INTERVALS = "95%, by DeLong's variance"
FIGURE = "roc.png"
GUESSING = 0.5  # its AUC


class Scores(contract.Scores):
    """Scores of which the AUC is judged."""

    auc: Auc

    @property
    def value(self) -> float:
        """The AUC; a tie counts half in it."""
        return self.auc.value

    @property
    def interval(self) -> Interval:
        """95% interval of the AUC."""
        return self.auc.interval


class Comparison(contract.Comparison):
    """Two such on the same items."""

    @property
    def interval(self) -> Interval:
        """95% interval of the difference of the AUCs, by DeLong's covariance."""
        return delong(self.model.auc, self.baseline.auc)[0]

    @property
    def p_value(self) -> float:
        """DeLong's test of the AUCs."""
        return delong(self.model.auc, self.baseline.auc)[1]


@dataclass(frozen=True)
class Ranking:
    """Scores [n] of a model and of its baseline, and labels [n], of which 1 is the positive."""

    scores: NDArray[np.floating]
    baseline_scores: NDArray[np.floating]
    labels: NDArray[np.int64]

    @cached_property
    def model(self) -> Auc:
        """The model's AUC."""
        return auc(self.scores, self.labels == 1)

    @cached_property
    def baseline(self) -> Auc:
        """The baseline's AUC."""
        return auc(self.baseline_scores, self.labels == 1)

    def margin(self, limit: float) -> Margin:
        """Return the margin of the AUC's loss, by DeLong's covariance."""
        excess = self.baseline.value - self.model.value - limit
        rarer = min(len(self.model.of_positives), len(self.model.of_negatives))
        return Margin.student(excess, delong_error(self.model, self.baseline), rarer)

    def figure(self, title: str) -> Figure:
        """Draw both ROC curves."""
        figure = Figure(figsize=(6.4, 5.2), layout="constrained")
        axes = figure.subplots()
        series = (
            ("FP32", self.baseline_scores, self.baseline, "0.5", "--"),
            ("quantized", self.scores, self.model, "C0", "-"),
        )
        for name, scores, found, colour, line in series:
            rates = _rates(scores, self.labels == 1)
            label = f"{name}, AUC {found.value:.4f}"
            axes.plot(*rates, color=colour, linestyle=line, label=label)
        axes.plot([0, 1], [0, 1], color="0.8", linewidth=1, zorder=0)
        axes.set(xlabel="false positive rate", ylabel="true positive rate", title=plain(title))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        return figure


def _rates(scores: NDArray[np.floating], positive: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return false and true positive rates as the threshold falls below one score after another."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)  # of equal scores
    rates = [np.cumsum(each[order])[last] / each.sum() for each in (~positive, positive)]
    return np.append(0, rates[0]), np.append(0, rates[1])


@dataclass(frozen=True)
class Paired(contract.Paired):
    """The scores of both."""

    ranking: Ranking

    @classmethod
    def read(cls, arrays: Arrays) -> Self:
        """Read what `arrays` returned."""
        return cls(read_ranking(arrays))

    def arrays(self) -> dict[str, Array]:
        """Return scores, the baseline's scores and labels."""
        return dict(vars_of(self.ranking))

    def against(self, other: Self) -> float:
        """Return the p-value of DeLong's test."""
        return delong(self.ranking.model, other.ranking.model)[1]

    def margin(self, metric: Metric, drop: float, items: int) -> Margin:
        """Return the margin of the AUC."""
        return self.ranking.margin(drop)


def vars_of(ranking: Ranking) -> Arrays:
    """Return the arrays of a ranking by name."""
    names = ("scores", "baseline_scores", "labels")
    return {name: getattr(ranking, name) for name in names}


def read_ranking(arrays: Arrays) -> Ranking:
    """Read a ranking from arrays of these names.

    Raises:
        KeyError, ValueError: they are not that.
    """
    ranking = Ranking(arrays["scores"], arrays["baseline_scores"], arrays["labels"])
    contract.check_columns([ranking.scores, ranking.baseline_scores], "f")
    contract.check_columns([ranking.labels], "i")
    if ranking.labels.shape != ranking.scores.shape or set(ranking.labels.tolist()) != {0, 1}:
        raise ValueError("not a label of 0 or 1 for each item")
    return ranking


def doubt(baseline: Auc, expected: float | None) -> str | None:
    """Doubt an AUC that is not shown to be above that of guessing, or is below `expected`."""
    found = f"AUC {baseline.value:.4f}"
    if baseline.least <= GUESSING:
        return f"NEAR CHANCE, {found}"
    return contract.doubt_below(found, baseline.interval, expected)
