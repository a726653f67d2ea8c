"""The three tasks that find objects, which score boxes, keypoints or masks as COCO does."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from resnet8ptq.config.schema import DetectionConfig, InstanceSegmentationConfig, KeypointsConfig
from resnet8ptq.core import masks
from resnet8ptq.core.console import warn_once
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tasks.classification import metric_names
from resnet8ptq.tasks.detection.decoding import Decoder, make_decoder
from resnet8ptq.tasks.detection.scores import DetectionScores
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP
from resnet8ptq.tasks.scoring.classwise import CLASSES, count_lost, draw_classes, list_classes
from resnet8ptq.tasks.scoring.comparison import Comparison, doubt_below, summarize
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Outputs, Targets, TaskContext
from resnet8ptq.tasks.task import Scope, Task, TaskFiles, TaskType

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

AP = Metric("ap", "AP")
BESIDE = (Metric("ap50", "AP50"), Metric("ap75", "AP75"))
NOTHING_FOUND = 0.01  # a smaller AP suggests that boxes are decoded wrongly
# The constants in pycocotools for a person: nose, eyes, ears, shoulders, elbows, wrists, hips,
# knees, ankles.
COCO_SIGMAS = (
    *(0.026, 0.025, 0.025, 0.035, 0.035, 0.079, 0.079, 0.072, 0.072, 0.062, 0.062),
    *(0.107, 0.107, 0.087, 0.087, 0.089, 0.089),
)
RESULTS = "detections.json"
CURVES = "precision_recall.png"
PICTURES = "detections.png"


def build(
    class_names: tuple[str, ...] = (),
    decoder: Decoder | None = None,
    resamples: int = 2000,
    outputs: Sequence[str] = (),
    name: str = "detection",
    sigmas: tuple[float, ...] = (),
) -> Task:
    """Return the task `name`, such as `task=detection`, with these settings.

    Args:
        decoder: decodes the outputs; None for a finished run.
        outputs: the names of the network's outputs.
        sigmas: the constant of each keypoint in the OKS; empty if masks or boxes are scored, by
            IoU.
    """
    params = {}
    if decoder is not None:
        params["head"] = decoder.head
    return Task(
        name,
        AP,
        partial(_score, decoder, resamples, sigmas),
        replace(BOOTSTRAP, intervals=f"{BOOTSTRAP.intervals} over the pictures"),
        beside=BESIDE,
        class_names=class_names,
        pair_metrics=partial(_pair_metrics, outputs),
        scope=Scope(
            output=0,  # the other output has masks as texts
            reduction=decoder,
            params=params,
        ),
        files=TaskFiles(
            tables=partial(list_classes, "ap", class_names),
            documents=_write_results,
            figures=partial(_draw, class_names),
            captions={
                PICTURES: "Pictures whose detections changed most: annotations, FP32, quantized",
                CLASSES: "AP by class: those that changed most, beside FP32",
                CURVES: "Precision and recall, mean of the classes, beside FP32",
            },
        ),
        doubt=_doubt,
        summary=_summarize,
    )


def _score(
    decoder: Decoder | None,
    resamples: int,
    sigmas: tuple[float, ...],
    outputs: Outputs,
    targets: Targets,
) -> DetectionScores:
    assert decoder is not None and targets.labels is not None  # only finished runs have none
    return DetectionScores(
        outputs=outputs,
        pictures=targets.labels,
        class_ids=decoder.class_ids,
        resamples=resamples,
        show=targets.pictures,
        sigmas=sigmas,
        input_size=(decoder.frame.height, decoder.frame.width),
    )


def _pair_metrics(names: Sequence[str], comparison: Comparison) -> Metrics:
    model = comparison.model
    baseline = comparison.baseline
    metrics = count_lost(comparison)
    if model.outputs.has_raw_of(baseline.outputs):
        outputs = baseline.outputs.raw, model.outputs.raw
        metrics |= distortion.sqnr_of_each(metric_names(names), *outputs)
    return metrics


def _write_results(comparison: Comparison) -> dict[str, str]:
    return {RESULTS: json.dumps(comparison.model.results)}


def _summarize(comparison: Comparison) -> str:
    return f"{summarize(comparison)}, AP50 {AP.show(comparison.model.more()['ap50'] or 0)}"


def _draw(names: Sequence[str], comparison: Comparison, title: str) -> "dict[str, Figure]":
    from resnet8ptq.tasks.detection import plots

    pair = comparison.model, comparison.baseline
    return {
        PICTURES: plots.pictures(*pair, names, title),
        **draw_classes(names, comparison, title),
        CURVES: plots.curves(*pair, title),
    }


def _doubt(baseline: DetectionScores, expected: float | None) -> str | None:
    """Return a doubt if the AP is proven near 0 or below `expected`."""
    shown = f"AP {AP.show(baseline.value)}"
    interval = baseline.per_sample.interval
    if interval[1] < NOTHING_FOUND:
        return f"NEAR ZERO, {shown} (does task.head fit, and task.boxes?)"
    return doubt_below(shown, interval, expected)


def _make(config: DetectionConfig, context: TaskContext) -> Task:
    labels = context.labels
    if labels is None or "boxes" not in (labels.dtype.names or ()):
        raise ConfigError(
            f"task={config.name}: {context.data} has no boxes; expected data=coco with "
            "data.images and data.annotations"
        )

    # Count only single objects, with keypoints if these are scored
    boxes = labels["boxes"]
    filled = np.arange(boxes.shape[1]) < labels["count"][:, np.newaxis]
    objects = filled & ~boxes["crowd"]
    sigmas: tuple[float, ...] = ()
    parts = ""
    if isinstance(config, KeypointsConfig):
        sigmas = _find_sigmas(config, context)
        objects &= (boxes["keypoints"][..., 2::3] > 0).any(axis=2)
        parts = " with keypoints"
    with_masks = config.name == "instance_segmentation"
    if with_masks:
        _check_masks(context)
    if not objects.any():
        raise ConfigError(
            f"task={config.name}: the pictures of {context.data} have no objects{parts}"
        )

    # Make the decoder of the outputs
    decoder = make_decoder(
        config,
        context.input_shape,
        context.outputs,
        context.class_ids,
        keypoints=len(sigmas),
        with_masks=with_masks,
    )
    names = context.class_names
    return build(names, decoder, config.resamples, tuple(context.outputs), config.name, sigmas)


def _check_masks(context: TaskContext) -> None:
    """Raise `ConfigError` if the labels have no masks; warn of objects without one."""
    if not context.has_masks:
        raise ConfigError(
            f"task=instance_segmentation: the objects of {context.data} have no masks; expected "
            "`segmentation` in data.annotations, polygons or run lengths; task=detection scores "
            "boxes alone"
        )
    assert context.labels is not None

    # Count the objects without a mask by picture
    bare = {}
    for record in context.labels:
        number = masks.of_record(record).count(b"")
        if number:
            bare[int(record["image_id"])] = number
    if bare:
        warn_once(
            log,
            "%s: %d objects have no valid `segmentation`, the first in picture %d: they count as "
            "neither right nor wrong",
            context.data,
            sum(bare.values()),
            min(bare),
        )


def _find_sigmas(config: KeypointsConfig, context: TaskContext) -> tuple[float, ...]:
    """Return the constant of each keypoint: `task.sigmas`, or COCO's for the 17 of a person.

    Raises:
        ConfigError: the labels have no keypoints, or not one for each constant.
    """
    count = context.keypoints
    if not count:
        raise ConfigError(
            f"task=keypoints: the objects of {context.data} have no keypoints; expected them in "
            "data.annotations, such as person_keypoints_val2017.json"
        )

    # COCO's constants fit only a person's 17 keypoints
    sigmas: tuple[float, ...] = COCO_SIGMAS
    got = "null, which is COCO's 17"
    if config.sigmas is not None:
        sigmas = tuple(config.sigmas)
        got = f"{len(sigmas)} numbers"
    if len(sigmas) != count:
        raise ConfigError(
            f"task.sigmas: got {got}, expected one for each of the {count} keypoints of "
            f"{context.data}; try task=keypoints task.sigmas={[round(1 / count, 3)] * count}"
        )
    return sigmas


def _recall(config: DetectionConfig, class_names: tuple[str, ...]) -> Task:
    return build(resamples=config.resamples, name=config.name)


DETECTION = TaskType(make=_make, recall=_recall, schema=DetectionConfig)
INSTANCE_SEGMENTATION = TaskType(make=_make, recall=_recall, schema=InstanceSegmentationConfig)
KEYPOINTS = TaskType(make=_make, recall=_recall, schema=KeypointsConfig)
