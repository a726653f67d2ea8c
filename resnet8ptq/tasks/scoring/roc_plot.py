"""The figure of two ROC curves."""

import numpy as np
from matplotlib.figure import Figure  # no pyplot: figures need no screen and no global state
from numpy.typing import NDArray

from resnet8ptq.core.text import plain
from resnet8ptq.tasks.scoring.outputs import Array
from resnet8ptq.tasks.scoring.ranking import Ranking


def draw(model: Ranking, baseline: Ranking, title: str) -> Figure:
    """Draw the ROC curves of a model and its baseline."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    series = (("FP32", baseline, "0.5", "--"), ("quantized", model, "C0", "-"))
    for name, ranking, colour, line in series:
        rates = _rates(ranking.ranked, ranking.labels == 1)
        label = f"{name}, AUC {ranking.auc.value:.4f}"
        axes.plot(*rates, color=colour, linestyle=line, label=label)
    axes.plot([0, 1], [0, 1], color="0.8", linewidth=1, zorder=0)  # random scores
    axes.set(xlabel="false positive rate", ylabel="true positive rate", title=plain(title))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def _rates(scores: NDArray[np.floating], positive: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return false and true positive rates: 0, then those at each different score, descending."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.append(ranked[1:] != ranked[:-1], True)  # the last of equal scores
    false = np.cumsum(~positive[order])[last]
    true = np.cumsum(positive[order])[last]
    return np.append(0, false / false[-1]), np.append(0, true / true[-1])
