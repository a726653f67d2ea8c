"""The contract of every task, and the statistics against published values."""

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import special, stats
from scipy.special import gammaln
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    mean_absolute_error,
    roc_auc_score,
    top_k_accuracy_score,
)
from sklearn.metrics import root_mean_squared_error as sklearn_rmse

from resnet8ptq.config.schema import (
    BinaryConfig,
    CustomConfig,
    DetectionConfig,
    KeypointsConfig,
    RegressionConfig,
    ReportConfig,
    TaskConfig,
)
from resnet8ptq.core import console
from resnet8ptq.core import masks as object_masks
from resnet8ptq.core.errors import ConfigError, DataError, ModelError, TrackingError
from resnet8ptq.data.boxes import Annotated, pack
from resnet8ptq.evaluation.sequential import StoppingPlan
from resnet8ptq.evaluation.stopped_hits import read_pair, stop
from resnet8ptq.experiment.stopping import try_choice
from resnet8ptq.exploration import file_check
from resnet8ptq.exploration.search.searching import Step
from resnet8ptq.report import verdicts
from resnet8ptq.report.comparison import Cell, Family
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.report.verdicts import FAIL, PASS, UNDECIDED, decide
from resnet8ptq.sweeps import search
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
    registry,
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
from resnet8ptq.tasks.deviation import DeviationValues
from resnet8ptq.tasks.joining import join
from resnet8ptq.tasks.scoring import statistics
from resnet8ptq.tasks.scoring.bootstrap import Replicates
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.metric import UNDEFINED
from resnet8ptq.tasks.scoring.outputs import (
    LOGITS,
    PROBABILITIES,
    VALUES,
    Outputs,
    Targets,
    TaskContext,
)
from resnet8ptq.tasks.scoring.ranking import AUC, Ranking
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE
from resnet8ptq.tasks.scoring.values import Paired
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.cells import amend, judged_of

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


def largest(outputs, targets):
    """A metric with a mistake."""
    return outputs.max(axis=0)


