"""Figures that compare a detector with FP32: curves of precision, and changed pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure  # no pyplot: figures need no screen and no global state
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from resnet8ptq.core import masks
from resnet8ptq.core.text import plain
from resnet8ptq.tasks.detection import decoding
from resnet8ptq.tasks.detection.ap_bootstrap import RECALLS
from resnet8ptq.tasks.detection.scores import DetectionScores
from resnet8ptq.tasks.scoring.outputs import Array

PICTURES = 6  # most pictures in the figure
SHOWN_SCORE = 0.3  # detections with smaller scores are too numerous to draw
OVERLAP = 0.5  # detections with a larger IoU or OKS stand for the same object


def curves(model: DetectionScores, baseline: DetectionScores, title: str) -> Figure:
    """Draw the mean precision of classes with objects over recall, at IoU or OKS 0.50 and 0.75."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    for name, scores, line in (("FP32", baseline, "--"), ("quantized", model, "-")):
        for index, threshold, colour in ((0, 0.50, "C0"), (5, 0.75, "C1")):
            precision = scores.evaluation.precision[index, ..., 0]  # [101, classes]
            defined = precision[:, (precision > -1).any(axis=0)]
            if defined.size:
                mean = defined.mean(axis=1)
                label = f"{name}, {scores.similarity} {threshold:.2f}: {mean.mean():.3f}"
                axes.plot(RECALLS, mean, line, color=colour, label=label)
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1), title=plain(title))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    return figure


def pictures(
    model: DetectionScores, baseline: DetectionScores, class_names: Sequence[str], title: str
) -> Figure:
    """Draw the pictures that changed most, with annotations and the detections of both models."""
    assert model.show is not None  # every run sets it
    change = box_changes(model, baseline)

    # Unchanged pictures are left out, but one picture is always drawn
    shown = np.argsort(-change, kind="stable")[:PICTURES]
    shown = shown[: max(1, np.count_nonzero(change[shown]))]
    stored = model.show(shown)
    areas = [_area(record, stored.shape[1:3]) for record in model.pictures[shown]]
    heights = [(bottom - top) / (right - left) for left, top, right, bottom in areas]

    # Draw a row for each picture: annotations, FP32, quantized
    figure = Figure(figsize=(12, 0.8 + sum(4 * h + 0.3 for h in heights)), layout="constrained")
    grid = figure.subplots(len(shown), 3, squeeze=False, height_ratios=heights)
    for row, index, pixels, area in zip(grid, shown, stored, areas, strict=True):
        record = model.pictures[index]
        drawn = [_annotated(model, index), _detected(baseline, index), _detected(model, index)]
        partners = [drawn[1], drawn[2], drawn[1]]
        heads = [f"picture {record['image_id']}: annotations", "FP32", "quantized"]
        for column, (axes, objects, head) in enumerate(zip(row, drawn, heads, strict=True)):
            axes.imshow(pixels.squeeze(), cmap="gray")
            alone = _unmatched(objects, partners[column], model.sigmas)
            if column == 0:  # annotations are never red
                alone = np.zeros(len(objects.rows), bool)
            _draw(axes, objects, alone, class_names, pixels.shape[:2])
            axes.set_title(head, fontsize=10)
            axes.set_axis_off()
            axes.set(xlim=(area[0] - 0.5, area[2] - 0.5), ylim=(area[3] - 0.5, area[1] - 0.5))
    figure.suptitle(
        f"{plain(title)}\nred: boxes of one model that the other lacks (scores from "
        f"{SHOWN_SCORE:g}, {model.similarity} {OVERLAP:g})",
        fontsize=11,
    )
    return figure


