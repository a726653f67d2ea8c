"""`task=keypoints`: heads with keypoints, and their AP by OKS."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from resnet8ptq.calibration.coco_reader import CocoReader
from resnet8ptq.config.schema import KeypointsConfig, TaskConfig
from resnet8ptq.core.errors import DataError, PtqError
from resnet8ptq.data.boxes import Annotated, pack
from resnet8ptq.data.sources import coco
from resnet8ptq.graph.session import open_session
from resnet8ptq.tasks import registry
from resnet8ptq.tasks.detection import ap_bootstrap, average_precision, heads, plots
from resnet8ptq.tasks.detection.decoding import make_decoder
from resnet8ptq.tasks.detection.scores import DetectionScores, to_coco
from resnet8ptq.tasks.detection.task import COCO_SIGMAS
from resnet8ptq.tasks.scoring.outputs import Outputs, Targets, TaskContext
from tests.helpers import detectors
from tests.helpers.detectors import IDS, NAMES, SIZE, STEPS

SIGMAS = (0.05, 0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of squares with two keypoints each."""
    root = tmp_path_factory.mktemp("keypoints")
    detectors.write_pictures(root, keypoints=True)
    return root


@pytest.fixture(scope="module")
def records(folder: Path) -> np.ndarray:
    assert coco.read_annotations(folder / "instances.json").keypoints == 2
    return detectors.read_labels(folder)


def test_the_reader_of_pictures_takes_keypoints(folder, records):
    """As do the boxes of such a file, which `evaluation.coco_evaluator` scores."""
    reader = CocoReader(folder / "images", "images", STEPS, folder / "instances.json")
    assert reader.records.dtype == records.dtype
    np.testing.assert_array_equal(reader.records, records)


def context(records: np.ndarray, shape: tuple[int, ...]) -> TaskContext:
    return TaskContext("x", records, NAMES, True, (3, SIZE, SIZE), {"o": shape}, "values", IDS)


def noisy(records: np.ndarray, noise: float) -> DetectionScores:
    """Score keypoints that are off by some pixels, of a wrong class, or tied."""
    random = np.random.default_rng(3)
    rows = np.zeros((len(records), 8, 12), np.float32)
    rows[..., 5] = -1
    for row, record in zip(rows, records, strict=True):
        for index, box in enumerate(record["boxes"][: record["count"]]):
            left, top, wide, high = box["bbox"]
            points = np.array([left, top, 1, left + wide, top + high, 1])
            points += random.normal(0, noise, 6)
            label = box["category"] if random.random() < 0.9 else 0
            score = random.choice([0.5, 0.9, random.random()])
            row[index] = [left, top, left + wide, top + high, score, label, *points]
    return DetectionScores(Outputs((rows,)), records, IDS, 100, sigmas=SIGMAS)


def test_the_numbers_are_pycocotools_own(folder, records, tmp_path):
    scores = noisy(records, 2.0)
    path = tmp_path / "detections.json"
    path.write_text(json.dumps(scores.results))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(folder / "instances.json"))
        run = COCOeval(truth, truth.loadRes(str(path)), "keypoints")
        run.params.kpt_oks_sigmas = np.array(SIGMAS)
        run.evaluate()
        run.accumulate()
        run.summarize()
    assert 0.1 < scores.value < 0.9
    names = ("ap", "ap50", "ap75", "ap_medium", "ap_large", "ar")
    metrics = {"ap": scores.value, **scores.more()}
    expected = [None if value < 0 else value for value in run.stats[:6]]
    for name, value in zip(names, expected, strict=True):
        assert metrics[name] == (value if value is None else pytest.approx(value, abs=1e-9)), name
    assert "ap_small" not in metrics


def test_ap_of_an_object_by_hand():
    """Of two labelled keypoints one is exact, the other has exp(-0.5): an OKS of 0.803."""
    sigma, area = 0.1, 400.0
    box = ([0.0, 0.0, 20.0, 20.0], area, 0, False, [5.0, 5.0, 2.0, 9.0, 9.0, 1.0, 0.0, 0.0, 0.0])
    pictures = pack([Annotated(1, 20, 20, (2.0, 2.0), (3.0, 1.0), [box])], keypoints=3)
    away = 2 * sigma * np.sqrt(area)
    found = np.array([[5, 5, 1], [9 + away, 9, 1], [19, 0, 1]])  # pixels of the picture
    found[:, :2] = found[:, :2] * 2 + (3, 1)
    rows = np.array([[[0, 0, 40, 40, 0.9, 0, *found.ravel()]]])
    scores = DetectionScores(Outputs((rows,)), pictures, (1,), 100, sigmas=(sigma,) * 3)
    oks = (1 + np.exp(-0.5)) / 2
    right = np.count_nonzero(np.arange(0.5, 0.96, 0.05) <= oks)
    assert scores.value == pytest.approx(right / 10) == pytest.approx(0.7)


