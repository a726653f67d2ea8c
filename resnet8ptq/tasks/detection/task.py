"""Boxes of a data set's classes, found by a detector and evaluated as COCO does."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr  # scipy.stats takes a second to import

from resnet8ptq.config.schema import DetectionConfig, TaskConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tasks import bootstrap, contract, distortion
from resnet8ptq.tasks.contract import (
    Array,
    Metric,
    Metrics,
    Outputs,
    Reduction,
    Setting,
    Table,
    Targets,
)
from resnet8ptq.tasks.detection import ap_bootstrap, average_precision, decoding
from resnet8ptq.tasks.statistics import (
    SIGNIFICANCE,
    Interval,
    Values,
    bootstrap_interval,
    holm,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AP = Metric("ap", "AP")
BESIDE = (Metric("ap50", "AP50"), Metric("ap75", "AP75"))
ENOUGH = 10  # pictures with a class, for a test of it
NOTHING_FOUND = 0.01  # an AP that says that boxes are decoded wrongly
RESULTS = "detections.json"
CLASSES, CURVES, PICTURES = "classes.png", "precision_recall.png", "detections.png"


@dataclass(frozen=True)
class Scores(contract.Scores):
    """The detections of a model, and what COCO's evaluation makes of them.

    Attributes:
        outputs: detections [n, most, 6], see `decoding.Decoder`.
        pictures: [n] records, see `data.boxes`.
        class_ids: of the annotations, in the order of the classes.
        resamples: how many bootstrap samples are drawn.
        show: returns the pictures at some places, see `Targets.pictures`.
    """

    outputs: Outputs
    pictures: Array
    class_ids: tuple[int, ...]
    resamples: int
    show: Callable[[NDArray[np.int64]], NDArray[np.uint8]] | None = None
    per_item: ClassVar[None] = None

    @property
    def total(self) -> int:
        """Number of pictures."""
        return len(self.pictures)

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """The detections in COCO's results format, in pixels of the pictures."""
        detections = self.outputs.values[0].astype(np.float64)
        scale, offset = (
            np.tile(self.pictures[name], 2)[:, np.newaxis] for name in ("scale", "offset")
        )
        boxes = (detections[..., :4] - offset) / scale
        boxes[..., 2:] -= boxes[..., :2]
        counts = decoding.count(detections)
        found = []
        for record, rows, placed, many in zip(
            self.pictures, detections, boxes, counts, strict=True
        ):
            for row, box in zip(rows[:many].tolist(), placed[:many].tolist(), strict=True):
                found.append(
                    {
                        "image_id": int(record["image_id"]),
                        "category_id": self.class_ids[int(row[5])],
                        "bbox": box,
                        "score": row[4],
                    }
                )
        return found

    @cached_property
    def evaluation(self) -> average_precision.Evaluation:
        """COCO's evaluation of all pictures."""
        return average_precision.evaluate(self.results, to_coco(self.pictures, self.class_ids))

    @property
    def value(self) -> float:
        """AP."""
        return self.evaluation.metrics["ap"]

    @cached_property
    def by_class(self) -> Values:
        """AP of each class on each bootstrap sample [resamples, classes]."""
        weights = ap_bootstrap.draw(self.total, self.resamples)
        return ap_bootstrap.by_class(self.evaluation.matches, weights)

    @property
    def pictures_of_class(self) -> NDArray[np.int64]:
        """In how many pictures there are objects of each class [classes]."""
        return np.array([np.count_nonzero(each.objects) for each in self.evaluation.matches])

    @cached_property
    def replicates(self) -> Values:
        """AP of each bootstrap sample [resamples], moved so that their mean is AP.

        A sample has fewer different pictures, and AP is higher on fewer.
        """
        found = ap_bootstrap.mean_of(self.by_class)
        return np.asarray(found - np.nanmean(found) + self.value)

    @property
    def interval(self) -> Interval:
        """95% percentile interval."""
        return bootstrap_interval(self.replicates)

    def more(self) -> Metrics:
        """Return COCO's other numbers, and how many detections there are."""
        others = {name: value for name, value in self.evaluation.metrics.items() if name != "ap"}
        known = {name: None if math.isnan(value) else value for name, value in others.items()}
        return {**known, "detections": len(self.results)}