class Scaled:
    """A metric with settings."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, outputs, targets):
        return self.factor * errors(outputs, targets)


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
    frame = Frame(64, 96, 3, {"rows": (4, 38)}, DetectionConfig("instance_segmentation"), 0, 32)
    decoder = Decoder("detections", frame, (0, 1, 2), Prototypes(1, True), True)
    names = ("rows", "maps")
    return detection.build(NAMES[:3], decoder, 300, names, "instance_segmentation")


@dataclass(frozen=True)
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


def test_every_task_has_a_case():
    assert {case.task.name for case in CASES.values()} == set(registry.TASKS)


@every
def test_a_task_is_pickled_to_another_process(case):
    """Deployment runs the artifact in a process of its own."""
    task = pickle.loads(pickle.dumps(case.task))
    comparison = compare(replace(case, task=task), 0.5)
    assert task.metrics(comparison) == case.task.metrics(compare(case, 0.5))


def compare(case: Case, noise: float, other: float = 0.0):
    outputs = (case.outputs(amount) for amount in (noise, other))
    return case.task.compare(*(case.task.score(values, case.targets) for values in outputs))


def defined(metrics):
    return {key: value for key, value in metrics.items() if value is not None}


@every
def test_a_model_beside_itself_differs_in_nothing(case):
    comparison = compare(case, 0.0)
    metrics, value = defined(case.task.metrics(comparison)), comparison.model.value
    assert comparison.delta == metrics["drop"] == 0
    assert metrics.get("paired/p_value", 1.0) == 1
    assert metrics.get("ci95/delta_low", 0) <= 0 <= metrics.get("ci95/delta_high", 0)
    assert comparison.paired.model.against(comparison.paired.model)[1] == 1
    assert metrics[case.task.metric.name] == value
    assert metrics["ci95/value_low"] <= value <= metrics["ci95/value_high"]


@every
def test_a_loss_is_within_a_wide_limit_and_beyond_a_narrow_one(case):
    comparison = compare(case, 0.5)
    metric, items = case.task.metric, comparison.model.total
    drop = case.task.metrics(comparison)["drop"]
    assert drop > 0
    limits, paired = (0.01 * drop, drop, 2 * drop + 0.3), comparison.paired
    margins = [paired.margin(metric, limit, items) for limit in limits]
    narrow, same, wide = (margin.p_within for margin in margins)
    assert narrow > 0.5 > wide
    assert 0.05 < same < 0.95
    assert margins[0].p_beyond < 0.5 < margins[2].p_beyond
    assert margins[0].items_needed(items, 0.05) < margins[1].items_needed(items, 0.05)


@every
def test_a_worse_model_is_distinguished(case):
    comparison = compare(case, 3.0)
    metrics = case.task.metrics(comparison)
    assert metrics["drop"] > 0
    if case.task.name in ("agreement", "deviation"):  # FP32 is the reference, and not measured
        unmeasured = ("baseline/", "paired/p_value", "ci95/delta")
        assert not [key for key in defined(metrics) if key.startswith(unmeasured)]
    else:
        assert metrics["paired/p_value"] < 0.01
        low, high = metrics["ci95/delta_low"], metrics["ci95/delta_high"]
        assert low <= comparison.delta <= high
        assert not low <= 0 <= high
    better = compare(case, 0.05)
    p_value = comparison.paired.model.against(better.paired.model)[1]
    assert p_value == better.paired.model.against(comparison.paired.model)[1] < 0.01
    # whose raw outputs are out
    reduced = ("detection", "keypoints", "instance_segmentation", "segmentation")
    reduced = (*reduced, "ctc", "perplexity")
    if case.task.name not in ("binary", *reduced):
        assert comparison.sqnr_db < better.sqnr_db


# The consumers of a loss: each decides by it whether a model is within a limit.


def family_of(case: Case, comparison: Comparison) -> Family:
    metrics, tags = defined(case.task.metrics(comparison)), {"status": "ok"}
    record = RunRecord.of(
        "run", {"dtype": "int8"} | params_of(case), metrics | {"size_bytes": 1}, tags
    )
    return Family((Cell(record, "model", comparison.paired),))


def searches(case: Case, comparison: Comparison, limits: ReportConfig) -> bool:
    """As `nodes_to_exclude=auto` and `precision.plan=auto` do, which take the limit as a number."""
    evaluator, limit = mock.Mock(task=case.task), case.task.metric.limit(limits)
    evaluator.compare.return_value.comparison = comparison
    samples = SimpleNamespace(groups=CLIPS)  # so that all are scored
    tried = try_choice(evaluator, None, samples, limit, None)
    return tried.drop <= limit and tried.p < 0.5


def checks_a_file(case: Case, comparison: Comparison, limits: ReportConfig) -> bool:
    data = mock.MagicMock()
    data.train.__len__.return_value = 1
    with mock.patch.object(file_check, "find_cause", return_value="") as find_cause:
        evaluator: Any = SimpleNamespace(task=case.task)
        config: Any = SimpleNamespace(report=limits)
        file_check.check_against_fp32(evaluator, data, Path(), comparison, config, Path())
    return not find_cause.called


def judges(case: Case, comparison: Comparison, limits: ReportConfig) -> bool:
    return judged_of(family_of(case, comparison), limits)["run"].startswith(PASS)


def recommends(case: Case, comparison: Comparison, limits: ReportConfig) -> bool:
    family = family_of(case, comparison)
    return bool(ModelSelection(verdicts.assess(family, limits)).within)


def searches_steps(case: Case, comparison: Comparison, limits: ReportConfig) -> bool:
    [record], limit = family_of(case, comparison).records, case.task.metric.limit(limits)
    tried = search.measure(Step("onnx", "start", {}, "", ""), record, 1.0)
    return tried.loss + tried.error <= limit


CONSUMERS = (searches, checks_a_file, judges, recommends, searches_steps)


@every
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_every_consumer_has_the_loss_in_the_unit_of_the_limit(case, consumer):
    """The limit lies between the losses of a good and of a bad model."""
    metric, noise = case.task.metric, 0.5 if case.task.name == "binary" else 0.1  # its AUC is 1
    good, bad = compare(case, noise), compare(case, 3.0)
    losses = [case.task.metrics(pair)["drop"] for pair in (good, bad)]
    limit = 0.3 * losses[1]
    if metric.limit_key == "min_sqnr_db":  # so that a ratio of amplitudes would be beyond it
        limit = 5 * losses[0]
        limits = ReportConfig(max_drop=1e-9, min_sqnr_db=-10 * math.log10(limit))
    else:
        limits = ReportConfig(max_drop=limit, min_sqnr_db=99.0)
    assert metric.limit(limits) == pytest.approx(limit)
    assert consumer(case, good, limits)
    assert not consumer(case, bad, limits)


@every
def test_noisier_outputs_lose_more(case):
    pairs = [compare(case, noise) for noise in (0.0, 0.3, 1.0, 4.0)]
    losses = [pair.loss() for pair in pairs]
    assert losses == [case.task.metrics(pair)["drop"] for pair in pairs] == sorted(losses)
    assert losses[0] == 0 < losses[-1]


@every
def test_an_output_that_answers_nothing_is_named(case):
    exact, noisy = case.outputs(0.0), case.outputs(1.0)
    names = [f"output {number}" for number, _ in enumerate(exact.values)]
    find = case.task.scope.find_silent
    assert find(names, exact, exact) == find(names, noisy, exact) == ""
    zero = replace(exact, values=tuple(np.zeros_like(values) for values in exact.values))
    assert "zero for every sample" in find(names, zero, exact)
    same = replace(exact, values=tuple(np.repeat(v[:1], ITEMS, axis=0) for v in exact.values))
    assert "the same for every sample" in find(names, same, exact)
    assert find(names, same, same) == ""  # as FP32's


def test_few_samples_with_most_of_the_signal_do_not_hide_a_network_that_answers_nothing():
    """The mean error of zeros is 20%, and the samples decide nothing."""
    signal = np.full((100, 4), 0.1, np.float32)
    signal[0] = 5
    exact, zero = (Outputs((values,), None, VALUES) for values in (signal, 0 * signal))
    case = Case(deviation.build(("scores",)), Targets(), lambda noise: zero if noise else exact)
    comparison = compare(case, 1.0)
    [cell] = family_of(case, comparison).cells
    [run] = verdicts.assess(Family((cell,)), ReportConfig()).records
    assert (run.verdict, comparison.loss()) == (UNDECIDED, 1.0)
    cell = amend(cell, params={"silent": case.task.scope.find_silent(("scores",), zero, exact)})
    judged = judged_of(Family((cell,)))
    assert judged == {"run": "fail, output scores is zero for every sample"}


@every
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_the_samples_does_not_matter(case, seed):
    order = np.random.default_rng(seed).permutation(ITEMS)
    task, targets = case.task, case.targets
    labels, groups = (
        None if array is None else array[order] for array in (targets.labels, targets.groups)
    )
    shuffled = Targets(labels, groups, lambda part: WINDOWS[order][part])

    def shuffle(outputs: Outputs) -> Outputs:
        return Outputs(tuple(values[order] for values in outputs.values), None, outputs.final)

    other = task.compare(*(task.score(shuffle(case.outputs(n)), shuffled) for n in (0.5, 0.0)))
    comparison = compare(case, 0.5)
    assert other.model.value == pytest.approx(comparison.model.value, rel=1e-6)
    assert other.delta == pytest.approx(comparison.delta, rel=1e-4, abs=1e-9)
    expected, metrics = (
        defined(pair.model.more() | task.pair_metrics(pair)) for pair in (comparison, other)
    )
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


@every
def test_kept_values_read_back(case, tmp_path):
    """A report made later tests runs against each other as one made now would."""
    runs = [compare(case, noise) for noise in (0.5, 0.7)]
    kept = []
    for number, comparison in enumerate(runs):
        path = tmp_path / f"{number}.npz"
        np.savez_compressed(path, **case.task.files.arrays(comparison))
        with np.load(path, allow_pickle=False) as arrays:
            kept.append(read_pair(case.task.test, arrays))
    model, other = (run.paired.model for run in runs)
    assert kept[0].model.against(kept[1].model) == model.against(other)
    assert kept[0].by_class(2) == runs[0].paired.by_class(2)
    with pytest.raises((KeyError, ValueError)):
        read_pair(case.task.test, {"predictions": np.zeros((2, 2)), "scores": np.zeros(1)})


@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.task.test.sequential],
    ids=lambda c: c.task.name,
)
def test_a_run_that_stopped_early_is_read_back_with_its_plan(case):
    stopped = stop(compare(case, 0.5), StoppingPlan(2 * ITEMS, 0.05, 0.05))
    pair = read_pair(case.task.test, case.task.files.arrays(stopped))
    assert pair.metrics() == stopped.paired.metrics() != {}
    assert pair.margin(case.task.metric, 0.02, ITEMS).p_within == stopped.p_within(0.02)
    assert case.task.metrics(stopped).keys() > case.task.metrics(compare(case, 0.5)).keys()


def params_of(case: Case) -> dict[str, str]:
    params = case.task.describe()
    if case.task.name in ("regression", "dense", "verification", "ctc", "tokens"):
        params["task.primary"] = case.task.metric.name
    if case.task.name == "custom":
        params |= {"task.direction": "minimize", "task.metric._target_": "own.metric"}
    return params


@every
def test_a_report_recalls_the_task_from_the_params(case):
    recalled = registry.recall(params_of(case), case.task.class_names)
    assert recalled.name == case.task.name
    assert replace(recalled.metric, title="") == replace(case.task.metric, title="")
    # Their classes are in the run's files.
    in_files = (
        *("detection", "keypoints", "instance_segmentation", "segmentation", "multilabel"),
        "tokens",
    )
    in_report = case.task.name not in in_files
    assert recalled.class_names == (case.task.class_names if in_report else ())


@every
def test_every_task_draws_its_figures_and_fills_its_tables(case):
    comparison = compare(case, 0.5)
    figures = case.task.files.figures(comparison, "title $ with \\frac{")
    assert list(figures) == list(case.task.files.captions)
    for rows in case.task.files.tables(comparison).values():
        assert len({len(row) for row in rows}) == 1
    assert case.task.metric.show(comparison.model.value) in case.task.summary(comparison)


@pytest.mark.parametrize("name", ["no such task", "../x"])
def test_a_store_cannot_name_code(name):
    with pytest.raises(TrackingError, match="scored_as: "):
        registry.recall({"scored_as": name})
    with pytest.raises(TrackingError, match="scored_as: "):
        registry.recall({"scored_as": "regression", "task.primary": "__import__"})


# Which task fits


def setting(labels, outputs=None, final=PROBABILITIES, names=("a", "b"), named=True) -> TaskContext:
    return TaskContext("pets", labels, names, named, (4,), outputs or {"out": (2,)}, final)


CHOSEN = [  # labels and outputs, and the task that `auto` takes
    (setting(TWO), "classification"),
    (setting(TWO, {"out": (1,)}), "binary"),
    (setting(TARGETS), "regression"),
    (setting(PICTURES, {"out": (3, 12, 12)}, VALUES), "dense"),
    (setting(MASKS, {"out": (7, 8, 8)}, VALUES, NAMES), "segmentation"),
    (setting(SENTENCES, {"out": (None, 5)}, VALUES, TAGS), "tokens"),
    (setting(SEVERAL, {"out": (7,)}, LOGITS, NAMES), "multilabel"),
    (setting(np.repeat(LINES[:9], 2), {"out": (5,)}, LOGITS), "verification"),
    (setting(np.repeat(LINES[:9], 2), {"out": (64,)}, VALUES), "verification"),
    (setting(None), "agreement"),
    (setting(None, {"out": (4,)}, VALUES), "deviation"),  # a reconstruction
    (setting(None, {"out": (1,)}, LOGITS), "deviation"),
    (setting(None, {"out": (3,)}, LOGITS), "deviation"),  # logits, or three values
    (setting(TARGETS, {"out": (2,)}, LOGITS), "regression"),
    (setting(None, {"scores": (7, 2), "boxes": (7, 4)}, VALUES), "deviation"),
]


@pytest.mark.parametrize(("data", "name"), CHOSEN)
def test_the_task_that_fits(data, name, caplog):
    caplog.set_level("INFO")
    console.log_once.cache_clear()
    for _ in range(2):
        assert registry.make(TaskConfig(), data).name == name
    [line] = [line for line in caplog.messages if line.startswith("task=auto took ")]
    assert line.startswith(f"task=auto took {name}: ")  # once, with the reason


def test_every_task_that_auto_takes_has_its_reason():
    chosen = {name for _, name in CHOSEN}
    # Detectors' labels and alphabets have tests of their own.
    assert set(registry.BECAUSE) == chosen | {
        *("detection", "keypoints", "instance_segmentation", "ctc")
    }


# FP32 no better than chance


NOISE = RANDOM.normal(size=(ITEMS, 7)).astype(np.float32)
BROKEN = {  # outputs of a broken network by task
    "classification": Outputs((np.eye(7, dtype=np.float32)[np.zeros(ITEMS, int)],)),
    "top5": Outputs((drawn(4).random((ITEMS, 7)).astype(np.float32),)),
    "binary": Outputs((drawn(4).random((ITEMS, 1)).astype(np.float32),), None, PROBABILITIES),
    "multilabel": Outputs((NOISE,), None, LOGITS),
    "anomaly": Outputs((WINDOWS + NOISE[:, :4],), None, VALUES),
    "regression": Outputs((TARGETS[::-1].copy(),), None, VALUES),
    "verification": Outputs((NOISE,), None, LOGITS),
    "ctc": Outputs((drawn(4).integers(0, 8, (ITEMS, 12)),), None, VALUES),
    "perplexity": Outputs(
        perplexity.NextToken(0, 7)((drawn(4).normal(size=(ITEMS, 12, 7)),), WORDS), None, VALUES
    ),
    "similarity": Outputs((np.ones((ITEMS, 1), np.float32),), None, VALUES),
    "segmentation": Outputs((drawn(4).integers(0, 7, MASKS.shape, np.uint8),), None, VALUES),
    "detection": Outputs((np.full((ITEMS, 4, 6), NOTHING, np.float32),), None, VALUES),
    "keypoints": Outputs((np.full((ITEMS, 4, 12), NOTHING, np.float32),), None, VALUES),
    "instance_segmentation": Outputs(
        (np.full((ITEMS, 4, 6), NOTHING, np.float32), np.full(ITEMS, b"")), None, VALUES
    ),
}


@every
def test_a_good_fp32_network_is_not_doubted(case):
    scores = case.task.score(case.outputs(0.0), case.targets)
    assert case.task.doubt(scores, None) is None


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.task.name in BROKEN])
def test_fp32_at_chance_is_doubted(case):
    scores = case.task.score(BROKEN[case.task.name], case.targets)
    doubt = case.task.doubt(scores, None)
    assert doubt is not None
    assert doubt.startswith(("NEAR CHANCE, ", "NO BETTER THAN THE MEAN, ", "NEAR ZERO, "))


@pytest.mark.parametrize(("share", "doubted"), [(0.02, True), (0.1, False)])
def test_many_samples_prove_a_little_skill_which_is_doubted(share, doubted):
    """As of a network that takes pixels from 0 to 1, and gets them from 0 to 255."""
    labels = drawn(0).integers(0, 7, 20_000)
    predictions = np.where(drawn(1).random(20_000) < share, labels, drawn(2).permutation(labels))
    assert statistics.above_chance(labels, predictions, 7) < 0.05
    task = CASES["classification"].task
    scores = task.score(Outputs((np.eye(7, dtype=np.float32)[predictions],)), Targets(labels))
    assert (task.doubt(scores, None) is not None) == doubted


def test_constant_targets_raise_no_doubt():
    task, same = regression.build(resamples=100), Targets(np.ones((20, 1), np.float32))
    outputs = Outputs((np.full((20, 1), 1.1, np.float32),), None, VALUES)
    assert task.doubt(task.score(outputs, same), None) is None


# The limit of outputs without labels


def compared_at(db: float, items: int = 300) -> tuple[Task, Comparison]:
    """Compare two outputs with noise of this SQNR; one is ten thousand times as large."""
    random = drawn(int(db))
    signal = [scale * random.normal(size=(items, 8)) for scale in (1, 1e4)]
    noise = [random.normal(size=(items, 8)) for _ in signal]
    scale = 10 ** (-db / 20)
    noisy = [
        x + scale * n * np.linalg.norm(x) / np.linalg.norm(n)
        for x, n in zip(signal, noise, strict=True)
    ]
    task = deviation.build(("a", "b"))
    outputs = (Outputs(tuple(values), None, VALUES) for values in (noisy, signal))
    return task, task.compare(*(task.score(values, Targets()) for values in outputs))


@pytest.mark.parametrize(("db", "outcome"), [(28, PASS), (22, FAIL), (25.05, UNDECIDED)])
def test_without_labels_the_limit_is_an_sqnr(db, outcome):
    task, comparison = compared_at(db)
    assert comparison.sqnr_db == pytest.approx(db)
    kept = read_pair(task.test, comparison.paired.arrays())
    limit = task.metric.limit(ReportConfig())
    [verdict] = decide([(kept.margin(task.metric, limit, 300), 300)])
    assert verdict.outcome == outcome
    metrics = task.metrics(comparison)
    assert metrics["drop"] == pytest.approx(10 ** (-db / 10))
    assert (metrics["drop"] <= limit) == (db > 25)
    assert (
        task.metric.say_limit(task.metric.limit(ReportConfig()))
        == "SQNR of at least 25 dB against FP32"
    )
    assert task.metric.show_limit(ReportConfig()) == "report.min_sqnr_db=25"


def test_the_bound_of_the_sqnr_keeps_its_level():
    """Simulated at the limit: the one-sided test is wrong in about 5% of cases."""
    random, wrong = drawn(8), 0
    for _ in range(2000):
        signal = random.chisquare(8, 200) / 8
        noise = 0.01 * random.chisquare(8, 200) / 8
        values = DeviationValues(replicates=noise, noise=noise, signal=signal)
        margin = values.margin(values, deviation.RELATIVE_ERROR, 0.01, 200)
        wrong += margin.p_within < 0.05
    assert 0.02 < wrong / 2000 < 0.06


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("classification", setting(None), ConfigError, "labels of pets are none, expected classes"),
        ("classification", setting(LINES), ConfigError, "try numpy.unique(labels, "),
        ("classification", setting(TARGETS), ConfigError, "float32 [120, 2], expected classes"),
        ("classification", setting(TWO, {"out": (3,)}), ModelError, "returns 3 values; pets"),
        (
            "classification",
            setting(TWO + 1, names=("0", "1", "2"), named=False),
            ModelError,
            "the labels start at 1: subtract 1",
        ),
        (
            "classification",
            setting(TWO, {"a": (7, 2)}, VALUES),
            ModelError,
            "returns a [7, 2]; exp",
        ),
        ("binary", setting(TWO * 0), ConfigError, "expected two, with samples of both"),
        ("anomaly", setting(CLASSES), ConfigError, "expected 0 (normal) and 1 (an anomaly)"),
        ("anomaly", setting(None), ConfigError, "labels of pets are None; expected 0 (normal)"),
        ("anomaly", setting(TWO), ModelError, "the reconstructed input [4], or a score"),
        ("regression", setting(None), ConfigError, "are none, expected values [N, ...]"),
        (
            "regression",
            setting(TARGETS, {"out": (3,)}),
            ModelError,
            "2 values to predict; expected on",
        ),
        ("segmentation", setting(TWO), ConfigError, "pets has no masks; expected a folder of"),
        ("segmentation", setting(MASKS, {"out": (3,)}), ModelError, "takes values [classes, "),
        (
            "segmentation",
            setting(MASKS, {"out": (5, 8, 8)}, VALUES, ()),
            ModelError,
            "returns out [5, 8, 8], and pets has 7 classes and labels up to 6",
        ),
        (
            "dense",
            setting(PICTURES, {"out": (3, 24, 24)}),
            ModelError,
            "pets has targets [12, 12, 3]; task=dense expects one output of their size",
        ),
        ("agreement", setting(None, {"out": (1,)}), ModelError, "task=deviation compares values"),
    ],
)
def test_data_that_do_not_fit_are_refused_in_one_line(name, data, error, message):
    with pytest.raises(error) as caught:
        registry.make(registry._find(name).schema(name=name), data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_need_their_group():
    with pytest.raises(ConfigError, match="try task=binary"):
        registry.make(TaskConfig("binary"), setting(TWO))


def test_a_network_may_know_more_classes_than_unnamed_samples_show():
    data = setting(TWO, {"out": (5,)}, named=False)
    assert registry.make(TaskConfig(), data).class_names == ("0", "1", "2", "3", "4")


# A metric of the user


def made(target: str | None, **arguments: Any) -> Task:
    config = CustomConfig(metric={"_target_": target, **arguments}, direction="minimize")
    return registry.make(config, setting(TARGETS))


def test_functions_and_classes_are_called():
    function = made(f"{__name__}.errors")
    scaled = made(f"{__name__}.Scaled", factor=10)
    values = [task.score(noisy_values(0.5), Targets(TARGETS)).value for task in (function, scaled)]
    assert values[1] == pytest.approx(10 * values[0])
    assert function.metric.title == "errors"


def test_other_code_of_a_metric_is_another_identity(tmp_path, monkeypatch):
    """A resumed sweep must not take results of another metric."""
    monkeypatch.syspath_prepend(tmp_path)
    fingerprints = []
    for number in (1, 2):
        path = tmp_path / "edited_metric.py"
        path.write_text(f"def metric(outputs, targets):\n    return {number}\n")
        config = CustomConfig(metric={"_target_": "edited_metric.metric"})
        fingerprints.append(registry.fingerprint(config))
    assert fingerprints[0] != fingerprints[1]
    assert registry.fingerprint(CustomConfig(metric={"_target_": "math.sqrt"})) == ""
    assert registry.fingerprint(TaskConfig()) == registry.fingerprint(BinaryConfig()) == ""


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "task.metric._target_: got null, expected a callable"),
        ("no_such_module.metric", r"got no_such_module.metric \("),
        (f"{__name__}.ITEMS", f"got {__name__}.ITEMS"),
        (f"{__name__}.largest", r"largest returns \(2,\)"),
        ("math.sqrt", "sqrt failed"),
    ],
)
def test_a_wrong_metric_is_refused_in_one_line(target, message):
    with pytest.raises(ConfigError, match=message) as caught:
        made(target).score(noisy_values(0.5), Targets(TARGETS))
    assert "\n" not in str(caught.value)


# Against others


def test_classification_agrees_with_scikit_learn():
    scores = classification.score(noisy_classes(2.0), Targets(CLASSES))
    more, predictions = scores.more(), scores.per_sample.predictions
    assert more["macro_f1"] == pytest.approx(f1_score(CLASSES, predictions, average="macro"))
    expected = top_k_accuracy_score(CLASSES, scores.probabilities, k=5)
    assert more["top5_accuracy"] == pytest.approx(expected)


def test_regression_agrees_with_scikit_learn():
    scores = regression.build().score(noisy_values(0.5), Targets(TARGETS))
    [values] = noisy_values(0.5).values
    assert scores.value == pytest.approx(mean_absolute_error(TARGETS, values), rel=1e-5)
    of_all = sklearn_rmse(TARGETS.ravel(), values.ravel())
    assert scores.more()["rmse"] == pytest.approx(of_all, rel=1e-5)


@given(
    arrays.arrays(np.float64, 30, elements=st.sampled_from([0.0, 0.25, 0.5, 0.75])),
    arrays.arrays(np.bool_, 30).filter(lambda labels: 0 < labels.sum() < 30),
)
@settings(max_examples=50)
def test_auc_is_scikit_learns_with_ties(scores, positive):
    area = statistics.auc(scores, positive)
    assert area.value == pytest.approx(roc_auc_score(positive, scores))
    turned = statistics.auc(-scores, positive)
    assert turned.value == pytest.approx(1 - area.value)
    low, high = area.interval
    assert 0 <= low <= area.value <= high <= 1


@pytest.mark.parametrize("groups", [None, CLIPS])
def test_anomaly_scores_are_means_over_clips(groups):
    outputs = noisy_windows(0.3)
    task = join(anomaly.build(max_fpr=0.2), "mean")
    scores = task.score(outputs, Targets(CLIPS % 2, groups, windows))
    errors, labels = ((outputs.values[0] - WINDOWS) ** 2).mean(axis=1), CLIPS % 2
    if groups is not None:
        errors, labels = errors.reshape(-1, 2).mean(axis=1), np.arange(ITEMS // 2) % 2
    np.testing.assert_allclose(scores.scores, errors, rtol=1e-5)
    assert scores.value == pytest.approx(roc_auc_score(labels, errors))
    assert scores.more()["pauc"] == pytest.approx(roc_auc_score(labels, errors, max_fpr=0.2))


def test_the_windows_of_a_clip_have_one_label():
    task = join(anomaly.build(), "mean")
    with pytest.raises(DataError, match="a group has samples of several labels"):
        task.score(noisy_windows(0.3), Targets(np.arange(ITEMS) % 2, CLIPS, windows))


@pytest.fixture(scope="module")
def clips() -> tuple[np.ndarray, Outputs]:
    """Group numbers of 1 to 4 windows in any order, and their logits of 7 classes."""
    numbers = drawn(2).permutation(np.repeat(np.arange(48), np.arange(48) % 4 + 1))
    return numbers, Outputs((drawn(3).normal(size=(ITEMS, 7)).astype(np.float32),), None, LOGITS)


def by_group(values: np.ndarray, numbers: np.ndarray, reduce: Any) -> np.ndarray:
    return np.stack([reduce(values[numbers == number], axis=0) for number in range(48)])


@pytest.mark.parametrize(("how", "reduce"), [("mean", np.mean), ("max", np.max), ("vote", np.mean)])
def test_joined_classes_are_those_of_numpy(clips, how, reduce):
    numbers, outputs = clips
    labels = drawn(4).integers(0, 7, 48)
    scores = join(classification.build(NAMES), how).score(
        outputs, Targets(labels[numbers], numbers)
    )
    values = special.softmax(outputs.values[0].astype(float), axis=1)
    if how == "vote":
        values = np.eye(7)[values.argmax(axis=1)]
    expected = by_group(values, numbers, reduce)
    np.testing.assert_allclose(scores.probabilities, expected, atol=1e-6)
    assert scores.total == 48
    assert scores.value == accuracy_score(labels, expected.argmax(axis=1))
    np.testing.assert_array_equal(scores.logits, outputs.values[0])  # of the windows, for the SQNR


@pytest.mark.parametrize(("how", "reduce"), [("mean", np.mean), ("max", np.max), ("vote", np.mean)])
def test_joined_labels_and_two_classes_are_those_of_scikit_learn(clips, how, reduce):
    numbers, outputs = clips
    labels = drawn(4).random((48, 7)) < 0.4
    task = join(multilabel.build(NAMES, threshold=0.4), how)
    scores = task.score(outputs, Targets(labels[numbers], numbers))
    values = special.expit(outputs.values[0].astype(float))
    expected = by_group(values > 0.4 if how == "vote" else values, numbers, reduce)
    precision = average_precision_score(labels, expected, average="macro")
    assert scores.value == pytest.approx(precision, abs=1e-6)
    f1 = f1_score(labels, expected > 0.4, average="macro", zero_division=0)
    assert scores.more()["macro_f1"] == pytest.approx(f1, abs=1e-6)
    task = join(binary.build(("no", "yes"), threshold=0.4), how)
    one = Outputs((outputs.values[0][:, :1],), None, LOGITS)
    scores = task.score(one, Targets(labels[numbers, 0].astype(int), numbers))
    assert scores.value == pytest.approx(roc_auc_score(labels[:, 0], expected[:, 0]), abs=1e-6)
    right = accuracy_score(labels[:, 0], expected[:, 0] > 0.4)
    assert scores.more()["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize(("how", "reduce"), [("mean", np.mean), ("max", np.max)])
def test_joined_values_are_those_of_scikit_learn(clips, how, reduce):
    numbers, outputs = clips
    targets = drawn(4).normal(size=(48, 7))
    scores = join(regression.build(), how).score(outputs, Targets(targets[numbers], numbers))
    expected = by_group(outputs.values[0].astype(float), numbers, reduce)
    assert scores.value == pytest.approx(mean_absolute_error(targets, expected), abs=1e-6)


@pytest.mark.parametrize(
    ("config", "grouped", "message"),
    [
        (TaskConfig("classification", join="mean"), False, "got mean, expected null: pets has no"),
        (RegressionConfig(join="vote"), True, "got vote, expected null, mean or max with"),
        (TaskConfig("top5", join="max"), True, "got max, expected null with task=top5"),
    ],
)
def test_samples_that_cannot_be_joined_are_refused(config, grouped, message):
    labels = np.eye(7)[CLASSES] if config.name == "regression" else CLASSES
    data = replace(setting(labels, {"out": (7,)}, names=NAMES), grouped=grouped)
    with pytest.raises(ConfigError, match=f"task.join: {message}"):
        registry.make(config, data)


def test_the_chosen_task_joins_samples_too():
    data = replace(setting(CLASSES, {"out": (7,)}, names=NAMES), grouped=True)
    assert registry.make(TaskConfig(join="vote"), data).scope.joins_groups
    assert not registry.make(TaskConfig(), data).scope.joins_groups


def test_one_output_is_two_classes():
    """A sigmoid, its logit, and a softmax of both say the same."""
    [one] = noisy_two(0.5).values
    logit = np.log(one / (1 - one))
    same = (
        Outputs((one,)),
        Outputs((logit,), None, LOGITS),
        Outputs((np.concatenate([1 - one, one], axis=1),)),
        Outputs((np.concatenate([0 * logit, logit], axis=1),), None, LOGITS),
    )
    task = binary.build(("no", "yes"), threshold=0.3)
    for outputs in same:
        scores = task.score(outputs, Targets(TWO))
        assert scores.more()["accuracy"] == ((one[:, 0] > 0.3) == TWO).mean()
        assert scores.value == pytest.approx(roc_auc_score(TWO, one[:, 0]))


def hits(cells):
    """Return whether each of two models is right, from counts: both, the first, the other, none."""
    ours = np.repeat([True, True, False, False], cells)
    return ours, np.repeat([True, False, True, False], cells)


def margin(ours, theirs, limit):
    won, lost = statistics.flips(ours, theirs)
    return statistics.tango(lost, won, len(ours), limit)


def test_tango_as_published():
    """Without the correction: Newcombe (1998), table II, 36, 12, 2, 0; and the study of Bentur et
    al. (2009), 1, 1, 7, 12, as Fagerland, Lydersen and Laake work it out (2014)."""
    for cells, low, high in (((36, 12, 2, 0), 0.0611, 0.3447), ((1, 1, 7, 12), -0.517, -0.026)):
        ours, theirs = hits(cells)
        for limit, z in ((-low, -statistics.Z95), (-high, statistics.Z95)):
            assert margin(ours, theirs, limit).z == pytest.approx(z, abs=0.01)


@given(st.tuples(*[st.integers(0, 40)] * 4), st.floats(-0.9, 0.9))
@example((0, 0, 0, 1), 0.3)
@settings(max_examples=60)
def test_tango_takes_the_likeliest_probabilities_under_the_limit(cells, limit):
    """Against a search over the multinomial likelihood."""
    both, lost, won, none = cells
    assume(sum(cells) and (lost + won or abs(limit) > 1e-3))
    total = sum(cells)
    won_at = np.linspace(max(0, -limit), (1 - limit) / 2, 200_001)[1:-1]
    likely = won * np.log(won_at) + lost * np.log(won_at + limit)
    likely += (both + none) * np.log(1 - limit - 2 * won_at)
    chosen = won_at[likely.argmax()]
    error = np.sqrt(total * (2 * chosen + limit - limit**2))
    margin = statistics.tango(lost, won, total, limit)
    assert margin.z == pytest.approx((lost - won - total * limit) / error, rel=2e-3, abs=2e-3)
    assert margin.correction == pytest.approx(0.5 / error, rel=2e-3)


@given(st.tuples(*[st.integers(0, 60)] * 4))
@example((0, 0, 1, 0))
@example((0, 1, 0, 0))
@settings(max_examples=60)
def test_tango_s_interval_is_what_its_test_does_not_reject(cells):
    assume(sum(cells))
    ours, theirs = hits(cells)
    low, high = statistics.tango_interval(ours, theirs)
    delta = ours.mean() - theirs.mean()
    assert -1 <= low <= delta <= high <= 1
    mirrored = statistics.tango_interval(theirs, ours)
    assert mirrored == pytest.approx((-high, -low), abs=1e-9)
    for end, side in ((low, "p_within"), (high, "p_beyond")):
        if abs(end) < 1 - 1e-6:
            assert (
                getattr(margin(ours, theirs, -end), side) == pytest.approx(0.025, abs=1e-3)
                or delta == end
            )


def test_wrong_passes_and_fails_are_no_more_than_the_level():
    """By all outcomes of 400 samples with 1% of wins, where the loss is the limit itself."""
    total, limit, won_at = 400, 0.01, 0.01
    wrong_pass = wrong_fail = 0.0
    for lost in range(60):
        for won in range(60):
            kept = 1 - 2 * won_at - limit
            logs = gammaln(total + 1) - gammaln(lost + 1) - gammaln(won + 1)
            logs += -gammaln(total - lost - won + 1) + won * np.log(won_at)
            logs += lost * np.log(won_at + limit) + (total - lost - won) * np.log(kept)
            margin = statistics.tango(lost, won, total, limit)
            wrong_pass += np.exp(logs) * (margin.p_within <= 0.05)
            wrong_fail += np.exp(logs) * (margin.p_beyond <= 0.05)
    assert 0.02 < wrong_pass <= 0.05
    assert 0.02 < wrong_fail <= 0.05


def test_margins_of_means_are_student_s():
    """Against scipy's t-test of one sample."""
    losses = np.random.default_rng(3).normal(0.01, 0.05, 12)
    error = losses.std(ddof=1) / np.sqrt(12)
    margin = statistics.Margin.student(losses.mean() - 0.02, error, 12)
    expected = stats.ttest_1samp(losses, 0.02, alternative="less").pvalue
    assert margin.p_within == pytest.approx(expected)
    assert margin.p_beyond == pytest.approx(1 - expected)
    nothing = statistics.Margin.student(-0.01, 0.0, 12)  # no spread, so nothing to judge it by
    assert nothing.p_within == nothing.p_beyond == 1
    assert math.isnan(nothing.items_needed(12, 0.05))
    assert statistics.Margin.student(-0.01, 0.001, 1).p_within == 1
    constant = np.full(1000, 0.03) + 1e-18 * np.arange(1000)
    assert statistics.bootstrap_margin(constant - 0.01, 50).p_beyond == 1


