"""Every task with its targets, and outputs of a model with some noise."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from resnet8ptq.config.schema import (
    CustomConfig,
    DetectionConfig,
    InstanceSegmentationConfig,
    KeypointsConfig,
)
from resnet8ptq.core import masks as object_masks
from resnet8ptq.data.boxes import Annotated, pack
from resnet8ptq.tasks import (
    agreement,
    anomaly,
    binary,
    classification,
    ctc,
    custom,
    dense,
    deviation,
    multilabel,
    perplexity,
    regression,
    segmentation,
    similarity,
    tokens,
    top5,
    verification,
)
from resnet8ptq.tasks.detection import task as detection
from resnet8ptq.tasks.detection.decoding import NOTHING, Decoder, Prototypes, count
from resnet8ptq.tasks.detection.heads import Frame
from resnet8ptq.tasks.joining import join
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.outputs import (
    LOGITS,
    PROBABILITIES,
    VALUES,
    Outputs,
    Targets,
    TaskContext,
)
from resnet8ptq.tasks.task import Task

ITEMS = 120
RANDOM = np.random.default_rng(0)
CLASSES = RANDOM.integers(0, 7, ITEMS)
TWO = CLASSES % 2
TARGETS = RANDOM.normal(size=(ITEMS, 2)).astype(np.float32)
WINDOWS = RANDOM.normal(size=(ITEMS, 4)).astype(np.float32)
CLIPS = np.repeat(np.arange(ITEMS // 2), 2)  # a label for each
PAIR_SCORES = TARGETS[CLIPS, 0]
NAMES = tuple("abcdefg")


def mean_error(outputs, targets):
    """A metric of a user: a number."""
    return float(np.abs(outputs - targets).mean())


def errors(outputs, targets):
    """A metric of a user: a value for each sample."""
    return np.abs(outputs - targets).mean(axis=1)


def noisy_classes(noise: float, seed: int = 1) -> Outputs:
    logits = 4 * np.eye(7)[CLASSES] + drawn(seed).normal(size=(ITEMS, 7)) * (1 + noise)
    return Outputs((logits.astype(np.float32),), None, LOGITS)


def noisy_ranks(noise: float, seed: int = 1) -> Outputs:
    """Most labels stay among the 5 largest of 7 outputs until the noise is far above the signal."""
    return noisy_classes(5 * noise**2, seed)


def drawn(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


SEVERAL = RANDOM.random((ITEMS, 7)) < 0.3


def noisy_several(noise: float, seed: int = 1) -> Outputs:
    logits = 4 * SEVERAL - 2 + drawn(seed).normal(size=SEVERAL.shape) * (0.7 + 4 * noise)
    return Outputs((logits.astype(np.float32),), None, LOGITS)


def noisy_two(noise: float, seed: int = 1) -> Outputs:
    score = 3 * TWO - 1.5 + drawn(seed).normal(size=ITEMS) * (0.5 + noise)
    return Outputs(((1 / (1 + np.exp(-score)))[:, None].astype(np.float32),), None, PROBABILITIES)


def noisy_windows(noise: float, seed: int = 1) -> Outputs:
    """Anomalous windows are reconstructed worse."""
    error = drawn(seed).normal(size=WINDOWS.shape) * (0.2 + noise)
    return Outputs((WINDOWS + error.astype(np.float32) + 0.4 * (CLIPS % 2)[:, None],), None, VALUES)


def noisy_values(noise: float, seed: int = 1) -> Outputs:
    error = drawn(seed).normal(size=TARGETS.shape) * (0.1 + noise)
    return Outputs((TARGETS + error.astype(np.float32),), None, VALUES)


def noisy_pair(noise: float, seed: int = 1) -> Outputs:
    return Outputs((*noisy_values(noise, seed).values, 100 * WINDOWS), None, VALUES)


def noisy_scores(noise: float, seed: int = 1) -> Outputs:
    return Outputs((noisy_values(noise, seed).values[0][:, :1],), None, VALUES)


def noisy_embeddings(noise: float, seed: int = 1) -> Outputs:
    """The angle between the two texts of a pair grows as their score falls."""
    angles = np.where(np.arange(ITEMS) % 2, np.arccos(np.tanh(PAIR_SCORES)), 0)
    angles += drawn(seed).normal(size=ITEMS) * (0.02 + 0.1 * noise)
    lengths = 1 + drawn(3).random(ITEMS)
    turned = lengths * np.stack([np.cos(angles), np.sin(angles)])
    return Outputs((turned.T.astype(np.float32),), None, VALUES)


LINES = np.array(["".join(NAMES[n] for n in drawn(5 + i).integers(0, 7, 6)) for i in range(ITEMS)])
ALPHABET = ctc.Alphabet(("", *NAMES), 0, 2)


def noisy_lines(noise: float, seed: int = 1) -> Outputs:
    """Frames of a symbol and a blank in turn; noise replaces symbols."""
    frames = np.zeros((ITEMS, 12), np.int32)
    frames[:, ::2] = [[1 + NAMES.index(symbol) for symbol in line] for line in LINES]
    random = drawn(seed)
    wrong = random.random(frames.shape) < 0.02 + noise / (8 + noise)
    return Outputs((np.where(wrong, random.integers(0, 8, frames.shape), frames),), None, VALUES)


TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
SENTENCES = np.where(
    np.arange(9) < 4 + CLASSES[:, None] % 4, drawn(9).integers(0, 5, (ITEMS, 9)), -100
)
TAGGER = tokens.TagDecoder(TAGS, TAGS)


def noisy_tags(noise: float, seed: int = 1) -> Outputs:
    signal = 4 * np.eye(5)[np.maximum(SENTENCES, 0)]
    logits = signal + drawn(seed).normal(size=signal.shape) * (1 + noise)
    return Outputs((logits.astype(np.float32),), None, VALUES)


WORDS = np.cumsum(drawn(5).choice([1, 1, 1, 2, 6], (ITEMS, 12)), axis=1) % 7  # mostly in order


def noisy_words(noise: float, seed: int = 1) -> Outputs:
    """Logits of the next word, from the last one."""
    logits = 4 * np.eye(7)[(WORDS + 1) % 7] + drawn(seed).normal(size=(ITEMS, 12, 7)) * (
        0.5 + noise
    )
    reduced = perplexity.NextToken(0, 7)((logits,), WORDS)
    return Outputs(reduced, None, VALUES)


FACES = RANDOM.normal(size=(ITEMS // 4, 8))[np.arange(ITEMS) // 4]  # four samples of each
FACE_OF = np.arange(ITEMS) // 4


def noisy_faces(noise: float, seed: int = 1) -> Outputs:
    values = FACES + drawn(seed).normal(size=FACES.shape) * (0.5 + noise)
    return Outputs((values.astype(np.float32),), None, LOGITS)


def boxes() -> np.ndarray:
    """Two boxes in each picture, of three classes."""
    pictures = []
    for number, label in enumerate(CLASSES % 3):
        left = float(number % 20)
        pair = [([left, 5.0, 20.0, 20.0], 400.0, label, False)]
        pair.append(([left + 30, 30.0, 20.0, 25.0], 500.0, (label + 1) % 3, False))
        pictures.append(Annotated(number, 64, 96, (1.0, 1.0), (0.0, 0.0), pair))
    return pack(pictures)


BOXES = boxes()


def noisy_boxes(noise: float, seed: int = 1) -> Outputs:
    random, detections = drawn(seed), np.zeros((ITEMS, 4, 6), np.float32)
    detections[..., 5] = NOTHING
    for rows, record in zip(detections, BOXES, strict=True):
        for row, box in zip(rows, record["boxes"], strict=False):
            left, top, wide, high = box["bbox"] + random.normal(0, 0.5 + noise, 4)
            row[:] = left, top, left + wide, top + high, random.uniform(0.5, 1), box["category"]
    return Outputs((detections,), None, VALUES)


def with_corners() -> np.ndarray:
    """The same boxes, whose corners are two keypoints."""
    pictures = []
    for record in BOXES:
        objects = [
            (*box.tolist()[:4], [left, top, 2, left + wide, top + high, 2])
            for box in record["boxes"]
            for left, top, wide, high in [box["bbox"].tolist()]
        ]
        number = int(record["image_id"])
        pictures.append(Annotated(number, 64, 96, (1.0, 1.0), (0.0, 0.0), objects))
    return pack(pictures, keypoints=2)


POINTS = with_corners()


def noisy_points(noise: float, seed: int = 1) -> Outputs:
    [rows] = noisy_boxes(noise, seed).values
    sure = np.ones_like(rows[..., :1])
    corners = np.concatenate([rows[..., :2], sure, rows[..., 2:4], sure], axis=-1)
    return Outputs((np.concatenate([rows, corners], axis=-1),), None, VALUES)


def with_masks() -> np.ndarray:
    """The same boxes, whose upper halves are their masks."""
    pictures = []
    for record in BOXES:
        objects = [box.tolist() for box in record["boxes"]]
        halves = []
        for (left, top, wide, high), *_ in objects:
            inside = np.ones((int(high) // 2, int(wide)), bool)
            halves.append(object_masks.encode(inside, int(top), int(left), 64, 96))
        number = int(record["image_id"])
        pictures.append(Annotated(number, 64, 96, (1.0, 1.0), (0.0, 0.0), objects, halves))
    return pack(pictures)


OUTLINES = with_masks()


def noisy_outlines(noise: float, seed: int = 1) -> Outputs:
    [rows] = noisy_boxes(noise, seed).values
    texts = []
    for row in rows:
        found = row[: int(count(row)), :4].round().astype(int).clip(0, 64)
        halves = [
            object_masks.encode(
                np.ones(((bottom - top) // 2, right - left), bool), top, left, 64, 96
            )
            for left, top, right, bottom in found.tolist()
        ]
        texts.append(object_masks.join(halves))
    return Outputs((rows, np.array(texts, np.bytes_)), None, VALUES)


def masks() -> np.ndarray:
    """Bands of the classes; the first row is not scored."""
    drawn_masks = (np.arange(8)[:, None] // 2 + np.arange(8) // 4 + CLASSES[:, None, None]) % 7
    drawn_masks[:, 0] = 255
    return drawn_masks.astype(np.uint8)


MASKS = masks()


def noisy_masks(noise: float, seed: int = 1) -> Outputs:
    wrong = drawn(seed).random(MASKS.shape) < 0.05 + noise / (8 + noise)
    return Outputs((np.where(wrong, (MASKS + 1) % 7, MASKS),), None, VALUES)


PICTURES = drawn(5).integers(0, 256, (ITEMS, 12, 12, 3), np.uint8)
DEPTHS = drawn(6).uniform(1, 9, (ITEMS, 4, 4)).astype(np.float32)


def noisy_pictures(noise: float, seed: int = 1) -> Outputs:
    error = drawn(seed).normal(size=PICTURES.shape) * (0.05 + 0.1 * noise)
    values = np.moveaxis(PICTURES / 255 + error, 3, 1).astype(np.float32)
    return Outputs((values,), None, VALUES)


def noisy_depths(noise: float, seed: int = 1) -> Outputs:
    error = 1 + drawn(seed).normal(size=DEPTHS.shape) * (0.1 + 0.2 * noise)
    return Outputs(((DEPTHS * error)[..., None].astype(np.float32),), None, VALUES)


def black(indices: np.ndarray) -> np.ndarray:
    return np.zeros((len(indices), 64, 96, 3), np.uint8)


def detector() -> Task:
    config = DetectionConfig(resamples=300)
    frame = Frame(64, 96, 3, {"rows": (4, 6)}, config)
    decoder = Decoder("detections", frame, (0, 1, 2))
    return detection.build(("red", "green", "blue"), decoder, config.resamples)


def keypoints() -> Task:
    frame = Frame(64, 96, 3, {"rows": (4, 12)}, KeypointsConfig(), 2)
    decoder = Decoder("detections", frame, (0, 1, 2))
    return detection.build(NAMES[:3], decoder, 300, ("rows",), "keypoints", (0.1, 0.1))


def instances() -> Task:
    frame = Frame(64, 96, 3, {"rows": (4, 38)}, InstanceSegmentationConfig(), 0, 32)
    decoder = Decoder("detections", frame, (0, 1, 2), Prototypes(1, True), True)
    names = ("rows", "maps")
    return detection.build(NAMES[:3], decoder, 300, names, "instance_segmentation")


@dataclass(frozen=True, eq=False)
class Case:
    """A task, its targets, and the outputs of a model with some noise."""

    task: Task
    targets: Targets
    outputs: Callable[..., Outputs]


def windows(chosen: slice | np.ndarray) -> np.ndarray:
    return WINDOWS[chosen]


def own(metric: Any) -> Task:
    return custom.build(CustomConfig(direction="minimize", resamples=500), metric)


CASES = {
    "classification": Case(classification.build(NAMES), Targets(CLASSES), noisy_classes),
    "top5": Case(top5.build(NAMES), Targets(CLASSES), noisy_ranks),
    "binary": Case(binary.build(("no", "yes")), Targets(TWO), noisy_two),
    "multilabel": Case(multilabel.build(NAMES, resamples=500), Targets(SEVERAL), noisy_several),
    "anomaly": Case(anomaly.build(), Targets(CLIPS % 2, None, windows), noisy_windows),
    "clips": Case(join(anomaly.build(), "mean"), Targets(CLIPS % 2, CLIPS, windows), noisy_windows),
    "mae": Case(regression.build(resamples=500), Targets(TARGETS), noisy_values),
    "rmse": Case(regression.build("rmse", resamples=500), Targets(TARGETS), noisy_values),
    "number": Case(own(mean_error), Targets(TARGETS), noisy_values),
    "numbers": Case(own(errors), Targets(TARGETS), noisy_values),
    "detection": Case(detector(), Targets(BOXES, pictures=black), noisy_boxes),
    "keypoints": Case(keypoints(), Targets(POINTS, pictures=black), noisy_points),
    "instance_segmentation": Case(instances(), Targets(OUTLINES, pictures=black), noisy_outlines),
    "segmentation": Case(
        segmentation.build(NAMES, resamples=500), Targets(MASKS, pictures=black), noisy_masks
    ),
    "psnr": Case(dense.build(resamples=500), Targets(PICTURES), noisy_pictures),
    "ssim": Case(dense.build("ssim", resamples=500), Targets(PICTURES), noisy_pictures),
    "depth": Case(dense.build("rmse", resamples=500), Targets(DEPTHS), noisy_depths),
    "delta": Case(dense.build("delta", resamples=500), Targets(DEPTHS), noisy_depths),
    "pairs": Case(similarity.build(500), Targets(TARGETS[:, 0]), noisy_scores),
    "embeddings": Case(
        similarity.build(500, embeds=True), Targets(PAIR_SCORES, CLIPS), noisy_embeddings
    ),
    "cer": Case(ctc.build("cer", ALPHABET, 500), Targets(LINES), noisy_lines),
    "wer": Case(ctc.build("wer", ALPHABET, 500), Targets(LINES), noisy_lines),
    "entities": Case(tokens.build("entity_f1", TAGGER, 500), Targets(SENTENCES), noisy_tags),
    "words": Case(tokens.build("token_accuracy", TAGGER, 500), Targets(SENTENCES), noisy_tags),
    "perplexity": Case(perplexity.build(perplexity.NextToken(0, 7), 500), Targets(), noisy_words),
    "eer": Case(verification.build(resamples=500), Targets(FACE_OF), noisy_faces),
    "tar": Case(verification.build("tar", 0.1, resamples=500), Targets(FACE_OF), noisy_faces),
    "recall": Case(verification.build("recall", resamples=500), Targets(FACE_OF), noisy_faces),
    "agreement": Case(agreement.build(), Targets(), noisy_classes),
    "deviation": Case(deviation.build(("scores", "boxes")), Targets(), noisy_pair),
}


def joined(case: Case, how: str) -> Case:
    """Return a case of clips: two windows for each of the first samples."""
    second = np.arange(ITEMS)[:, None] % 2

    def outputs(noise: float, seed: int = 1) -> Outputs:
        windows = (case.outputs(noise, number) for number in (seed, seed + 7))
        [one], [other] = (each.values for each in windows)
        return replace(case.outputs(noise), values=(np.where(second, one[CLIPS], other[CLIPS]),))

    return Case(join(case.task, how), Targets(case.targets.labels[CLIPS], CLIPS), outputs)


CASES |= {
    "voted classes": joined(CASES["classification"], "vote"),
    "mean of two classes": joined(CASES["binary"], "mean"),
    "mean of labels": joined(CASES["multilabel"], "mean"),
    "largest value": joined(CASES["mae"], "max"),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@cache
def compare(case: Case, noise: float, other: float = 0.0) -> Comparison:
    """Compare two models of a case; cached, because resampling takes long."""
    outputs = (case.outputs(amount) for amount in (noise, other))
    return case.task.compare(*(case.task.score(values, case.targets) for values in outputs))


def defined(metrics):
    return {key: value for key, value in metrics.items() if value is not None}


def params_of(case: Case) -> dict[str, str]:
    params = case.task.describe()
    if case.task.name in ("regression", "dense", "verification", "ctc", "tokens"):
        params["task.primary"] = case.task.metric.name
    if case.task.name == "custom":
        params |= {"task.direction": "minimize", "task.metric._target_": "own.metric"}
    return params


def context(labels, outputs=None, final=PROBABILITIES, names=("a", "b"), named=True) -> TaskContext:
    return TaskContext("pets", labels, names, named, (4,), outputs or {"out": (2,)}, final)
