"""Statistics of metrics: intervals, margins over a limit, paired tests, and tests against chance.

The bootstrap, the area under the ROC curve and Holm's correction are here, too.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import (
    betainc,
    ndtr,
    ndtri,
    stdtr,
    stdtrit,
)  # scipy.stats takes a second to import

from resnet8ptq.core.console import track

Z95 = float(ndtri(0.975))
SIGNIFICANCE = 0.05  # level of p-values that are corrected together
FEWEST = 5  # items, since 4 lie on the same given side of a limit by chance once in 16 times
POWER = 0.8  # power of a test at the sample size that a report names
ROUNDING = 1e-9  # a relative spread below this is an error of float64
KNOWN = 0.99  # least share of the replicates that must have a value
# The least skewness assumed for a loss, chosen for 50 items or more. With this value, about 5% or
# fewer of the models at the limit pass in the simulated tasks, and at most 7%, for the AP of masks
# in 50 pictures (studies/task_errors.md).
LEAST_SKEWNESS = 3.0
COUNTABLE = 10  # least number of replicates beyond 0 with which a tail can be counted
PART = SIGNIFICANCE / 2  # probability on either side of a 95% interval
RESAMPLING_SEED = 0  # fixed, so that the replicates of two runs are paired

Interval = tuple[float, float]
Values = NDArray[np.float64]
Counts = NDArray[np.int64]


def wilson(correct: int, total: int) -> Interval:
    """Return the 95% Wilson score interval of a proportion (Wilson, 1927).

    >>> low, high = wilson(9, 10)
    >>> f"{low:.3f} to {high:.3f}"
    '0.596 to 0.982'
    """
    z = Z95
    p = correct / total
    scale = 2 * (total + z**2)
    centre = (2 * total * p + z**2) / scale
    half_width = z / scale * math.sqrt(4 * total * p * (1 - p) + z**2)
    low = centre - half_width
    high = centre + half_width

    # Set the ends exactly, because rounding would leave 1e-17
    if correct <= 0:
        low = 0.0
    if correct >= total:
        high = 1.0
    return low, high


def mcnemar(ours: int, theirs: int) -> float:
    """Return the p-value of the exact two-sided McNemar test (McNemar, 1947).

    A flip is a sample that only one of the two models gets right. If the models are equally
    accurate, each flip belongs to either model with probability 1/2. If the model with fewer of n
    flips has k of them, each tail is P(X <= k) = I_1/2(n - k, k + 1) (Abramowitz and Stegun, 1964,
    26.5.24).

    Args:
        ours, theirs: the numbers of samples that only the first or only the second model gets
            right.

    >>> round(mcnemar(1, 8), 4)
    0.0391
    """
    if abs(ours - theirs) <= 1:
        return 1.0  # the two tails cover everything
    fewer = min(ours, theirs)
    return 2 * float(betainc(max(ours, theirs), fewer + 1, 0.5))


def least_found(flips: int, total: int, level: float) -> float:
    """Return the smallest loss, a fraction, that McNemar's test detects with `POWER`.

    The estimate uses the normal distribution. It is at least the fewest lost items that are
    significant without a won item, divided by `total`, but at most 1.

    Args:
        flips: number of items, out of `total`, that only one of two models gets right.
        level: the level of the two-sided test.
    """
    needed = float(ndtri(1 - level / 2) + ndtri(POWER)) * math.sqrt(flips)
    fewest = math.floor(math.log2(2 / level)) + 1
    return min(max(needed, fewest) / total, 1.0)


def flips(hits: NDArray[np.bool_], other_hits: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the numbers of samples that only the first or only the second model gets right.

    Args:
        hits, other_hits: whether each model gets each sample right [n].
    """
    return int((hits & ~other_hits).sum()), int((other_hits & ~hits).sum())