def test_fewer_than_five_items_decide_nothing_and_a_far_margin_stays_finite():
    few = statistics.Margin.student(-1.0, 1e-6, 4)
    assert few.p_within == few.p_beyond == 1
    assert few.items_needed(4, 0.05) == 5
    five = statistics.Margin.student(-0.01, 0.005, 5)
    assert five.p_within == pytest.approx(stats.t.cdf(-2, 4))
    far = statistics.Margin.student(-1.0, 1e-3, 10_000)
    assert -40 < far.z < -37


def test_as_many_items_as_needed_tell_four_times_in_five():
    margin = statistics.tango(30, 10, 1000, 0.01)
    for level in (0.05, 0.01):
        items = margin.items_needed(1000, level)
        # A margin grows with the root of the items, and its correction shrinks with it.
        root = math.sqrt(items / 1000)
        z = margin.z * root - margin.correction / root
        assert stats.norm.cdf(z - stats.norm.ppf(1 - level)) == pytest.approx(0.8)
    assert statistics.Margin(0.0).items_needed(1000, 0.05) == math.inf


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_fewer_items_than_named_do_not_pass_a_model_without_changes(level):
    """The named size suffices; otherwise 2 samples would name 9, and 9 would name 30."""
    for items in (2, 50, 300):
        fewest = statistics.tango(0, 0, items, 0.01).items_needed(items, level)
        passes, fails = (math.ceil(fewest), math.floor(fewest))
        assert statistics.tango(0, 0, passes, 0.01).p_within <= level
        assert statistics.tango(0, 0, fails, 0.01).p_within > level


