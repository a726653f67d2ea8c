"""`task=verification`: embeddings of identities, scored as pairs (EER, TAR) or a gallery (recall).

The score of a pair is the cosine of its embeddings. The bootstrap draws identities, because the
pairs of one identity are not independent. From a list of pairs, the bootstrap draws pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import VerificationConfig
from resnet8ptq.core.errors import ConfigError, DataError, ModelError
from resnet8ptq.tasks.scoring import statistics
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP, BootstrapScores
from resnet8ptq.tasks.scoring.comparison import doubt_below
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Outputs, Targets, TaskContext, check_labels, describe
from resnet8ptq.tasks.scoring.ranking import place_nan
from resnet8ptq.tasks.scoring.statistics import Values
from resnet8ptq.tasks.similarity import cosine, pair_up
from resnet8ptq.tasks.task import Scope, Task, TaskType

MOST_PAIRS = 100_000  # pairs of different identities; more of them change the EER little
AT_ONCE = 512  # queries whose scores for the whole gallery are in memory

Indices = NDArray[np.int64]
Chosen = Callable[[Indices], float]


def metrics(far: float = 0.01, k: int = 1) -> dict[str, Metric]:
    """Return the metrics by the value of `task.primary`."""
    return {
        "eer": Metric("eer", "EER", maximize=False, percent=True),
        "tar": Metric("tar", f"TAR at FAR {far:g}", percent=True),
        "recall": Metric("recall", f"recall at {k}", percent=True),
    }


@dataclass(frozen=True)
class VerificationScores(BootstrapScores):
    """The metric on all identities or listed pairs, and on bootstrap samples of them.

    Attributes:
        chance: the expected value for embeddings that do not depend on the identity.
    """

    chance: float = 0.0


@dataclass(frozen=True)
class Pairs:
    """Pairs of samples [pairs], in descending order of their scores.

    Attributes:
        items: the numbers of the two items of each pair [pairs, 2], which are equal for two samples
            of one item. The bootstrap draws items: identities, or listed pairs.
        same: whether both samples of a pair have one identity [pairs].
        last: for each different score, the index of its last pair.
    """

    items: Indices
    same: NDArray[np.bool_]
    last: Indices

    @classmethod
    def of(cls, scores: Values, items: Indices, same: NDArray[np.bool_]) -> "Pairs":
        """Sort pairs by their scores, once for all bootstrap samples; see `place_nan` for NaN."""
        placed = place_nan(scores, same)
        order = np.argsort(-placed, kind="stable")
        ranked = placed[order]
        last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
        return cls(items[order], same[order], last)

    def rates(self, weights: Indices) -> tuple[Values, Values]:
        """Return false and true acceptance rates at each threshold, starting with 0.

        The false acceptance rates are NaN if no pair of two identities is drawn, the true ones if
        no pair of one identity is drawn.

        Args:
            weights: how often each item was drawn [items]. A pair of two items counts as the
                product of their weights, and a pair of one item as its weight.
        """
        one, other = self.items.T
        drawn = weights[one] * np.where(one == other, 1, weights[other])
        rates = []
        for kind in (~self.same, self.same):
            accepted = np.cumsum(drawn * kind)
            rates.append(np.append(0.0, accepted[self.last]) / accepted[-1])
        return rates[0], rates[1]


def find_eer(false: Values, true: Values) -> float:
    """Return the rate at which false acceptances equal false rejections, interpolated linearly.

    Args:
        false, true: the acceptance rates at each threshold, see `Pairs.rates`.
    """
    after = int(np.argmax(false >= 1 - true))
    before = after - 1
    excess = (1 - true - false)[[before, after]]
    share = excess[0] / (excess[0] - excess[1])
    return float(false[before] + share * (false[after] - false[before]))


def find_tar(far: float, false: Values, true: Values) -> float:
    """Return the highest true acceptance rate whose false acceptance rate is at most `far`."""
    return float(true[false <= far].max())


def _by_pairs(pairs: Pairs, items: int, measure: Callable[[Values, Values], float]) -> Chosen:
    def metric(chosen: Indices) -> float:
        with np.errstate(invalid="ignore"):
            rates = pairs.rates(np.bincount(chosen, minlength=items))
        if not np.isfinite(rates).all():
            return np.nan
        return measure(*rates)

    return metric


def _list_pairs(identities: Indices) -> Indices:
    """Return all pairs [pairs, 2] if there are at most `MOST_PAIRS`.

    Otherwise, return all pairs of equal identities, and at most `MOST_PAIRS` drawn others.
    """
    count = len(identities)
    if count * (count - 1) // 2 <= MOST_PAIRS:
        return np.stack(np.triu_indices(count, 1), axis=1)

    # List the pairs of equal identities
    order = np.argsort(identities, kind="stable")
    same = [np.zeros((0, 2), np.int64)]
    for members in np.split(order, np.flatnonzero(np.diff(identities[order])) + 1):
        numbers = np.stack(np.triu_indices(len(members), 1), axis=1)
        same.append(members[numbers])

    # Draw others, more than needed because some are equal or repeated
    random = np.random.default_rng(statistics.RESAMPLING_SEED)
    drawn = np.sort(random.integers(0, count, (3 * MOST_PAIRS, 2)), axis=1)
    drawn = random.permutation(np.unique(drawn, axis=0))
    one, other = identities[drawn].T
    others = drawn[one != other]
    return np.concatenate([*same, others[:MOST_PAIRS]])


def find_hits(values: Values, identities: Indices, k: int) -> NDArray[np.bool_]:
    """Return for each sample [n] whether one of the `k` nearest others has the same identity.

    Equally near samples of other identities count as nearer, so that constant embeddings are no
    hits. A sample with NaN is the farthest from all others.
    """
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    unit = values / np.where(lengths == 0, 1, lengths)
    hits = np.zeros(len(values), np.bool_)
    for start in range(0, len(values), AT_ONCE):
        rows = np.arange(start, min(start + AT_ONCE, len(values)))

        # Compare with all other samples
        nearness = unit[rows] @ unit.T
        nearness[np.isnan(nearness)] = -np.inf
        nearness[rows - start, rows] = -np.inf
        same = identities == identities[rows, np.newaxis]
        best = np.where(same, nearness, -np.inf).max(axis=1, keepdims=True)
        hits[rows] = ((nearness >= best) & ~same).sum(axis=1) < k
    return hits


def build(primary: str = "eer", far: float = 0.01, k: int = 1, resamples: int = 2000) -> Task:
    """Return `task=verification` with these settings.

    Args:
        primary: `eer`, `tar` or `recall`.
        far: the largest false acceptance rate of `tar`.
        k: the number of nearest samples that `recall` considers.
    """
    titles = metrics(far, k)
    others = [metric for name, metric in titles.items() if name != primary]
    return Task(
        "verification",
        titles[primary],
        partial(_score, primary, far, k, resamples),
        BOOTSTRAP,
        beside=tuple(others),
        scope=Scope(joins_groups=True),
        doubt=partial(_doubt, titles[primary]),
    )


def _score(
    primary: str, far: float, k: int, resamples: int, outputs: Outputs, targets: Targets
) -> VerificationScores:
    values = outputs.values[0].reshape(len(outputs), -1).astype(np.float64)
    labels = np.asarray(targets.labels)

    # Find the pairs, and the items that the bootstrap draws
    by_name: dict[str, tuple[Chosen, float]] = {}
    if targets.groups is not None:  # a list of pairs, labelled 1 for one identity
        chosen = pair_up(targets.groups)
        paired = labels[chosen]
        if labels.dtype.kind == "U" or not np.isin(paired, (0, 1)).all():
            raise DataError(
                "data.labels: got other labels than 0 and 1 for pairs (data.groups); expected 1 "
                "for one identity, 0 for two"
            )
        if (paired[:, 0] != paired[:, 1]).any():
            raise DataError("data.groups: a pair has two labels; expected one")
        same = paired[:, 0] == 1
        drawn = np.repeat(np.arange(len(chosen))[:, np.newaxis], 2, axis=1)
        items = len(chosen)
    else:
        identities = np.unique(labels, return_inverse=True)[1]
        items = int(identities.max()) + 1
        chosen = _list_pairs(identities)
        drawn = identities[chosen]
        same = drawn[:, 0] == drawn[:, 1]
        by_name["recall"] = _find_recall(values, identities, k)

    # Make the metrics of the pairs
    scores = cosine(values[chosen[:, 0]], values[chosen[:, 1]])
    pairs = Pairs.of(scores, drawn, same)
    by_name["eer"] = _by_pairs(pairs, items, find_eer), 0.5
    by_name["tar"] = _by_pairs(pairs, items, partial(find_tar, far)), far

    # The bootstrap needs only the primary metric
    statistic, chance = by_name.pop(primary)
    every = np.arange(items)
    others: Metrics = {name: metric(every) for name, (metric, _) in by_name.items()}
    return VerificationScores(
        outputs, statistic, resamples, None, others, items=items, chance=chance
    )


def _find_recall(values: Values, identities: Indices, k: int) -> tuple[Chosen, float]:
    """Return a function from drawn identities to the recall, and the level of chance.

    The samples of an identity are queries, unless it has only one. The recall is NaN without
    queries.
    """
    counts = np.bincount(identities)
    queries = counts[identities] > 1
    hits = find_hits(values, identities, k)
    right = np.bincount(identities, hits & queries)
    asked = np.bincount(identities, queries)

    # By chance, one of k drawn others has the same identity
    chance = 0.0
    if queries.any():
        share = (counts[identities] - 1)[queries] / max(len(values) - 1, 1)
        chance = float((1 - (1 - share) ** k).mean())

    def metric(chosen: Indices) -> float:
        total = asked[chosen].sum()
        if not total:
            return np.nan
        return float(right[chosen].sum() / total)

    return metric, chance


def _doubt(metric: Metric, baseline: VerificationScores, expected: float | None) -> str | None:
    """Return a doubt if the interval includes chance or worse, or lies below `expected`.

    An error rate is not compared with `expected`.
    """
    shown = f"{metric.title} {metric.show(baseline.value)}"
    interval = baseline.per_sample.interval
    worst = interval[0] if metric.maximize else interval[1]
    if metric.cost(worst) >= metric.cost(baseline.chance):
        return f"NEAR CHANCE, {shown} (chance {metric.show(baseline.chance)})"
    if not metric.maximize:
        return None
    return doubt_below(shown, interval, expected)


def _make(config: VerificationConfig, context: TaskContext) -> Task:
    check_labels(
        "verification", context, "iuU", "an identity for each sample, or 0 and 1 for each pair"
    )
    labels = np.asarray(context.labels)
    shapes = list(context.outputs.values())
    if len(shapes) != 1 or len(shapes[0]) != 1 or shapes[0] == (1,):
        raise ModelError(
            f"returns {describe(context.outputs)}; task=verification takes one output, the "
            "embedding [width] of each sample; model.outputs=[NAME] keeps one of several"
        )

    # Recall searches a gallery of identities
    if context.grouped and config.primary == "recall":
        raise ConfigError(
            f"task.primary: got recall, and {context.data} has a list of pairs (data.groups); "
            "expected eer or tar"
        )

    # Some identities must have a pair of samples
    counts = np.unique(labels, return_counts=True)[1]
    if labels.ndim > 1 or len(counts) < 2 or counts.max() < 2:
        raise ConfigError(
            f"task=verification: {context.data} has {len(counts)} identities for {len(labels)} "
            "samples; expected two or more, with two or more samples of some"
        )

    # With all others as neighbours, every query would be a hit
    if config.k >= len(labels) - 1:
        raise ConfigError(
            f"task.k: got {config.k}, and {context.data} has {len(labels)} samples; expected fewer "
            "than the other samples"
        )
    return build(config.primary, config.far, config.k, config.resamples)


VERIFICATION = TaskType(
    make=_make,
    recall=lambda config, names: build(config.primary, config.far, config.k, config.resamples),
    schema=VerificationConfig,
)