@dataclass(frozen=True)
class Margin:
    """The distance of a paired loss from a limit, as the statistic of a test.

    Attributes:
        z: the test statistic, about standard normal if the true loss is at the limit; the smaller
            the loss, the smaller z.
        correction: an amount in units of z that raises both p-values. It allows for continuity
            (half a step of a counted loss) or for the uncertain skewness, and is infinite if the
            items decide nothing.
        no_change: whether `items_needed` is for a model that changes no item.
        unseen: the probability that the items show none of the rare losses that would reach the
            limit, see `with_rare_losses`; 0 if `z` alone decides.
    """

    z: float
    correction: float = 0.0
    no_change: bool = False
    unseen: float = 0.0

    @property
    def p_within(self) -> float:
        """One-sided p-value of "the loss is at the limit or above"; small if it is below."""
        return max(float(ndtr(self.z + self.correction)), self.unseen)

    @property
    def p_beyond(self) -> float:
        """One-sided p-value of "the loss is at the limit or below"; small if it is above."""
        return float(ndtr(self.correction - self.z))

    def items_needed(self, items: int, level: float) -> float:
        """Return the sample size at which the test decides with `POWER`, at the measured loss.

        With `no_change`, the result is the size at which a model that changes no item passes; NaN
        at a limit of 0. Otherwise, at z = 0, it is infinite, or NaN with an infinite correction.

        Args:
            items: the present sample size.
            level: the level of the one-sided test.
        """
        shown = math.nan  # the sample size that shows rare losses
        if 0 < self.unseen < 1:
            shown = items * math.log(level) / math.log(self.unseen)
        if math.isinf(self.correction) and not self.z:
            return shown if self.no_change else math.nan
        if self.no_change:
            return self._items_of_z(float(ndtri(1 - level)), items)
        if not self.z:
            return math.inf

        # Solve for the size, raised for few items and rare losses
        needed = float(ndtri(1 - level) + ndtri(POWER))
        count = max(self._items_of_z(needed, items), FEWEST)
        if math.isfinite(shown) and self.z < 0:
            count = max(count, shown)
        return count

    def _items_of_z(self, needed: float, items: int) -> float:
        """Return the sample size at which |z| exceeds the correction by `needed`.

        An infinite correction counts as 0.
        """
        # Solve for the size: z grows, and the correction shrinks, with the root of the sample size
        z = abs(self.z)
        correction = 0.0
        if math.isfinite(self.correction):
            correction = self.correction
        return items * ((needed + math.sqrt(needed**2 + 4 * z * correction)) / (2 * z)) ** 2

    @classmethod
    def student(
        cls, excess: float, error: float, items: float, skewness: float | None = None
    ) -> Self:
        """Return the margin of a mean loss with an estimated standard error.

        Student's t with items - 1 degrees of freedom becomes the z of the same probability. Without
        spread or a second item, the margin is unknown, because the items give no information about
        others. Fewer than `FEWEST` items decide nothing.

        Args:
            excess: the mean loss minus the limit.
            error: the standard error of the mean loss.
            items: the effective number of independent items.
            skewness: the skewness of the items, for which t is corrected (`correct_skewness`); None
                for no correction. A sample without the largest losses has too little skewness. The
                test of a pass therefore assumes at least `LEAST_SKEWNESS`, or less with fewer than
                50 items.
        """
        if not error > ROUNDING * abs(excess) or items < 2:  # holds for NaN, too
            return cls(0.0, math.inf)

        # A low z tests a fail, and a high z, with more skewness, a pass
        t = excess / error
        low = high = _to_z(t, items)
        if skewness is not None:
            of_mean = skewness / math.sqrt(items)
            least = LEAST_SKEWNESS / math.sqrt(max(items, 50))
            low = _to_z(correct_skewness(t, of_mean), items)
            high = _to_z(correct_skewness(t, max(of_mean, least)), items)
        if items < FEWEST:
            return cls((low + high) / 2, math.inf)
        return cls((low + high) / 2, (high - low) / 2)

    @classmethod
    def of_mean(cls, excess: Values, skewed: bool = False) -> Self:
        """Return the margin of a mean loss, from each item's excess over the limit [n].

        Args:
            skewed: whether to correct for the items' skewness.
        """
        items = len(excess)
        error = 0.0
        if items > 1:
            error = float(excess.std(ddof=1)) / math.sqrt(items)
        skewness = find_skewness(excess) if skewed else None
        return cls.student(float(excess.mean()), error, items, skewness)

    def with_rare_losses(self, loss: float, limit: float, items: float) -> Self:
        """Return the margin that allows for rare losses which no item of the sample shows.

        Items that change a little say nothing about a few others that lose all. A sample of such
        items must not prove more than a sample without any change (see `unchanged`), or a worse
        model would pass more easily. After a measured gain, more rare items must lose all before
        the mean loss reaches the limit.

        Args:
            loss: the measured mean loss.
            items: the effective number of independent items.
        """
        share = limit - min(loss, 0.0)
        return replace(self, unseen=(1 - min(max(share, 0.0), 1.0)) ** items)

    @classmethod
    def unchanged(cls, limit: float, items: float) -> Self:
        """Return the margin of independent items of which none has changed.

        If an item's loss is at most 1, a mean loss at the limit means that at least a share `limit`
        of all items changes. The probability that none of n items changes is then at most
        (1 - limit)^n. If this bound is above 5%, the items decide nothing, and the bound gives only
        the sample size that would decide.
        """
        tail = (1 - min(max(limit, 0.0), 1.0)) ** items
        if tail > SIGNIFICANCE:
            return cls(0.0, math.inf, no_change=True, unseen=tail)
        return cls(float(ndtri(max(tail, sys.float_info.min))))