@pytest.mark.parametrize("items", [2, 3, 50])
def test_a_margin_of_replicates_has_the_error_of_the_items(items):
    """A bootstrap sample of n items varies less than n items do, by (n - 1) / n."""
    excess = np.array([-0.03, -0.01, -0.02, 0.0])  # symmetric
    error = np.sqrt(np.square(excess - excess.mean()).sum() / 3 * items / (items - 1))
    expected = statistics.Margin.student(excess.mean(), error, items, skewness=0.0)
    assert statistics.bootstrap_margin(excess, items).z == pytest.approx(expected.z)
    assert math.isinf(statistics.bootstrap_margin(excess, 1).correction)


def test_skewed_losses_at_the_limit_pass_in_at_most_five_percent():
    """Most losses are small and some are large; Student's test passes 9%."""
    items = 50
    weights = np.stack([np.bincount(d, minlength=items) for d in statistics.resample(items, 1000)])
    losses = drawn(0).exponential(size=(items, 2000))  # of mean 1
    margins = [statistics.bootstrap_margin(r, items) for r in (weights @ losses / items - 1).T]
    plain = stats.ttest_1samp(losses, 1, alternative="less").pvalue
    assert (plain <= 0.05).mean() > 0.08
    of_items = [statistics.Margin.of_mean(column, skewed=True) for column in losses.T - 1]
    for tested in (margins, of_items):
        assert 0.02 < np.mean([margin.p_within <= 0.05 for margin in tested]) < 0.06
        assert 0.02 < np.mean([margin.p_beyond <= 0.05 for margin in tested]) < 0.06


