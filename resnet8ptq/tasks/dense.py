"""`task=dense`: a value for each pixel: restored pictures (PSNR, SSIM), or depth (RMSE, delta).

Each metric is the mean of its values for single pictures. SSIM: Wang et al., "Image quality
assessment: from error visibility to structural similarity", 2004. Delta is the share of pixels
whose depth differs from the true depth by a factor below 1.25: Eigen et al., "Depth map prediction
from a single image using a multi-scale deep network", 2014.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import DenseConfig
from resnet8ptq.core.errors import DataError, ModelError
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP, BootstrapScores, mean_of
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import (
    Array,
    Outputs,
    Targets,
    TaskContext,
    check_labels,
    describe,
)
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, Margin, Values
from resnet8ptq.tasks.task import Task, TaskFiles, TaskType, keep_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = {
    "psnr": Metric("psnr", "PSNR dB", bounded=False),
    "ssim": Metric("ssim", "SSIM"),
    "rmse": Metric("rmse", "RMSE", maximize=False, bounded=False),
    "delta": Metric("delta", "delta < 1.25", percent=True),
}
PAIRS = (("psnr", "ssim"), ("rmse", "delta"))
MOST_DB = 100.0  # stands for the infinite PSNR of an exact picture
RADIUS = 5  # pixels of SSIM's window around its centre
PICTURES = "restored.png"

Maps = NDArray[np.float64]


@dataclass(frozen=True)
class DenseScores(BootstrapScores):
    """The metric of each picture, with the targets.

    Attributes:
        targets: maps with the axes of the outputs, [n, height, width] or with channels.
        scale: the factor from the unit of the targets to that of the outputs.
        measure: returns the primary metric of a picture, from values and target.
    """

    targets: Array | None = None
    scale: float = 1.0
    measure: Callable[[Maps, Maps], float] | None = None

    @property
    def of_mean_target(self) -> Values:
        """The metric of each picture [n] for a network that always predicts the mean target."""
        assert self.targets is not None and self.measure is not None  # `_score` sets both
        mean = self.targets.mean(axis=0, dtype=np.float64) * self.scale
        measured = []
        for true in self.targets:
            measured.append(self.measure(mean, true * self.scale))
        return np.array(measured)


def build(primary: str = "psnr", peak: float = 1.0, resamples: int = 9999) -> Task:
    """Return `task=dense` with these settings.

    Args:
        primary: a key of `METRICS`.
        peak: the largest value of a pixel, for PSNR and SSIM; targets in uint8 are scaled to it.
    """
    [pair] = [pair for pair in PAIRS if primary in pair]
    others = [METRICS[name] for name in pair if name != primary]
    return Task(
        "dense",
        METRICS[primary],
        partial(_score, primary, pair, peak, resamples),
        replace(BOOTSTRAP, intervals=f"{BOOTSTRAP.intervals} over the pictures"),
        beside=tuple(others),
        files=TaskFiles(
            arrays=partial(keep_values, attrgetter("per_item")),
            figures=_draw,
            captions={PICTURES: "Pictures that changed most: target, FP32, quantized"},
        ),
        doubt=partial(_doubt, METRICS[primary]),
    )


def _score(
    primary: str,
    pair: tuple[str, ...],
    peak: float,
    resamples: int,
    outputs: Outputs,
    targets: Targets,
) -> DenseScores:
    [values] = outputs.values
    exact = np.asarray(targets.labels)
    scale = peak / 255 if exact.dtype == np.uint8 else 1.0
    exact = _arrange(exact, values.shape)

    # Measure each picture by both metrics of the pair
    measured = {name: np.empty(len(values)) for name in pair}
    for index, (said, true) in enumerate(zip(values, exact, strict=True)):
        for name in pair:
            measured[name][index] = _measure(name, said.astype(np.float64), true * scale, peak)

    # The bootstrap needs only the primary metric of each picture
    per_item = measured.pop(primary)
    others: Metrics = {name: float(values.mean()) for name, values in measured.items()}
    return DenseScores(
        outputs,
        mean_of(per_item),
        resamples,
        per_item,
        others=others,
        targets=exact,
        scale=scale,
        measure=partial(_measure, primary, peak=peak),
    )


def _arrange(targets: Array, shape: tuple[int, ...]) -> Array:
    """Return targets with the axes of the outputs.

    Targets of another shape than the outputs have their channels last, or none.
    """
    if targets.ndim == 4 and len(shape) == 4 and targets.shape != shape:
        targets = np.moveaxis(targets, 3, 1)
    return targets.reshape(shape)


def _measure(name: str, said: Maps, true: Maps, peak: float) -> float:
    """Return a metric of one picture.

    The metrics of depth use only pixels with a true depth above 0.

    Raises:
        DataError: the metric is one of depth, and no pixel has a true depth above 0.
    """
    if name == "ssim":
        return ssim(said.clip(0, peak) / peak, true / peak)
    if name == "psnr":
        error = float(((said.clip(0, peak) - true) ** 2).mean()) / peak**2
        if error == 0:
            return MOST_DB
        return float(np.minimum(MOST_DB, -10 * np.log10(error)))  # NaN stays NaN, unlike by min

    # The metrics of depth
    known = true > 0
    if not known.any():
        raise DataError("task=dense: a target has no depth above 0; expected one in each picture")
    if name == "rmse":
        return float(np.sqrt(((said - true)[known] ** 2).mean()))
    ratio = np.maximum(said, 1e-9)[known] / true[known]
    return float((np.maximum(ratio, 1 / ratio) < 1.25).mean())


def ssim(one: Maps, other: Maps) -> float:
    """Return the SSIM of two pictures of values from 0 to 1, the mean over positions and channels.

    The window is a Gaussian of 11 pixels with a standard deviation of 1.5. As in Wang's program,
    only positions count at which the window fits into the picture. The two longest axes are height
    and width.
    """
    from scipy.ndimage import correlate1d  # takes a moment to import

    # The window is separable, so each axis is blurred alone
    weights = np.exp(-(np.arange(-RADIUS, RADIUS + 1) ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    axes = np.argsort(one.shape, kind="stable")[-2:].tolist()  # without the axis of the channels
    inside = [slice(None)] * one.ndim
    for axis in axes:
        inside[axis] = slice(RADIUS, one.shape[axis] - RADIUS)

    def blur(values: Maps) -> Maps:
        for axis in axes:
            values = correlate1d(values, weights, axis=axis)
        return values[tuple(inside)]

    # Compute means, variances and covariance in the window around each pixel
    mean = blur(one)
    other_mean = blur(other)
    variance = blur(one * one) - mean * mean
    other_variance = blur(other * other) - other_mean * other_mean
    covariance = blur(one * other) - mean * other_mean

    # The constants of the paper keep the quotient finite in flat windows
    first = 0.01**2
    second = 0.03**2
    above = (2 * mean * other_mean + first) * (2 * covariance + second)
    below = (mean**2 + other_mean**2 + first) * (variance + other_variance + second)
    return float((above / below).mean())


def _doubt(metric: Metric, baseline: DenseScores, expected: float | None) -> str | None:
    """Return a doubt if FP32 is not proven better than predicting the mean of the targets.

    If both are equal for every picture, no doubt is returned.
    """
    values = baseline.per_item
    assert values is not None  # `_score` sets it
    of_mean = baseline.of_mean_target
    worse: Values = np.asarray([metric.cost(value) for value in values - of_mean])
    if not worse.any() or Margin.of_mean(worse).p_within <= SIGNIFICANCE:
        return None
    shown = metric.show(float(of_mean.mean()))
    return f"NO BETTER THAN THE MEAN, {metric.show(baseline.value)} (of the mean {shown})"


def _draw(comparison: Comparison, title: str) -> "dict[str, Figure]":
    from resnet8ptq.tasks import dense_plot

    return {PICTURES: dense_plot.draw(comparison, title)}


def _make(config: DenseConfig, context: TaskContext) -> Task:
    check_labels("dense", context, "fu", "pictures, or a value for each pixel [N, height, width]")
    shapes = list(context.outputs.values())
    labels = np.asarray(context.labels)[:1]

    # The outputs may have a channel axis more or less, first or last
    true = labels.shape[1:]
    accepted = {true, (*true, 1), (1, *true), (*true[2:], *true[:2])}
    if true[2:] == (1,):
        accepted.add(true[:2])
    if len(true) < 2 or len(shapes) != 1 or not _may_be(shapes[0], accepted):
        raise ModelError(
            f"returns {describe(context.outputs)}, and {context.data} has targets {list(true)}; "
            "task=dense expects one output of their size"
        )

    # SSIM needs a whole window
    if min(sorted(true)[-2:]) <= 2 * RADIUS and config.primary in PAIRS[0]:
        raise ModelError(f"returns {describe(context.outputs)}; SSIM needs more than 10 pixels")
    return build(config.primary, config.peak, config.resamples)


def _may_be(shape: Sequence[int | None], accepted: Iterable[Sequence[int]]) -> bool:
    """Return whether an output may have one of these shapes; the size of a free axis is None."""
    for sizes in accepted:
        if len(sizes) != len(shape):
            continue
        fits = [size in (None, other) for size, other in zip(shape, sizes, strict=True)]
        if all(fits):
            return True
    return False


DENSE = TaskType(
    make=_make,
    recall=lambda config, class_names: build(config.primary, config.peak, config.resamples),
    schema=DenseConfig,
)