UNKNOWN = Margin(0.0, math.inf)


def _to_z(t: float, items: float) -> float:
    """Return the z with the same probability as Student's t with items - 1 degrees of freedom."""
    tail = float(stdtr(items - 1, -abs(t)))
    return math.copysign(float(ndtri(max(tail, sys.float_info.min))), t)


def find_skewness(values: Values) -> float:
    """Return the skewness of a sample [n]; 0 without spread."""
    spread = float(values.std())
    if not spread:
        return 0.0
    standardized = (values - values.mean()) / spread
    return float((standardized**3).mean())


def correct_skewness(t: float, skewness: float) -> float:
    """Return a t statistic corrected for the skewness of its mean's distribution.

    If few losses are large, a sample without them has both a small mean and a small error, and too
    many such samples would pass. Hall's monotone transformation removes the first-order effect ("On
    the Removal of Skewness by Transformation", Journal of the Royal Statistical Society B 54,
    1992): t + skewness * (t^2 / 3 + 1 / 6) + skewness^2 * t^3 / 27. The last term makes the result
    increase with t, but undoes the correction if a large skewness has the opposite sign of t. Such
    a skewness is therefore limited to the value with the largest correction. The result is then a
    quarter of a large t, and 0.16 t at t = 3.
    """
    first = t**2 / 3 + 1 / 6
    cube = abs(t) ** 3
    if t * skewness < 0 and abs(skewness) * cube > 13.5 * first:
        skewness = math.copysign(13.5 * first / cube, skewness)
    return t + skewness * first + skewness**2 * t**3 / 27


def tango(lost: float, won: float, total: int, limit: float) -> Margin:
    """Return the margin of a paired loss of hits, by the score test.

    Tango, "Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design", Statistics in Medicine 17, 1998. The margin is corrected for continuity;
    otherwise, good models with few flips would fail more often than the level allows.

    Args:
        lost: the number of items, out of `total`, that only the other model gets right.
        won: the number of items that only this model gets right.
        limit: the limit of the loss, a fraction between -1 and 1.
    """
    # Compute the most likely probability of a won item if the loss is the limit
    linear = (2 * total - lost + won) * limit - lost - won
    product = -won * limit * (1 - limit)
    most_likely = (math.sqrt(max(linear**2 - 8 * total * product, 0.0)) - linear) / (4 * total)
    error = math.sqrt(max(total * (2 * most_likely + limit * (1 - limit)), 0.0))
    if error == 0:
        return UNKNOWN
    return Margin((lost - won - total * limit) / error, 0.5 / error, lost == won == 0)