@given(st.floats(-40, 40), st.floats(-2, 2), st.floats(0.01, 1))
@example(-8.0, 1.0, 0.5)  # the cubic term outweighs the correction
@settings(max_examples=50)
def test_more_skewness_never_makes_a_pass_easier(t, skewness, more):
    corrected = statistics.correct_skewness(t, skewness)
    assert corrected <= statistics.correct_skewness(t, skewness + more) + 1e-9
    assert corrected <= statistics.correct_skewness(t + more, skewness) + 1e-9
    if abs(t) > 3:
        assert corrected / t > 0.2


@pytest.mark.parametrize("items", [10, 20, 50])
def test_skewed_losses_that_do_not_pass_need_more_items(items):
    margin = statistics.Margin.student(-1.0, 0.35, items, 6.0)
    assert margin.p_within > 0.05
    assert margin.items_needed(items, 0.05) > items


def test_a_rare_class_makes_a_mean_over_classes_less_certain():
    excess = drawn(0).normal(-0.02, 0.01, 1000)
    whole = statistics.bootstrap_margin(excess, 50)
    assert statistics.bootstrap_margin(excess, 50, np.array([50])) == whole
    even = statistics.bootstrap_margin(excess, 50, np.array([25, 25, 25]))
    rare = statistics.bootstrap_margin(excess, 50, np.array([50, 50, 3]))
    assert whole.z < even.z < rare.z < 0
    for few in ([1, 1], [4], [30, 1]):  # fewer than five effective items
        assert statistics.bootstrap_margin(excess, 50, np.array(few)).p_within == 1


