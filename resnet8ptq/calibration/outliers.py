"""Finds calibration samples with far larger values than all others, such as damaged ones.

Such a sample sets the range of a tensor, and 8 bits leave few levels for the other samples.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core.console import warn_once
from resnet8ptq.core.records import feed
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.lazy import AT_ONCE

log = logging.getLogger(__name__)

RATIO = 16.0  # ratio to the largest other sample, at which the others lose four of eight bits
MOST = 0.05  # largest share of outliers; more are a normal kind, such as padded texts
LEAST = 10  # least number of samples to compare, without those of zeros
LISTED = 5  # samples that a message names
_CUT = 3  # the suggested percentile cuts this multiple of the outliers' share, half on each side
_LEAST_PERCENTILE = 99.0  # a smaller percentile would clip the other samples
_RESOLVED = 1000.0  # a larger ratio leaves the others in a few bins of a histogram

Peaks = NDArray[np.floating]  # the largest magnitude of each sample [N]


@dataclass(frozen=True)
class Outliers:
    """Samples that stand out in a tensor.

    Attributes:
        tensor: the ONNX name of the tensor.
        samples: indices in the calibration samples, the largest value first.
        ratio: the smallest peak of `samples` to the largest of all others; infinite if all peaks of
            `samples` are NaN or infinite.
        total: number of calibration samples.
    """

    tensor: str
    samples: Sequence[int]
    ratio: float
    total: int

    def describe(self, samples: Split) -> str:
        """Return a text that names the tensor and the first `LISTED` samples."""
        named = [samples.name_of(index) for index in self.samples[:LISTED]]
        more = len(self.samples) - len(named)
        listed = ", ".join(named)
        if more:
            listed += f" and {more} more"
        if math.isinf(self.ratio):
            return f"{self.tensor} is NaN or infinite in {listed}, unlike in the other samples"
        return (
            f"{self.tensor} is at least {self.ratio:,.0f} times as large in {listed} as in the "
            f"{self.total - len(self.samples)} other calibration samples"
        )

    def clip(self, calib: CalibConfig) -> str:
        """Return settings, as text, that clip these samples: a percentile for `calib=percentile`.

        The text is empty if `calib` has such a percentile already, if a percentile would clip many
        other samples, or if the ratio is too large for the bins of a histogram.
        """
        percentile = 100 - 100 * _CUT * len(self.samples) / self.total
        clips = calib.name == "percentile" and calib.percentile <= percentile
        if clips or percentile < _LEAST_PERCENTILE or self.ratio > _RESOLVED:
            return ""
        return f"calib=percentile calib.percentile={math.floor(100 * percentile) / 100:g}"

    def mend(self, calib: CalibConfig) -> str:
        """Return the mend as text: remove damaged samples, or use the settings of `clip`."""
        which = "this sample" if len(self.samples) == 1 else "these samples"
        mend = f"remove {which} if damaged"
        clip = self.clip(calib)
        if clip:
            mend += f", or try {clip}"
        return mend

    def warn(self, samples: Split, calib: CalibConfig) -> None:
        """Warn about these samples, once in a process."""
        warn_once(log, "calibration: %s; %s", self.describe(samples), self.mend(calib))


def find_outliers(tensor: str, peaks: Peaks) -> Outliers | None:
    """Return the samples that exceed all others by a factor of `RATIO`; None if there are none.

    Outliers lie above a gap between the sorted peaks, so a heavy tail, which decreases step by
    step, has none. Samples of zeros, such as black pictures, are not compared. With fewer than
    `LEAST` compared samples, there are no outliers. At most the share `MOST` of the compared
    samples, or one sample, can be outliers.
    """
    sizes = np.where(np.isfinite(peaks), peaks, np.inf).astype(np.float64)
    order = np.argsort(-sizes, kind="stable")
    descending = sizes[order]
    filled = int(np.count_nonzero(descending))  # samples of zeros have no scale
    most = min(max(1, int(MOST * filled)), filled - 1)
    if filled < LEAST:
        return None

    # Find the last large gap between neighbours
    with np.errstate(invalid="ignore", over="ignore"):  # two infinite neighbours give NaN
        ratios = descending[:most] / descending[1 : most + 1]
    gaps = np.flatnonzero(ratios >= RATIO)
    if not gaps.size:
        return None
    count = int(gaps[-1]) + 1
    samples = tuple(order[:count].tolist())
    return Outliers(tensor, samples, ratio=float(ratios[count - 1]), total=len(peaks))


def find_in_inputs(samples: Split, names: list[str]) -> Iterator[Outliers]:
    """Yield the samples that stand out in a float input of the network.

    This reads the samples without running a network, so every backend can use it. Samples in uint8
    are left out, because their values are at most 255.

    Args:
        names: the network's inputs.
    """
    if samples.stored.dtype == np.uint8:
        return
    peaks: dict[str, list[Peaks]] = {}
    for start in range(0, len(samples), AT_ONCE):
        batch = samples.inputs(slice(start, start + AT_ONCE))
        for name, values in feed(batch, names).items():
            if values.dtype.kind == "f":
                peaks.setdefault(name, []).append(peak_of_each(values))
    for name, parts in peaks.items():
        outliers = find_outliers(name, np.concatenate(parts))
        if outliers is not None:
            yield outliers


def peak_of_each(values: NDArray[np.floating]) -> Peaks:
    """Return the largest magnitude of each sample in values [n, ...]; NaN if any is NaN."""
    rows = values.reshape(len(values), -1)
    return np.maximum(-rows.min(axis=1, initial=0), rows.max(axis=1, initial=0))