def tango_interval(hits: NDArray[np.bool_], other_hits: NDArray[np.bool_]) -> Interval:
    """Return the 95% interval of the paired difference of two proportions, first minus second.

    The interval contains the differences that the score test of `tango` does not reject.

    Args:
        hits, other_hits: whether each model gets each sample right [n].
    """
    ours, theirs = flips(hits, other_hits)
    low, high = invert(lambda limit: tango(ours, theirs, len(hits), limit))
    delta = (ours - theirs) / len(hits)  # included, as rounding would exclude it at -1 and 1
    return min(low, delta), max(high, delta)


def invert(margin: Callable[[float], Margin]) -> Interval:
    """Return the 95% interval of a loss between -1 and 1.

    The interval contains the limits from which the loss does not differ significantly.

    Args:
        margin: returns the margin of the loss over a limit.
    """
    low = find_edge(lambda limit: margin(limit).p_beyond > PART)
    return low, find_edge(lambda limit: margin(limit).p_within <= PART)


def find_edge(above: Callable[[float], bool]) -> float:
    """Return the smallest loss between -1 and 1 at which a condition holds, by bisection.

    Args:
        above: the condition, which also holds for every larger loss; if it never holds, the result
            is 1.
    """
    low = -1.0
    high = 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if above(middle):
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True)
class CrossedMean:
    """The mean of values by sample and draw, such as losses by sample and calibration draw.

    Attributes:
        error: the standard error over samples and draws.
        sample_error, draw_error: the standard errors over samples with fixed draws, and over draws
            with fixed samples.
        freedom: the degrees of freedom of `error`.
    """

    mean: float
    error: float
    sample_error: float
    draw_error: float
    freedom: float
    samples: int

    @property
    def interval(self) -> Interval:
        """95% interval, by Student's distribution."""
        half = float(stdtrit(self.freedom, 1 - PART)) * self.error
        return self.mean - half, self.mean + half

    def margin(self, limit: float) -> Margin:
        """Return the margin of the mean loss over a limit, corrected by at least half a sample.

        Without this correction for continuity, up to 6.1% of the recipes at the limit pass in a
        simulation, because few losses also mean a small error (studies/decisions.md).
        """
        margin = Margin.student(self.mean - limit, self.error, self.freedom + 1)
        half = math.inf
        if self.error:
            half = 0.5 / self.samples / self.error
        return replace(margin, correction=max(margin.correction, half))


def crossed_mean(values: Values) -> CrossedMean:
    """Return the mean of values [draws, samples], with its standard errors.

    The model is two-way random effects without replication. The variance of the mean is the part of
    the samples, plus that of the draws, minus the residual that both parts contain (Searle, Casella
    and McCulloch, Variance Components, 1992, ch. 4). It is at least the larger of the two parts.
    The degrees of freedom follow Satterthwaite ("An Approximate Distribution of Estimates of
    Variance Components", Biometrics Bulletin 2, 1946).

    Args:
        values: two draws and two samples, or more.
    """
    draws, samples = values.shape
    mean = float(values.mean())
    by_sample = values.mean(axis=0)
    by_draw = values.mean(axis=1)

    # Split the variance of the mean into parts of samples, draws and residual
    rest = values - by_sample - by_draw[:, np.newaxis] + mean
    rest_freedom = (samples - 1) * (draws - 1)
    of_samples = float(by_sample.var(ddof=1)) / samples
    of_draws = float(by_draw.var(ddof=1)) / draws
    shared = float((rest**2).sum()) / rest_freedom / (samples * draws)
    variance = max(of_samples + of_draws - shared, of_samples, of_draws)

    # Find Satterthwaite's degrees of freedom
    weights = of_samples**2 / (samples - 1) + of_draws**2 / (draws - 1) + shared**2 / rest_freedom
    freedom = float(draws - 1)
    if weights > 0:
        freedom = variance**2 / weights
    return CrossedMean(
        mean,
        error=math.sqrt(variance),
        sample_error=math.sqrt(of_samples),
        draw_error=math.sqrt(of_draws),
        freedom=freedom,
        samples=samples,
    )