@dataclass(frozen=True)
class Comparison(bootstrap.Comparison):
    """AP of two models on the same pictures."""

    model: Scores  # type: ignore[assignment]
    baseline: Scores  # type: ignore[assignment]

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of the network's own outputs on the first pictures, in dB."""
        ours, theirs = self.model.outputs.raw, self.baseline.outputs.raw
        if (
            not ours
            or not theirs
            or any(one.shape != other.shape for one, other in zip(ours, theirs, strict=True))
        ):
            return None
        return distortion.sqnr_db(theirs, ours)

    @cached_property
    def class_deltas(self) -> Values:
        """AP of each class minus the baseline's [classes]; NaN without objects of it."""
        return np.asarray(self.model.evaluation.by_class - self.baseline.evaluation.by_class)

    @cached_property
    def class_p(self) -> Values:
        """The p-value of each class [classes], corrected for their number (Holm).

        The normal distribution with the bootstrap's standard error (Efron and Tibshirani, An
        Introduction to the Bootstrap, 1993): counted, no p-value could be small enough for many
        classes. NaN for classes in fewer than `ENOUGH` pictures, of which neither says anything.
        """
        differences = self.model.by_class - self.baseline.by_class
        found = np.full(differences.shape[1], np.nan)
        tested = np.flatnonzero(self.baseline.pictures_of_class >= ENOUGH)
        errors = np.nanstd(differences[:, tested], axis=0, ddof=1)
        deltas = self.class_deltas[tested]
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(deltas == 0, 0, np.abs(deltas) / errors)
        found[tested] = holm(2 * ndtr(-scores))
        return found

    @property
    def lost(self) -> NDArray[np.int64]:
        """The classes that are significantly worse than FP32's."""
        return np.flatnonzero((self.class_p < SIGNIFICANCE) & (self.class_deltas < 0))

    def more(self) -> Metrics:
        """Return SQNR, and how many classes lost."""
        return {**super().more(), "classes_lost": len(self.lost)}