def test_cocos_sigmas_are_pycocotools_own():
    assert pytest.approx(COCOeval(iouType="keypoints").params.kpt_oks_sigmas) == COCO_SIGMAS


@pytest.mark.parametrize(("head", "shape"), [("yolov8", (13, 16)), ("yolov5", (16, 14))])
def test_heads_with_keypoints_find_every_square(folder, records, tmp_path, head, shape):
    path = detectors.write_detector(tmp_path / "poser.onnx", head, keypoints=True)
    config = KeypointsConfig(score_threshold=0.1)
    decoder = make_decoder(config, (3, SIZE, SIZE), {"output": shape}, IDS, 2)
    assert decoder.head == head
    outputs = open_session(str(path), 1).run(None, {"images": detectors.read_inputs(folder)})
    assert outputs[0].shape[1:] == shape
    scores = DetectionScores(Outputs(decoder(outputs)), records, IDS, 100, sigmas=SIGMAS)
    assert scores.value == 1


def test_one_output_after_suppression(records):
    rows = np.zeros((1, 3, 12), np.float32)
    rows[0, :2] = [[0, 0, 8, 8, 0.5, 2, 1, 1, 1, 7, 7, 1], [4, 4, 8, 8, 0.9, 0, 5, 5, 1, 6, 6, 0]]
    for normalized in (False, True):
        config = KeypointsConfig(normalized=normalized)
        decoder = make_decoder(config, (3, SIZE, SIZE), {"rows": (3, 12)}, IDS, 2)
        given = rows.copy()
        if normalized:
            given[..., [0, 1, 2, 3, 6, 7, 9, 10]] /= SIZE
        [found] = decoder([given])
        np.testing.assert_allclose(found[0, :2], rows[0, [1, 0]])


def test_a_head_without_keypoints_is_refused():
    frame = heads.Frame(SIZE, SIZE, 3, {"o": (16, 8)}, KeypointsConfig(strides=[16]), 2)
    with pytest.raises(PtqError, match=r"3 classes, 2 keypoints .* no head fits; .* yolov5 "):
        heads.find_head(frame)


@pytest.mark.parametrize("shape", [(13, 16), (16, 14), (300, 12)])
def test_auto_takes_keypoints_if_labels_and_outputs_have_them(records, shape):
    data = context(records, shape)
    assert registry.choose(data) == "keypoints"
    assert registry.choose(replace(data, outputs={"o": (7, 16)})) == "detection"
    with pytest.raises(
        PtqError, match=r"got null, which is COCO's 17, .* task.sigmas=\[0.5, 0.5\]"
    ):
        registry.make(TaskConfig(), data)
    task = registry.make(KeypointsConfig(sigmas=[0.1, 0.1]), data)
    assert (task.name, task.metric.name) == ("keypoints", "ap")


def test_what_is_missing_is_said(records):
    bare = pack([Annotated(1, 20, 20, (1.0, 1.0), (0.0, 0.0), [([0, 0, 9, 9], 81, 0, False)])])
    with pytest.raises(PtqError, match="the objects of x have no keypoints; expected them in data"):
        registry.make(KeypointsConfig(), context(bare, (13, 16)))
    unlabelled = records.copy()
    unlabelled["boxes"]["keypoints"] = 0
    with pytest.raises(PtqError, match="the pictures of x have no objects with keypoints"):
        registry.make(KeypointsConfig(sigmas=[0.1, 0.1]), context(unlabelled, (13, 16)))


@pytest.mark.parametrize(
    ("keypoints", "message"),
    [
        ([1, 2], r"annotations\[0\]: keypoints: got 2 numbers, expected x, y, visibility, ..."),
        ([1, 2, 2], "annotations have 1 and 2 keypoints, expected the same number in all"),
        ([1, 2, "2"], r"annotations\[0\]: '2' is not a number"),
    ],
)
def test_wrong_keypoints_are_refused(folder, tmp_path, keypoints, message):
    content = json.loads((folder / "instances.json").read_text())
    content["annotations"][0]["keypoints"] = keypoints
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        coco.read_annotations(path)


def test_worse_keypoints_are_found_worse_in_the_same_boxes(records):
    task = registry.make(KeypointsConfig(sigmas=list(SIGMAS)), context(records, (13, 16)))
    good, worse = (
        task.score(noisy(records, noise).outputs, Targets(records)) for noise in (0.1, 4.0)
    )
    comparison = task.compare(worse, good)
    assert comparison.interval[1] < 0 and comparison.p_value < 0.05
    assert plots.box_changes(worse, good).any() and not plots.box_changes(good, good).any()
    weights = np.ones((1, len(records)), np.int32)
    evaluation = average_precision.evaluate(good.results, to_coco(records, IDS), good.kind, SIGMAS)
    by_class = ap_bootstrap.by_class(evaluation.matches, weights)
    np.testing.assert_allclose(by_class[0], evaluation.by_class, rtol=1e-12)