@pytest.mark.parametrize(
    ("counts", "passes"), [(None, True), ([300, 300], True), ([300, 0], True), ([300, 100], False)]
)
def test_replicates_equal_to_fp32_s_pass_with_enough_samples(counts, passes):
    """None of 300 items changed: a loss of 1% would have changed one with a probability of 95%."""
    counts = None if counts is None else np.array(counts)
    values = Replicates(drawn(0).normal(0.5, 0.1, 1000), class_counts=counts)
    assert (values.margin(values, AUC, 0.01, 300).p_within <= 0.05) == passes
    assert values.margin(values, AUC, 0.01, 290) == statistics.UNKNOWN
    assert values.margin(values, regression.build().metric, 0.01, 300) != statistics.UNKNOWN


@given(st.integers(0, 40), st.floats(0.05, 0.95))
@example(1, 0.5)
@example(10, 0.5)  # of 1000: at most a hundredth
@example(11, 0.5)
@settings(max_examples=30)
def test_interval_test_and_verdict_leave_out_the_same_samples(undefined, level):
    """They all have a value, from the samples that do, or none of them has one."""
    values = drawn(0).normal(level, 0.1, 1000)
    before = drawn(1).normal(0.5, 0.1, 1000)
    values[:undefined] = np.nan
    model, fp32 = Replicates(values), Replicates(before)
    kept = Replicates(values[undefined:]), Replicates(before[undefined:])
    interval, (delta, p_value) = model.interval, model.against(fp32)
    margin = model.margin(fp32, AUC, 0.01, 100)
    if undefined <= 10:
        assert (interval, (delta, p_value)) == (kept[0].interval, kept[0].against(kept[1]))
        assert margin == kept[0].margin(kept[1], AUC, 0.01, 100)
    else:
        assert np.isnan([*interval, *delta]).all()
        assert (p_value, margin) == (1.0, statistics.UNKNOWN)
    share = undefined / 1000
    assert model.metrics(fp32) == ({UNDEFINED: share} if share else {})