@dataclass(frozen=True)
class Detection(contract.Task):
    """The labels are boxes, and the network's outputs are decoded to some.

    Attributes:
        decoder: None where only what a run has kept is read.
        config: how boxes are decoded, chosen and resampled.
    """

    decoder: decoding.Decoder | None = None
    config: DetectionConfig = field(default_factory=DetectionConfig)

    name = "detection"
    test = bootstrap.TEST
    intervals = f"{bootstrap.INTERVALS} over the pictures"
    paired: ClassVar[type[contract.Paired]] = bootstrap.Paired
    schema = DetectionConfig
    figure_files: ClassVar[dict[str, str]] = {
        PICTURES: "Pictures whose detections changed most: annotations, FP32, quantized",
        CLASSES: "AP by class: those that changed most, beside FP32",
        CURVES: "Precision and recall, mean of the classes, beside FP32",
    }

    @classmethod
    def make(cls, config: TaskConfig, setting: Setting) -> Self:
        """Take boxes, and a network with a head that is known."""
        assert isinstance(config, DetectionConfig)  # see `registry`
        labels = setting.labels
        if labels is None or "boxes" not in (labels.dtype.names or ()):
            raise ConfigError(
                f"task=detection: {setting.data} has no boxes; takes data=coco with "
                "data.images and data.annotations"
            )
        boxes = labels["boxes"]
        there = np.arange(boxes.shape[1]) < labels["count"][:, np.newaxis]
        if not (there & ~boxes["crowd"]).any():
            raise ConfigError(f"task=detection: the pictures of {setting.data} have no objects")
        given = setting.input_shape, setting.outputs, setting.class_ids
        decoder = decoding.make_decoder(config, *given)
        return cls(setting.class_names, decoder, config)

    @classmethod
    def recall(cls, config: TaskConfig, class_names: tuple[str, ...]) -> Self:
        """Set the task up for what a run has kept."""
        assert isinstance(config, DetectionConfig)
        return cls((), None, config)

    @property
    def metric(self) -> Metric:
        """COCO's AP."""
        return AP

    @property
    def beside(self) -> tuple[Metric, ...]:
        """AP at two thresholds."""
        return BESIDE

    @property
    def reduction(self) -> Reduction | None:
        """Detections are kept of each batch, not all candidates."""
        return self.decoder

    def doubt(self, baseline: Scores, expected: float | None) -> str | None:
        """Doubt an AP near 0, or below `expected`."""
        found = f"AP {AP.show(baseline.value)}"
        if baseline.interval[1] < NOTHING_FOUND:
            return f"NEAR ZERO, {found} (does task.head fit, and task.boxes?)"
        return contract.doubt_below(found, baseline.interval, expected)

    def describe(self) -> dict[str, str]:
        """Add the head that was found to fit."""
        assert self.decoder is not None  # set up for a run
        return {**super().describe(), "head": self.decoder.head}

    def score(self, outputs: Outputs, targets: Targets) -> Scores:
        """Score detections."""
        assert self.decoder is not None and targets.labels is not None
        class_ids = self.decoder.class_ids
        return Scores(outputs, targets.labels, class_ids, self.config.resamples, targets.pictures)

    def compare(self, model: Scores, baseline: Scores) -> Comparison:
        """Compare AP."""
        return Comparison(model, baseline)

    def summary(self, found: contract.Comparison) -> str:
        """Return AP and AP50."""
        more = found.model.more()
        return f"{super().summary(found)}, AP50 {AP.show(more['ap50'] or 0)}"

    def tables(self, found: contract.Comparison) -> dict[str, Table]:
        """Return AP by class."""
        assert isinstance(found, Comparison)
        columns = (
            self.class_names,
            found.baseline.pictures_of_class.tolist(),
            found.model.evaluation.by_class,
            found.baseline.evaluation.by_class,
            found.class_deltas,
            found.class_p,
        )
        rows = [
            [name, *("" if math.isnan(value) else value for value in values)]
            for name, *values in zip(*columns, strict=True)
        ]
        head = ["class", "pictures", "ap", "baseline_ap", "delta", "p_value_holm"]
        return {"per_class.csv": [head, *rows]}

    def documents(self, found: contract.Comparison) -> dict[str, str]:
        """Return the detections in COCO's results format."""
        return {RESULTS: json.dumps(found.model.results)}

    def figures(self, found: contract.Comparison, title: str) -> "dict[str, Figure]":
        """Draw classes, curves, and pictures."""
        from resnet8ptq.tasks.detection import plots

        assert isinstance(found, Comparison)
        return {
            PICTURES: plots.pictures(found, self.class_names, title),
            CLASSES: plots.classes(found, self.class_names, title),
            CURVES: plots.curves(found, title),
        }


def to_coco(pictures: Array, class_ids: Sequence[int]) -> dict[str, Any]:
    """Return the annotations of some pictures [n], records as `data.boxes` has them."""
    images, annotations = [], []
    for record in pictures:
        image_id = int(record["image_id"])
        images.append({"id": image_id})
        for box in record["boxes"][: record["count"]]:
            annotations.append(
                {
                    "image_id": image_id,
                    "category_id": class_ids[box["category"]],
                    "bbox": box["bbox"].tolist(),
                    "area": float(box["area"]),
                    "iscrowd": int(box["crowd"]),
                }
            )
    categories = [{"id": class_id} for class_id in class_ids]
    return {"images": images, "annotations": annotations, "categories": categories}
