"""`task=segmentation`: the class of each pixel, scored by the mean IoU of the classes.

The counts of all pictures are pooled, and the mean is over the classes that the masks contain, as
in PASCAL VOC (Everingham et al., 2015) and Cityscapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import SegmentationConfig
from resnet8ptq.core.errors import ConfigError, ModelError
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP
from resnet8ptq.tasks.scoring.classwise import (
    CLASSES,
    ClasswiseScores,
    count_lost,
    draw_classes,
    draw_weights,
    list_classes,
)
from resnet8ptq.tasks.scoring.comparison import Comparison, doubt_below, summarize
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Array, Outputs, Targets, TaskContext, describe
from resnet8ptq.tasks.scoring.statistics import Values
from resnet8ptq.tasks.task import Scope, Task, TaskFiles, TaskType, keep_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIOU = Metric("miou", "mIoU", percent=True)
PIXEL_ACCURACY = Metric("pixel_accuracy", "pixel accuracy", percent=True)
PICTURES = "masks.png"

Masks = NDArray[np.uint8]


@dataclass(frozen=True)
class MaskDecoder:
    """Turns a batch's outputs into the class of each pixel.

    Attributes:
        output: the index of the output.
        axis: the axis of the classes in one sample of the output; None for [height, width].
        classes: the number of classes.
        size: height and width of the masks.
        threshold: of two classes with one float for each pixel, the second is predicted above this
            value.
    """

    output: int
    axis: int | None
    classes: int
    size: tuple[int, int]
    threshold: float

    def __call__(self, outputs: Sequence[Array], inputs: Array | None = None) -> tuple[Masks]:
        """Return the class of each pixel [n, *size]."""
        values = outputs[self.output]
        wide = values[:, np.newaxis]
        if self.axis is not None:
            wide = np.moveaxis(values, self.axis + 1, 1)

        # Maps of another size are resized: classes to the nearest, scores bilinearly
        height, width = wide.shape[2:]
        rows = _resize(height, self.size[0])
        columns = _resize(width, self.size[1])
        # The output holds classes, as that of an ArgMax
        if wide.shape[1] == 1 and (wide.dtype.kind in "iu" or self.classes > 2):
            nearest = wide[:, 0, rows.argmax(1)[:, np.newaxis], columns.argmax(1)]
            return (nearest.round().clip(0, 255).astype(np.uint8),)
        classes = np.empty((len(wide), *self.size), np.uint8)
        for picture, scores in zip(classes, wide, strict=True):  # one at a time, to save memory
            if (height, width) != self.size:
                scores = rows @ scores @ columns.T
            if len(scores) == 1:
                picture[:] = scores[0] > self.threshold
            else:
                picture[:] = scores.argmax(axis=0).clip(0, 255)
        return (classes,)


def _resize(old: int, new: int) -> NDArray[np.float32]:
    """Return the matrix [new, old] that resizes one axis linearly, between the centres of pixels.

    Applied to both axes, the result equals that of torch's `interpolate` with `mode="bilinear"` and
    that of `tf.image.resize`.
    """
    positions = ((np.arange(new) + 0.5) * old / new - 0.5).clip(0, old - 1)
    distances = np.abs(positions[:, np.newaxis] - np.arange(old))
    return np.maximum(0, 1 - distances).astype(np.float32)


@dataclass(frozen=True)
class SegmentationScores(ClasswiseScores):
    """The classes of pixels that one model predicts, and the true masks.

    Attributes:
        outputs: predicted classes [n, height, width], see `MaskDecoder`.
        masks: the true masks [n, height, width].
        classes: the number of classes.
        ignored: labels of pixels that are not scored.
        show: see `Targets.pictures`.
    """

    masks: Masks
    classes: int
    ignored: tuple[int, ...]
    resamples: int
    show: Callable[[NDArray[np.int64]], NDArray[np.uint8]] | None = None

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The numbers of right, true and predicted pixels of each picture [n, 3, classes]."""
        return self._count(self.masks)

    def _count(self, masks: Masks) -> NDArray[np.int64]:
        size = self.classes
        counts = np.empty((len(masks), 3, size), np.int64)
        for row, mask, predicted in zip(counts, masks, self.outputs.values[0], strict=True):
            scored = ~np.isin(mask, self.ignored) & (mask < size)
            true = mask[scored].astype(np.int64)
            said = np.minimum(predicted[scored].astype(np.int64), size)
            # Count pixels by true and predicted class; one more column for other classes
            pairs = np.bincount(true * (size + 1) + said, minlength=size * (size + 1))
            matrix = pairs.reshape(size, size + 1)
            row[:] = matrix[:, :size].diagonal(), matrix.sum(1), matrix.sum(0)[:size]
        return counts

    @cached_property
    def of_class(self) -> Values:
        """IoU of each class [classes]; NaN without true pixels."""
        return _iou(self.counts.sum(axis=0))

    @cached_property
    def by_class(self) -> Values:
        """IoU of each class on each bootstrap sample [resamples, classes], NaN as in `of_class`."""
        weights = draw_weights(self.total, self.resamples).astype(np.float64)
        pooled = weights @ self.counts.reshape(self.total, -1)
        return _iou(pooled.reshape(self.resamples, 3, self.classes))

    @property
    def samples_of_class(self) -> NDArray[np.int64]:
        """The number of pictures with true pixels of each class [classes]."""
        return np.count_nonzero(self.counts[:, 1], axis=0)

    @property
    def of_others(self) -> float:
        """The mean IoU with the masks of other pictures, which is the level of chance."""
        others = self._count(np.roll(self.masks, len(self.masks) // 2, axis=0))
        return float(np.nanmean(_iou(others.sum(axis=0))))

    def more(self) -> Metrics:
        """Return the share of scored pixels that are right."""
        right, true, _ = self.counts.sum(axis=(0, 2))
        return {PIXEL_ACCURACY.name: float(right / true)}


def _iou(counts: Array) -> Values:
    """Return the IoU [..., classes] of counts [..., 3, classes]; NaN without true pixels."""
    right, true, said = np.moveaxis(counts, -2, 0)
    return np.divide(right, true + said - right, out=np.full(right.shape, np.nan), where=true > 0)


def build(
    class_names: tuple[str, ...] = (),
    decoder: MaskDecoder | None = None,
    ignored: Sequence[int] = (255,),
    resamples: int = 2000,
) -> Task:
    """Return `task=segmentation` with these settings.

    Args:
        decoder: decodes the outputs; None for a finished run.
    """
    return Task(
        "segmentation",
        MIOU,
        partial(_score, len(class_names), tuple(ignored), resamples),
        replace(BOOTSTRAP, intervals=f"{BOOTSTRAP.intervals} over the pictures"),
        beside=(PIXEL_ACCURACY,),
        class_names=class_names,
        pair_metrics=count_lost,
        scope=Scope(reduction=decoder),
        files=TaskFiles(
            arrays=partial(keep_values, attrgetter("counts")),
            tables=partial(list_classes, "iou", class_names),
            figures=partial(_draw, class_names),
            captions={
                PICTURES: "Pictures whose classes changed most: mask, FP32, quantized",
                CLASSES: "IoU by class: those that changed most, beside FP32",
            },
        ),
        doubt=_doubt,
        summary=_summarize,
    )


def _score(
    classes: int, ignored: tuple[int, ...], resamples: int, outputs: Outputs, targets: Targets
) -> SegmentationScores:
    assert targets.labels is not None  # `_make` has checked the labels
    return SegmentationScores(
        outputs, targets.labels, classes, ignored, resamples, targets.pictures
    )


def _summarize(comparison: Comparison) -> str:
    accuracy = PIXEL_ACCURACY.show(comparison.model.more()[PIXEL_ACCURACY.name])
    return f"{summarize(comparison)}, {accuracy} of the pixels right"


def _doubt(baseline: SegmentationScores, expected: float | None) -> str | None:
    """Return a doubt if the mIoU is not proven above chance, or is proven below `expected`.

    Chance is the mIoU with the masks of other pictures; a single picture has no chance level.
    """
    interval = baseline.per_sample.interval
    shown = MIOU.show(baseline.value)
    chance = baseline.of_others
    if len(baseline.masks) > 1 and not interval[0] > chance:
        others = MIOU.show(chance)
        return f"NEAR CHANCE, {shown} (with the masks of other pictures {others})"
    return doubt_below(shown, interval, expected)


def _draw(names: Sequence[str], comparison: Comparison, title: str) -> "dict[str, Figure]":
    from resnet8ptq.tasks import segmentation_plot

    return {
        PICTURES: segmentation_plot.draw(comparison, names, title),
        **draw_classes(names, comparison, title),
    }


def _make(config: SegmentationConfig, context: TaskContext) -> Task:
    masks = context.labels
    if masks is None or masks.dtype != np.uint8 or masks.ndim != 3:
        raise ConfigError(
            f"task=segmentation: {context.data} has no masks; expected a folder of pictures with "
            "data.masks=FOLDER, or labels as integers [N, height, width]"
        )
    output, axis = _find_output(context)
    channels: int | None = 1
    if axis is not None:
        channels = list(context.outputs.values())[output][axis]

    # At least two classes must be scored, and the network must know them
    scored = np.setdiff1d(np.unique(masks), config.ignored)
    if len(scored) < 2:
        raise ConfigError(
            f"task.ignored: got {config.ignored}, which leaves the labels {scored.tolist()} in the "
            f"masks of {context.data}; expected two or more"
        )
    needed = int(scored[-1]) + 1
    names = context.class_names or tuple(map(str, range(max(channels or 0, needed))))
    if channels not in (1, len(names)) or needed > len(names):
        raise ModelError(
            f"returns {describe(context.outputs)}, and {context.data} has {len(names)} classes and "
            f"labels up to {needed - 1}; expected a value of each class for each pixel; "
            "task.ignored= for labels of no class"
        )

    # The output is resized to the masks
    size = (masks.shape[1], masks.shape[2])
    decoder = MaskDecoder(output, axis, len(names), size, config.threshold)
    return build(names, decoder, config.ignored, config.resamples)


def _find_output(context: TaskContext) -> tuple[int, int | None]:
    """Return the index of the first output with a map, and the axis of its classes.

    The axis is None for a map [height, width]. Classes are last if the pictures' channels are last.

    Raises:
        ModelError: no output has two or three axes besides that of the batch.
    """
    # Pictures with channels last suggest classes last
    taken = context.input_shape
    last = taken[:1] not in ((1,), (3,)) and taken[-1:] in ((1,), (3,))
    for number, shape in enumerate(context.outputs.values()):
        if len(shape) == 3 and last:
            return number, 2
        if len(shape) == 3:
            return number, 0
        if len(shape) == 2:
            return number, None
    raise ModelError(
        f"returns {describe(context.outputs)}; task=segmentation takes values [classes, height, "
        "width] or [height, width, classes], or classes [height, width]"
    )


SEGMENTATION = TaskType(
    make=_make,
    recall=lambda config, class_names: build(ignored=config.ignored, resamples=config.resamples),
    schema=SegmentationConfig,
)
