"""A group-sequential test of the loss of hits, which may decide after a part of the samples.

Samples are scored in blocks. After each block, at an interim or the last analysis, two one-sided
tests compare the paired loss with a limit, by Tango's score statistic (`statistics.tango`). One
proves that the loss is within the limit, the other that it is beyond. The level of each test is
spent over the analyses by the O'Brien-Fleming type function of Lan and DeMets, "Discrete sequential
boundaries for clinical trials", Biometrika 70, 1983, which spends little at the first analyses. The
bounds are computed by the recursive integration of Armitage, McPherson and Rowe, "Repeated
significance tests on accumulating data", JRSS A 132, 1969. The bounds do not assume a stop by the
other test or for futility, so each error rate keeps to its level even if such a stop is ignored.

P-values, intervals and estimates after the stop use the stage-wise ordering: a stop is stronger
evidence for its side than a later stop (Tsiatis, Rosner and Mehta, "Exact confidence intervals
following a group sequential test", Biometrics 40, 1984).
"""

import math
import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from resnet8ptq.tasks.scoring.statistics import UNKNOWN, Interval, Margin, find_edge, invert, tango

ANALYSES = 20
# The reasons to end scoring
PASS = "pass"
FAIL = "fail"
FUTILE = "undecided"
HOPE = 0.1  # least predicted probability of a decision, below which scoring ends
FARTHEST = 8.0  # range of the integration, in standard deviations of a path
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)

Floats = NDArray[np.float64]


def spend(fraction: float, level: float) -> float:
    """Return the part of a one-sided level that is spent up to a fraction of the planned samples.

    >>> [round(spend(fraction, 0.05), 4) for fraction in (0.25, 0.5, 1.0)]
    [0.0001, 0.0056, 0.05]
    """
    return 2 * float(ndtr(ndtri(level / 2) / math.sqrt(fraction)))


@lru_cache(maxsize=256)
def find_bounds(fractions: tuple[float, ...], level: float) -> tuple[float, ...]:
    """Return the critical value of a one-sided test at each analysis, in standard errors.

    Args:
        fractions: the fraction of the planned samples at each analysis, ascending; the last is 1.
        level: the level of the test over all analyses.
    """
    paths = _Paths.start()
    bounds = []
    spent = 0.0
    for fraction in fractions:
        share = spend(fraction, level)
        root = math.sqrt(fraction)
        bound = _solve(paths, fraction, share - spent)

        # Only paths below the bound go on
        paths = paths.step(fraction, -FARTHEST * root, bound * root)
        spent = share
        bounds.append(bound)
    return tuple(bounds)


def _solve(paths: "_Paths", fraction: float, share: float) -> float:
    """Return the bound that paths cross at this analysis with the probability `share`."""
    # Bisect; no share of a test's level lies beyond 40 standard errors
    low = 0.0
    high = 40.0
    root = math.sqrt(fraction)
    for _ in range(60):
        middle = (low + high) / 2
        crossing = paths.above(fraction, middle * root)
        if crossing > share:
            low = middle
        else:
            high = middle
    return high


class _Paths(NamedTuple):
    """The paths of a Brownian motion that have crossed no bound up to an analysis.

    Attributes:
        time: the time of the analysis; the variance is 1 at time 1.
        nodes, mass: the integration nodes [n] and their probability mass [n].
    """

    time: float
    nodes: Floats
    mass: Floats

    @classmethod
    def start(cls) -> Self:
        """Return all paths at time 0."""
        return cls(0.0, np.zeros(1), np.ones(1))

    def above(self, time: float, value: float) -> float:
        """Return the probability that these paths are above a value at a later time."""
        return float(self.mass @ ndtr((self.nodes - value) / math.sqrt(time - self.time)))

    def below(self, time: float, value: float) -> float:
        """Return the probability that these paths are below a value at a later time."""
        return float(self.mass @ ndtr((value - self.nodes) / math.sqrt(time - self.time)))

    def step(self, time: float, low: float, high: float) -> Self:
        """Return those of the paths that are between two values at a later time."""
        reach = FARTHEST * math.sqrt(time)
        low = max(low, -reach)
        high = min(high, reach)
        half = max(high - low, 0.0) / 2
        deviation = math.sqrt(time - self.time)
        nodes = (low + high) / 2 + half * _NODES
        away = (nodes[:, np.newaxis] - self.nodes) / deviation
        density = np.exp(-(away**2) / 2) @ self.mass / (deviation * math.sqrt(2 * math.pi))
        return type(self)(time, nodes, density * half * _WEIGHTS)