def _area(record: Array, size: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a picture in the network's input, without padding.

    Args:
        record: the picture, see `data.boxes`.
        size: height and width of the network's input.
    """
    begin = np.maximum(record["offset"], 0)
    end = record["offset"] + record["scale"] * (record["width"], record["height"])
    right, bottom = np.minimum(end, size[::-1]).tolist()
    return float(begin[0]), float(begin[1]), right, bottom


def box_changes(model: DetectionScores, baseline: DetectionScores) -> NDArray[np.float64]:
    """Return the change of the detections of each picture [n].

    The change is the sum of the scores of detections that only one of the models has. Scores below
    `SHOWN_SCORE` do not count.
    """
    change = np.zeros(model.total)
    for index in range(model.total):
        ours = _detected(model, index)
        theirs = _detected(baseline, index)
        gained = ours.rows[_unmatched(ours, theirs, model.sigmas), 4]
        lost = theirs.rows[_unmatched(theirs, ours, model.sigmas), 4]
        change[index] = gained.sum() + lost.sum()
    return change


@dataclass(frozen=True)
class _Objects:
    """The objects of one picture, in pixels of the network's input.

    Attributes:
        rows: [D, 6 + 3 * K], see `decoding.Decoder`.
        masks: the mask of each object in COCO's format; None without masks.
    """

    rows: NDArray[np.float64]
    masks: list[dict[str, Any]] | None


def _detected(scores: DetectionScores, index: int) -> _Objects:
    """Return the detections of one picture with a score of at least `SHOWN_SCORE`."""
    rows = scores.outputs.values[0][index]
    kept = (rows[:, 5] != decoding.NOTHING) & (rows[:, 4] >= SHOWN_SCORE)
    outlines = None
    if scores.kind == "segm":
        texts = np.array(scores.masks_in_input(index), np.object_)
        drawn = texts[kept[: decoding.count(rows)]]
        outlines = [masks.to_coco(text, *scores.input_size) for text in drawn]
    return _Objects(np.asarray(rows[kept], np.float64), outlines)


def _annotated(scores: DetectionScores, index: int) -> _Objects:
    """Return the annotations of one picture, without the crowds."""
    record = scores.pictures[index]
    scale = record["scale"]
    offset = record["offset"]
    boxes = record["boxes"][: record["count"]]
    single = ~boxes["crowd"]
    boxes = boxes[single]

    # Move the boxes and keypoints into the network's input; annotations have no score
    placed = boxes["bbox"].copy()
    placed[:, 2:] += placed[:, :2]
    placed = placed * np.tile(scale, 2) + np.tile(offset, 2)
    columns = [placed, np.full(len(boxes), math.inf), boxes["category"]]
    if "keypoints" in boxes.dtype.names:
        points = boxes["keypoints"].copy()
        for axis in (0, 1):
            points[:, axis::3] = points[:, axis::3] * scale[axis] + offset[axis]
        columns.append(points)

    # Move the masks likewise
    outlines = None
    if scores.kind == "segm":
        size = (int(record["height"]), int(record["width"]))
        texts = np.array(masks.of_record(record), np.object_)[single]
        outlines = []
        for text in texts:
            moved = masks.move(text, size, 1 / scale, -offset / scale, scores.input_size)
            outlines.append(masks.to_coco(moved, *scores.input_size))
    return _Objects(np.column_stack(columns), outlines)


def _unmatched(objects: _Objects, others: _Objects, sigmas: Sequence[float]) -> NDArray[np.bool_]:
    """Return for each object [D] whether `others` has no similar object of its class."""
    if not len(objects.rows) or not len(others.rows):
        return np.ones(len(objects.rows), np.bool_)
    first = objects.rows[:, np.newaxis]
    second = others.rows[np.newaxis]
    if objects.masks is not None:
        alike = masks.iou(objects.masks, others.masks or [])
    elif sigmas:
        alike = _oks(first, second, sigmas)
    else:
        alike = _iou(first, second)

    # Objects match if they are alike and of the same class
    same = first[..., 5] == second[..., 5]
    return np.asarray(~((alike >= OVERLAP) & same).any(axis=1))


def _areas(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray((boxes[..., 2:4] - boxes[..., :2]).prod(axis=-1))


def _oks(
    first: NDArray[np.float64], second: NDArray[np.float64], sigmas: Sequence[float]
) -> NDArray[np.float64]:
    """Return the OKS of pairs of objects, with the mean area of both boxes as the area."""
    area = np.maximum((_areas(first) + _areas(second)) / 2, np.finfo(float).tiny)
    away = first[..., 6:] - second[..., 6:]
    squares = away[..., ::3] ** 2 + away[..., 1::3] ** 2
    shares = squares / (2 * np.array(sigmas)) ** 2 / area[..., np.newaxis] / 2
    return np.asarray(np.exp(-shares).mean(axis=-1))


def _iou(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    corner = np.minimum(first[..., 2:4], second[..., 2:4]) - np.maximum(
        first[..., :2], second[..., :2]
    )
    shared = corner.clip(min=0).prod(axis=-1)
    union = _areas(first) + _areas(second) - shared
    return np.asarray(shared / np.maximum(union, np.finfo(float).tiny))


def _draw(
    axes: Axes,
    objects: _Objects,
    alone: NDArray[np.bool_],
    class_names: Sequence[str],
    size: tuple[int, int],
) -> None:
    # Draw mask, keypoints, box and name of each object
    for number, (row, single) in enumerate(zip(objects.rows, alone, strict=True)):
        left, top, right, bottom, score, label = row[:6]
        colour = "red" if single else "lime"
        if objects.masks is not None:
            inside = masks.decode(objects.masks[number]["counts"].encode("ascii"), *size)
            axes.imshow(
                np.where(inside == 1, 1.0, np.nan), cmap=ListedColormap([colour]), alpha=0.4
            )

        # Of the keypoints, draw the visible ones
        points = row[6:].reshape(-1, 3)
        x, y, _ = points[points[:, 2] >= SHOWN_SCORE].T
        axes.scatter(x, y, s=8, color=colour)
        axes.add_patch(
            Rectangle((left, top), right - left, bottom - top, fill=False, color=colour, lw=1.3)
        )
        name = plain(class_names[int(label)])
        if not math.isinf(score):  # an annotation has none
            name += f" {score:.2f}"
        axes.text(
            left,
            top - 2,
            name,
            fontsize=7,
            color="black",
            bbox={"facecolor": colour, "alpha": 0.7, "pad": 0.6, "linewidth": 0},
            clip_on=True,
        )