def test_samples_without_a_value_are_at_most_a_hundredth():
    excess = np.arange(-300, -100) / 1000
    for unknown, outcome in ((0, True), (2, True), (3, False)):
        excess[:unknown] = np.nan
        assert np.isfinite(statistics.bootstrap_margin(excess, 50).correction) == outcome


@pytest.mark.parametrize(
    ("differences", "p_value"),
    [
        (np.arange(1, 20), 0.1),
        (np.append(np.arange(1, 19), -1), 0.2),
        (np.append(np.arange(1, 100), -np.arange(10)), 0.2),
        (np.append(np.arange(1, 100), np.nan), 2 * stats.norm.cdf(-1.5746)),
        (np.append(np.arange(1, 100), np.full(2, np.nan)), 1.0),  # more than 1% are unknown
        (np.ones(99), 0.02),  # no spread to judge by
        (np.array([-1, 0, 1, 2, 3]), 1.0),
        (np.zeros(9), 1.0),
    ],
)
def test_p_values_of_replicates_by_hand(differences, p_value):
    for sign in (1, -1):
        assert statistics.bootstrap_p(sign * differences) == pytest.approx(p_value, rel=1e-3)


@given(st.integers(0, 2**32 - 1), st.integers(100, 3000))
@settings(max_examples=20)
def test_a_p_value_falls_with_the_difference_without_a_jump(seed, resamples):
    """Also where the counted tail ends and the normal one begins."""
    replicates = np.random.default_rng(seed).normal(size=resamples)
    p_values = [statistics.bootstrap_p(replicates + shift) for shift in np.arange(0.5, 8, 0.05)]
    assert np.diff(p_values).max() <= 0
    assert p_values[-1] < 1e-6
    edge = np.sort(replicates)[statistics.COUNTABLE - 1]
    counted, continued = (statistics.bootstrap_p(replicates - edge + d) for d in (-1e-9, 1e-9))
    assert counted == pytest.approx(2 * (statistics.COUNTABLE + 1) / (resamples + 1))
    assert continued == pytest.approx(counted, rel=1e-6)


def test_p_values_near_the_floor_keep_their_level():
    """Simulated without a difference: Student's test is exact, and counts end at 2 / 200."""
    random = np.random.default_rng(5)
    items, resamples, sweeps = 100, 199, 20_000
    weights = np.stack([np.bincount(d, minlength=items) for d in statistics.resample(items, 199)])
    assert len(weights) == resamples
    values = random.normal(size=(items, sweeps))
    p_values = np.array([statistics.bootstrap_p(column) for column in (weights @ values / items).T])
    exact = stats.ttest_1samp(values, 0).pvalue
    for level in (0.05, 0.01, 0.002, 0.0005):
        assert 0.4 < (p_values <= level).sum() / (exact <= level).sum() < 2.5


def test_a_difference_can_be_significant_among_hundreds_of_models():
    """AP 1 beside 50 others: counted, Holm's smallest p-value was 0.051."""
    random = np.random.default_rng(0)
    best, other = Replicates(np.ones(2000)), Replicates(0.5 + 0.02 * random.normal(size=2000))
    assert max(statistics.holm([best.against(other)[1]] * 51)) < 1e-6


def test_a_limit_that_is_a_fraction_is_as_uncertain_as_the_baseline():
    """With errors of exactly 1.5 times FP32's, a limit of 0.5 is met by none or all replicates."""
    random = np.random.default_rng(1)
    base = 1 + 0.1 * random.normal(size=1000)
    model = 1.5 * base + 1e-3 * random.normal(size=1000)
    paired = Paired(Replicates(model), Replicates(base))
    metric = regression.build().metric
    near, beyond = (paired.margin(metric, drop, 200) for drop in (0.5, 0.49))
    assert abs(near.z) < 0.5
    assert beyond.z > 5


def test_hard_windows_that_multiply_both_perplexities_do_not_change_a_margin():
    random = np.random.default_rng(1)
    base = 1 + 0.01 * random.normal(size=1000)
    model = 1.1 * base + 0.01 * random.normal(size=1000)
    hard = np.exp(0.2 * random.normal(size=1000))
    metric = perplexity.METRIC
    plain, scaled = (
        Paired(Replicates(model * by), Replicates(base * by)).margin(metric, 0.1, 200)
        for by in (1, hard)
    )
    assert scaled.z == pytest.approx(plain.z)