@dataclass(frozen=True)
class Auc:
    """The area under the ROC curve, and the components of DeLong's variance.

    Attributes:
        value: the probability that a positive scores above a negative; ties count half.
        of_positives: the same probability for each positive [p] against all negatives.
        of_negatives: the same probability for each negative [n] against all positives.
    """

    value: float
    of_positives: Values
    of_negatives: Values

    @property
    def interval(self) -> Interval:
        """95% interval by DeLong's variance, within 0 and 1."""
        half_width = Z95 * self._error
        return max(self.value - half_width, 0.0), min(self.value + half_width, 1.0)

    @property
    def least(self) -> float:
        """The one-sided 95% lower bound of the AUC."""
        return self.value - float(ndtri(1 - SIGNIFICANCE)) * self._error

    @property
    def _error(self) -> float:
        return math.sqrt(_variance(self.of_positives) + _variance(self.of_negatives))


def auc(scores: NDArray[np.floating], positive: NDArray[np.bool_]) -> Auc:
    """Return the AUC of scores [n].

    Ranks give the AUC and its components (Sun and Xu, "Fast Implementation of DeLong's Algorithm
    for Comparing the Areas Under Correlated Receiver Operating Characteristic Curves", IEEE Signal
    Processing Letters 21, 2014).

    Args:
        positive: whether each sample is positive [n]; positives and negatives must both occur.
    """
    positives = scores[positive]
    negatives = scores[~positive]
    both = _midranks(np.concatenate([positives, negatives]))
    above = (both[: len(positives)] - _midranks(positives)) / len(negatives)
    below = 1 - (both[len(positives) :] - _midranks(negatives)) / len(positives)
    return Auc(float(above.mean()), above, below)