@dataclass(frozen=True)
class StoppingPlan:
    """A sequential test, planned before the first sample is scored.

    Attributes:
        total: the number of planned samples, which are in random order.
        limit: the largest accepted loss.
        level: the level of each one-sided test.
    """

    total: int
    limit: float
    level: float

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The number of samples up to each analysis."""
        count = min(ANALYSES, self.total)
        return tuple(round(self.total * number / count) for number in range(1, count + 1))

    @property
    def bounds(self) -> tuple[float, ...]:
        """The critical values at each analysis, see `find_bounds`."""
        return find_bounds(tuple(end / self.total for end in self.ends), self.level)

    def outcome(self, lost: int, won: int, seen: int) -> str:
        """Return the reason to stop scoring: `PASS`, `FAIL` or `FUTILE`; empty to continue.

        Args:
            lost, won: the numbers of samples that only the baseline or only the model gets right.
            seen: the number of scored samples, one of `ends`.
        """
        margin = tango(lost, won, seen, self.limit)
        level = float(ndtr(-self.bounds[self.ends.index(seen)]))
        if margin.p_within <= level:
            return PASS
        if margin.p_beyond <= level:
            return FAIL
        if seen == self.total or self._hope(margin.z, seen) < HOPE:
            return FUTILE
        return ""

    def _hope(self, z: float, seen: int) -> float:
        """Return the predicted probability of a decision after all planned samples.

        This is the predictive power of Spiegelhalter, Freedman and Blackburn, "Monitoring clinical
        trials: conditional or predictive power?", Controlled Clinical Trials 7, 1986, with a flat
        prior.
        """
        time = seen / self.total
        last = self.bounds[-1]
        expected = z / math.sqrt(time)
        deviation = math.sqrt((1 - time) / time)
        near = float(ndtr((abs(expected) - last) / deviation))
        opposite = float(ndtr((-abs(expected) - last) / deviation))
        return near + opposite

    def margin(self, lost: int, won: int, seen: int, loss: float) -> Margin:
        """Return the margin of the measured loss over `loss`, corrected for interim analyses.

        At the first analysis, the p-values are those of `tango`. If `tango` gives an unknown
        margin, for `loss` or for the limit, the result is unknown, too.
        """
        now = tango(lost, won, seen, loss)
        at_limit = tango(lost, won, seen, self.limit)
        if UNKNOWN in (now, at_limit):
            return UNKNOWN

        # The correction is half a sample in standard errors, so it gives the error in samples
        scale = now.correction / at_limit.correction
        error = 0.5 / now.correction

        # Add the probabilities of a stop at an earlier analysis to those of the last one
        within = beyond = 0.0
        paths = _Paths.start()
        for end, bound in zip(self.ends, self.bounds, strict=True):
            if end == seen:
                break
            time = end / seen
            shift = (self.limit - loss) * seen / error * time
            width = bound * scale * math.sqrt(time)
            within += paths.below(time, shift - width)
            beyond += paths.above(time, shift + width)
            paths = paths.step(time, shift - width, shift + width)
        within += paths.below(1.0, now.z + now.correction)
        beyond += paths.above(1.0, now.z - now.correction)
        return _margin_of(within, beyond)

    def interval(self, lost: int, won: int, seen: int) -> Interval:
        """Return the 95% interval of the loss, by the stage-wise ordering."""
        return invert(lambda loss: self.margin(lost, won, seen, loss))

    def estimate(self, lost: int, won: int, seen: int) -> float:
        """Return the median-unbiased estimate of the loss, by the stage-wise ordering."""
        return find_edge(lambda loss: self.margin(lost, won, seen, loss).z <= 0)


def _margin_of(p_within: float, p_beyond: float) -> Margin:
    """Return the margin with these p-values."""
    within = _to_z(p_within)
    beyond = _to_z(p_beyond)
    return Margin((within - beyond) / 2, (within + beyond) / 2)


def _to_z(p_value: float) -> float:
    """Return the normal quantile of a p-value; also finite for 0 and 1."""
    return float(ndtri(min(max(p_value, sys.float_info.min), 1 - sys.float_info.epsilon)))