@given(
    arrays.arrays(np.float64, (2, 12), elements=st.sampled_from([0.0, 0.25, 0.5, 0.75])),
    st.integers(1, 11),
)
@settings(max_examples=50)
def test_delong_s_variance_is_that_of_the_structural_components(scores, positives):
    """By all pairs of a positive and a negative; the variance of a single value counts as 0."""

    def variance(pairs):
        """Of pairs [positives, negatives]."""
        of = (pairs.mean(axis=1), pairs.mean(axis=0))
        return sum(values.var(ddof=1) / values.size for values in of if values.size > 1)

    positive = np.arange(12) < positives
    areas = [statistics.auc(row, positive) for row in scores]
    pairs = [(np.sign(row[positive][:, None] - row[~positive]) + 1) / 2 for row in scores]
    value, half_width = pairs[0].mean(), statistics.Z95 * np.sqrt(variance(pairs[0]))
    assert areas[0].value == pytest.approx(value)
    assert areas[0].of_positives == pytest.approx(pairs[0].mean(axis=1))
    assert areas[0].of_negatives == pytest.approx(pairs[0].mean(axis=0))
    ends = max(value - half_width, 0), min(value + half_width, 1)
    assert areas[0].interval == pytest.approx(ends, abs=1e-7)

    difference, error = pairs[0].mean() - pairs[1].mean(), np.sqrt(variance(pairs[0] - pairs[1]))
    assert statistics.delong_error(*areas) == pytest.approx(error, abs=1e-7)
    (low, high), p_value = statistics.delong(*areas)
    assert (low + high) / 2 == pytest.approx(difference, abs=1e-7)
    assert (high - low) / 2 == pytest.approx(statistics.Z95 * error, abs=1e-7)
    if error > 1e-7:
        assert p_value == pytest.approx(2 * stats.norm.sf(abs(difference) / error))


def test_delong_without_spread_takes_the_difference_for_certain():
    positive = np.arange(6) < 3
    best, worst = (statistics.auc(sign * positive, positive) for sign in (1.0, -1.0))
    assert statistics.delong(best, best) == ((0, 0), 1)
    assert statistics.delong(best, worst) == ((1, 1), 0)


@pytest.mark.parametrize(("pairs", "passes"), [(298, False), (299, True)])
def test_rankings_without_a_change_pass_with_enough_pairs(pairs, passes):
    """0.99 to the power of 299 is below 5%; DeLong's variance is 0 and shows nothing."""
    labels = np.repeat([0, 1], [1000, pairs])
    ours, theirs = (Ranking(scale * (labels + 0.1), labels) for scale in (1.0, 2.0))
    margin = ours.margin(theirs, AUC, 0.01, len(labels))
    assert (margin.p_within <= SIGNIFICANCE) == passes
    assert margin.p_beyond > 0.5
    worse = Ranking(np.where(np.arange(len(labels)) == 5, 9.0, labels + 0.1), labels)
    assert np.isfinite(worse.margin(theirs, AUC, 0.01, len(labels)).z)


def test_delong_keeps_its_level():
    """Of two equally good rankings, one in twenty differs at 5%."""
    positive = np.arange(200) % 2 == 0
    p_values = []
    for seed in range(400):
        random = np.random.default_rng(seed)
        scores = positive + random.normal(size=(3, 200))
        pair = [statistics.auc(scores[2] + row, positive) for row in scores[:2]]
        p_values.append(statistics.delong(*pair)[1])
    assert 0.02 < (np.array(p_values) < 0.05).mean() < 0.09


def test_a_bootstrap_shows_its_progress():
    shown = []

    def score(chosen: np.ndarray) -> float:
        shown.append(console._watch.steps[-1].describe())
        return 0.0

    statistics.bootstrap(score, 2, 3)
    assert "Scoring bootstrap samples: 2 of 3 samples" in shown[-1]


@pytest.mark.parametrize("shift", [0.0, 0.08])
def test_the_bootstrap_is_scipys(shift):
    random = np.random.default_rng(3)
    ours, theirs = random.normal(size=300) + shift, random.normal(size=300)
    ours += theirs
    replicates = [
        statistics.bootstrap(lambda chosen, v=values: float(v[chosen].mean()), 300, 4000)
        for values in (ours, theirs)
    ]
    expected = stats.bootstrap(
        (ours, theirs),
        lambda a, b, axis: a.mean(axis) - b.mean(axis),
        paired=True,
        method="percentile",
        n_resamples=4000,
        rng=0,
    )
    interval = statistics.bootstrap_interval(replicates[0] - replicates[1])
    width = expected.confidence_interval.high - expected.confidence_interval.low
    assert interval == pytest.approx(expected.confidence_interval, abs=0.06 * width)
    p_value = statistics.bootstrap_p(replicates[0] - replicates[1])
    assert p_value == pytest.approx(stats.ttest_rel(ours, theirs).pvalue, abs=0.03)


# Many classes


def test_a_thousand_classes_stay_readable():
    random = np.random.default_rng(0)
    labels = random.integers(0, 1000, 3000)
    names = tuple(f"class {number}" for number in range(1000))
    task = classification.build(names)
    pair = []
    for noise in (1.0, 1.1):
        logits = random.normal(size=(3000, 1000)).astype(np.float32) * noise
        logits[np.arange(3000), labels] += 4
        pair.append(task.score(Outputs((logits,), None, LOGITS), Targets(labels)))
    comparison = task.compare(*pair)
    assert len(task.metrics(comparison)) < 40
    assert task.few_names == ()
    assert len(task.files.tables(comparison)["per_class.csv"]) == 1001
    for figure in task.files.figures(comparison, "many").values():
        assert len(figure.axes[0].get_xticks()) == 20
        assert "the 20 of 1000 classes" in (
            figure.axes[0].get_title() + getattr(figure, "get_suptitle", str)()
        )


def test_the_crossed_mean_of_a_balanced_table_by_hand():
    """Rows are draws: 0 and 1 by sample, and 2 more in the second draw; nothing else varies."""
    crossed = statistics.crossed_mean(np.array([[0.0, 1.0], [2.0, 3.0]]))
    assert crossed.mean == 1.5
    assert crossed.sample_error == pytest.approx(0.5)  # of 1 and 2
    assert crossed.draw_error == pytest.approx(1.0)  # of 0.5 and 2.5
    assert crossed.error == pytest.approx(math.hypot(0.5, 1.0))
    assert crossed.freedom == pytest.approx(1.25**2 / (0.25**2 + 1))


def test_recipes_at_the_limit_pass_in_a_twentieth_of_the_cases():
    """Five draws of 1,000 samples; the draw shifts the loss by half a point."""
    random, passed, times = np.random.default_rng(3), 0, 600
    for _ in range(times):
        flips = random.random(1000) < 0.06
        losing = 0.5 + (0.01 + random.normal(0, 0.005, 5)) / 0.06
        sides = np.where(random.random((5, 1000)) < losing[:, np.newaxis], 1.0, -1.0)
        values = np.where(flips & (random.random((5, 1000)) < 0.5), sides, 0.0)
        passed += statistics.crossed_mean(values).margin(0.01).p_within <= 0.05
    assert 0.01 < passed / times <= 0.05 + 3 * (0.05 * 0.95 / times) ** 0.5