def _midranks(values: NDArray[np.floating]) -> Values:
    """Return the ranks, counted from 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _variance(components: Values) -> float:
    """Return the variance of the mean of components; 0 for a single component."""
    if len(components) < 2:
        return 0.0
    return float(components.var(ddof=1)) / len(components)


def delong(ours: Auc, theirs: Auc) -> tuple[Interval, float]:
    """Return the 95% interval and the p-value of the difference of two AUCs, ours minus theirs.

    Both AUCs are of the same samples.

    DeLong, DeLong and Clarke-Pearson, "Comparing the Areas under Two or More Correlated Receiver
    Operating Characteristic Curves: A Nonparametric Approach", Biometrics 44, 1988. The test is
    two-sided. Without spread, the p-value is 1 for equal AUCs and 0 for others.
    """
    difference = ours.value - theirs.value
    error = delong_error(ours, theirs)
    if error == 0:
        return (difference, difference), float(difference == 0)
    half_width = Z95 * error
    p_value = 2 * float(ndtr(-abs(difference) / error))
    return (difference - half_width, difference + half_width), p_value


def delong_error(ours: Auc, theirs: Auc) -> float:
    """Return the standard error of the difference of two AUCs on the same samples, see `delong`."""
    variance = _variance(ours.of_positives - theirs.of_positives)
    return math.sqrt(variance + _variance(ours.of_negatives - theirs.of_negatives))


def delong_skewness(ours: Auc, theirs: Auc) -> float:
    """Return the skewness of the difference of two AUCs, ours minus theirs; 0 without spread.

    The error of the difference is about the sum of two independent means, one over the positives
    and one over the negatives. Their third cumulants add up.
    """
    error = delong_error(ours, theirs)
    if error == 0:
        return 0.0

    # Add the third cumulants of both means
    third = 0.0
    for own, other in (
        (ours.of_positives, theirs.of_positives),
        (ours.of_negatives, theirs.of_negatives),
    ):
        changes = own - other
        centred = changes - changes.mean()
        third += float((centred**3).mean()) / len(changes) ** 2
    return third / error**3


def ratio_interval(values: Values, weights: Values) -> Interval | None:
    """Return the 95% interval of sum(values) / sum(weights) over items [n].

    The result is None with fewer than two items, or if the weights sum to 0.

    The interval uses the linearized variance of a ratio estimator (Cochran, Sampling Techniques,
    1977, 6.4) and Student's distribution.
    """
    items = len(values)
    total = float(weights.sum())
    if items < 2 or total == 0:
        return None
    ratio = float(values.sum()) / total
    error = float((values - ratio * weights).std(ddof=1)) * math.sqrt(items) / total
    half = float(stdtrit(items - 1, 1 - PART)) * error
    return ratio - half, ratio + half


def resample(items: int, times: int) -> Iterator[NDArray[np.int64]]:
    """Yield the item indices [items] of each bootstrap sample, drawn with replacement.

    Every run with this number of items gets the same draws, so the replicates of models are paired.
    """
    random = np.random.default_rng(RESAMPLING_SEED)
    for _ in range(times):
        yield random.integers(0, items, items)


def bootstrap(metric: Callable[[NDArray[np.int64]], float], items: int, times: int) -> Values:
    """Return a metric on every bootstrap sample [times] (Efron, 1979)."""
    draws = resample(items, times)
    replicates = np.empty(times)
    for number in track(range(times), "Scoring bootstrap samples", "samples"):
        replicates[number] = metric(next(draws))
    return replicates


def drop_undefined(replicates: Values) -> Values:
    """Return the finite replicates; none if more than 1% of all are not finite.

    Interval, p-value and margin of a bootstrap use only these replicates.
    """
    defined = replicates[np.isfinite(replicates)]
    if len(defined) < KNOWN * len(replicates):
        return defined[:0]
    return defined


def bootstrap_interval(replicates: Values) -> Interval:
    """Return the 95% percentile interval; NaN if it is unknown, see `drop_undefined`."""
    defined = drop_undefined(replicates)
    if not len(defined):
        return math.nan, math.nan
    low, high = np.quantile(defined, (0.025, 0.975))
    return float(low), float(high)


def bootstrap_margin(excess: Values, items: int, class_counts: Counts | None = None) -> Margin:
    """Return the margin of a loss, with the bootstrap's standard error (Efron, 1979) and skewness.

    Over bootstrap samples of k items, the variance is too small by the factor (k - 1) / k, and the
    skewness is that of an item divided by sqrt(k). In a mean over classes, the factor holds for
    each class of k items. The variance of such a class is assumed proportional to 1 / k. The
    degrees of freedom follow from `count_effective`. Without usable replicates, or with one item in
    each class, the margin is unknown.

    Args:
        excess: the excess of the loss over the limit on every bootstrap sample [times] of `items`;
            not finite for samples without a value, see `drop_undefined`.
        class_counts: the number of items of each class that has items, if the metric is a mean over
            classes; the number of items that count, if only some do; None if all `items` count.
    """
    finite = drop_undefined(excess)
    counts = np.array([items])
    if class_counts is not None:
        counts = class_counts

    # Undo the bootstrap's small variance
    variance = float((1 / counts).sum())
    resampled = float(((counts - 1) / counts**2).sum())
    if not len(finite) or not resampled:
        return UNKNOWN

    # Turn the skewness of the mean into that of an item
    spread = float(finite.std(ddof=1))
    effective = count_effective(items, counts)
    return Margin.student(
        float(finite.mean()),
        spread * math.sqrt(variance / resampled),
        effective,
        find_skewness(finite) * math.sqrt(effective),
    )


def count_effective(items: int, class_counts: Counts) -> float:
    """Return the effective number of items of a mean over classes (Kish, Survey Sampling, 1965).

    This is the number of classes times the harmonic mean of `class_counts`, but at most `items`.
    """
    classes = len(class_counts)
    harmonic_mean = classes / float((1 / class_counts).sum())
    return min(classes * harmonic_mean, items)


def bootstrap_p(differences: Values) -> float:
    """Return the two-sided p-value of a difference from its replicates [times].

    By count, the p-value is twice the smaller share of replicates on one side of 0, at most 1.
    Counts and their total are raised by one, so that a counted p-value is not 0 (Davison and
    Hinkley, Bootstrap Methods and their Application, 1997, 4.11). Without usable replicates, see
    `drop_undefined`, the p-value is 1.

    A count below `COUNTABLE` is imprecise, and its p-value is at least 2 / (replicates + 1), which
    Holm's correction multiplies. The normal distribution therefore continues the tail from the
    replicate of rank `COUNTABLE` on. This requires more than 2 * `COUNTABLE` replicates, with a
    spread.
    """
    finite = drop_undefined(differences)
    below = int((finite <= 0).sum())
    above = int((finite >= 0).sum())
    beyond = min(below, above)
    counted = len(finite) + 1
    by_count = min(1.0, 2 * (beyond + 1) / counted)
    if beyond >= COUNTABLE or len(finite) <= 2 * COUNTABLE:
        return by_count
    error = float(finite.std(ddof=1))
    if not error > 0:
        return by_count

    # Continue by the normal tail from the replicate of that rank on
    tail = finite
    if below > above:
        tail = -finite  # so that nearly all of the tail lies above 0
    edge = float(np.partition(tail, COUNTABLE - 1)[COUNTABLE - 1])
    return 2 * float(ndtr(ndtri((COUNTABLE + 1) / counted) - edge / error))


def holm(p_values: Sequence[float], planned: int = 0) -> list[float]:
    """Return p-values corrected for m comparisons, in the same order.

    The number m is that of the p-values, or `planned` if that is larger. The k-th smallest p-value
    (k = 0, 1, ...) is multiplied by m - k, raised to at least its predecessor, and limited to 1
    (Holm, 1979, in the adjusted form of Wright, 1992).

    >>> holm([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]
    """
    order = np.argsort(p_values)
    count = max(len(order), planned)
    scaled = np.asarray(p_values)[order] * (count - np.arange(len(order)))
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()


def above_chance(labels: NDArray[np.int64], predictions: NDArray[np.int64], classes: int) -> float:
    """Return the one-sided p-value of "the predictions are independent of the labels".

    Chance is the mean share of hits of the same predictions over all orders, as in Cohen's kappa
    ("A coefficient of agreement for nominal scales", 1960). It is 1 / classes for a network that
    predicts all classes equally often. The test uses the normal distribution with the mean and
    variance of the hits over all orders, corrected for continuity. If all predictions are equal,
    but not all labels, the p-value is 1.

    If all labels are equal, the order has no effect. Chance is then guessing among equally likely
    classes, and the test is binomial.
    """
    total = len(labels)
    hits = int((labels == predictions).sum())
    true = np.bincount(labels, minlength=classes).astype(np.float64)
    said = np.bincount(predictions, minlength=classes).astype(np.float64)
    if true.max() == total:
        return binomial_tail(hits, total, 1 / classes)

    # Compare with the mean and variance of the hits over all orders
    both = true * said
    mean = both.sum() / total
    variance = (both.sum() - (both * (true + said)).sum() / total + mean**2) / (total - 1)
    if not variance > ROUNDING:
        return 1.0  # the network always predicts one class
    return float(ndtr((mean - hits + 0.5) / math.sqrt(variance)))


LEAST_KAPPA = 0.05  # with many samples, even a network with wrong inputs is proven above chance


def kappa(labels: NDArray[np.int64], predictions: NDArray[np.int64], classes: int) -> float:
    """Return Cohen's kappa: the share of the mistakes of chance that the predictions avoid.

    `above_chance` defines chance. The result is negative if the predictions make more mistakes than
    chance, and 1 if chance makes none.
    """
    total = len(labels)
    true = np.bincount(labels, minlength=classes) / total
    said = np.bincount(predictions, minlength=classes) / total
    by_chance = float(true @ said)
    if true.max() == 1:  # chance is guessing, see `above_chance`
        by_chance = 1 / classes
    if by_chance == 1:
        return 1.0
    hits = float((labels == predictions).mean())
    return (hits - by_chance) / (1 - by_chance)


def binomial_tail(hits: int, total: int, chance: float) -> float:
    """Return the probability of at least `hits` hits in `total` trials with this chance of a hit.

    P(X >= k) of a binomial distribution is I_p(k, n - k + 1) (Abramowitz and Stegun, 1964,
    26.5.24).
    """
    if not hits:
        return 1.0
    return float(betainc(hits, total - hits + 1, chance))


def round_size(count: float) -> int:
    """Round a sample size to two leading digits, the precision of the estimate.

    >>> round_size(12_345), round_size(5.9)
    (12000, 6)
    """
    return int(round(count, min(0, 2 - len(str(int(count))))))
