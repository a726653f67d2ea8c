"""`task=instance_segmentation`: masks of annotations, heads with prototypes, and their AP."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as reference
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from resnet8ptq.config.schema import InstanceSegmentationConfig, TaskConfig
from resnet8ptq.core import masks
from resnet8ptq.core.errors import PtqError
from resnet8ptq.data.sources import coco
from resnet8ptq.graph.session import open_session
from resnet8ptq.tasks import registry
from resnet8ptq.tasks.detection import plots
from resnet8ptq.tasks.detection.decoding import make_decoder
from resnet8ptq.tasks.detection.scores import DetectionScores, to_coco
from resnet8ptq.tasks.scoring.outputs import Outputs, Targets, TaskContext
from tests.helpers import detectors
from tests.helpers.detectors import IDS, NAMES, SIZE

CONFIG = InstanceSegmentationConfig(score_threshold=0.1)
OUTPUTS = {"output": (10, 16), "maps": (3, 32, 32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of squares without a quarter, with their masks."""
    root = tmp_path_factory.mktemp("masks")
    detectors.write_pictures(root, masks=True)
    return root


@pytest.fixture(scope="module")
def records(folder: Path) -> np.ndarray:
    return detectors.read_labels(folder)


@pytest.fixture(scope="module")
def images(folder: Path) -> np.ndarray:
    return detectors.read_inputs(folder)


def context(records: np.ndarray, outputs: dict[str, tuple[int, ...]]) -> TaskContext:
    return TaskContext("x", records, NAMES, True, (3, SIZE, SIZE), outputs, "values", IDS)


@pytest.fixture(scope="module")
def found(images, records, tmp_path_factory) -> tuple[np.ndarray, ...]:
    """The detections and masks of the network, by `yolov8`."""
    path = tmp_path_factory.mktemp("network") / "masks.onnx"
    detectors.write_detector(path, "yolov8", masks=True)
    outputs = open_session(str(path), 1).run(None, {"images": images})
    assert {name: o.shape[1:] for name, o in zip(OUTPUTS, outputs, strict=True)} == OUTPUTS
    decoder = make_decoder(CONFIG, (3, SIZE, SIZE), OUTPUTS, IDS, with_masks=True)
    assert decoder.head == "yolov8"
    return decoder(outputs)


def scored(found, records, noise: float = 0.0) -> DetectionScores:
    """Score masks of which some lost their first rows, and some their class."""
    random = np.random.default_rng(3)
    rows = found[0].copy()
    texts = []
    for row, text in zip(rows, found[1], strict=True):
        changed = []
        for index, mask in enumerate(masks.split(text, int((row[:, 5] >= 0).sum()))):
            inside = masks.decode(mask, SIZE, SIZE).copy()
            inside[: int(np.argmax(inside.any(axis=1)) + random.integers(0, 1 + noise))] = 0
            changed.append(masks.encode(inside > 0, 0, 0, SIZE, SIZE))
            row[index, 4] = random.choice([0.5, 0.9])
            row[index, 5] = row[index, 5] if random.random() < 1 - noise / 50 else 0
        texts.append(masks.join(changed))
    outputs = Outputs((rows, np.array(texts)))
    return DetectionScores(outputs, records, IDS, 100, input_size=(SIZE, SIZE))


def test_the_numbers_are_pycocotools_own(folder, found, records, tmp_path):
    scores = scored(found, records, 5)
    path = tmp_path / "detections.json"
    path.write_text(json.dumps(scores.results))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(folder / "instances.json"))
        run = COCOeval(truth, truth.loadRes(str(path)), "segm")
        run.evaluate()
        run.accumulate()
        run.summarize()
    assert 0.1 < scores.value < 0.9
    metrics = {"ap": scores.value, **scores.more()}
    names = ("ap", "ap50", "ap75", "ap_small")
    assert [metrics[name] for name in names] == pytest.approx(run.stats[:4].tolist(), abs=1e-9)
    assert metrics["ar"] == pytest.approx(run.stats[8], abs=1e-9)


def test_every_mask_is_found(found, records):
    scores = DetectionScores(Outputs(found), records, IDS, 100, input_size=(SIZE, SIZE))
    assert scores.kind == "segm"
    assert scores.evaluation.metrics["ap75"] == 1
    assert scores.value > 0.9
    assert {tuple(r["segmentation"]["size"]) for r in scores.results} == {(64, 64), (32, 64)}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("head", ["yolov8", "yolov5", "detections"])
def test_heads_with_prototypes(images, found, tmp_path, head, last):
    """The order of outputs and axes may vary, as in TFLite's."""
    path = detectors.write_detector(tmp_path / "masks.onnx", "yolov8", masks=True)
    rows, maps = open_session(str(path), 1).run(None, {"images": images})
    if head == "yolov5":
        rows = rows.swapaxes(1, 2)
        sure = np.ones_like(rows[..., :1])
        rows = np.concatenate([rows[..., :4], sure, rows[..., 4:]], axis=-1)
    if head == "detections":
        rows = rows.swapaxes(1, 2)
        best = rows[..., 4:7]
        boxes = np.concatenate([rows[..., :2] - 8, rows[..., :2] + 8], axis=-1)
        label = best.argmax(axis=-1)[..., np.newaxis]
        rows = np.concatenate(
            [boxes, best.max(axis=-1, keepdims=True), label, rows[..., 7:]], axis=-1
        )
    maps = np.moveaxis(maps, 1, 3) if last else maps
    outputs = {"maps": maps, "rows": rows}
    shapes = {name: values.shape[1:] for name, values in outputs.items()}
    config = replace(CONFIG, head=head, nms=True)
    decoder = make_decoder(config, (3, SIZE, SIZE), shapes, IDS, with_masks=True)
    decoded, texts = decoder(list(outputs.values()))
    np.testing.assert_allclose(decoded, found[0], atol=1e-4)
    assert texts.tolist() == found[1].tolist()
    [boxes] = make_decoder(config, (3, SIZE, SIZE), shapes, IDS)(list(outputs.values()))
    np.testing.assert_array_equal(boxes, decoded)


def test_auto_takes_masks_if_labels_and_outputs_have_them(records):
    data = context(records, OUTPUTS)
    assert registry.choose(data) == "instance_segmentation"
    assert registry.choose(replace(data, outputs={"o": (7, 16)})) == "detection"
    task = registry.make(TaskConfig(), data)
    assert (task.name, task.metric.name) == ("instance_segmentation", "ap")
    bare = records[[name for name in records.dtype.names if name != "masks"]]
    assert registry.choose(replace(data, labels=bare)) == "detection"
    with pytest.raises(PtqError, match="the objects of x have no masks; expected `segmentation`"):
        registry.make(CONFIG, replace(data, labels=bare))
    with pytest.raises(PtqError, match=r"expected boxes with the coefficients of their masks"):
        registry.make(CONFIG, replace(data, outputs={"o": (7, 16)}))


def test_objects_without_a_mask_are_neither_right_nor_wrong(found, records, caplog):
    changed = records.copy()
    texts = masks.of_record(changed[2])
    changed["masks"][2] = masks.join([b"", *texts[1:]])
    registry.make(CONFIG, context(changed, OUTPUTS))
    assert "1 objects have no valid `segmentation`, the first in picture 25" in caplog.text
    before, of_masks, of_boxes = (
        sum(annotation["iscrowd"] for annotation in to_coco(pictures, IDS, masked)["annotations"])
        for pictures, masked in ((records, True), (changed, True), (changed, False))
    )
    assert (of_masks, of_boxes) == (before + 1, before)
    scores = DetectionScores(Outputs(found), changed, IDS, 100, input_size=(SIZE, SIZE))
    assert scores.evaluation.metrics["ap75"] == 1  # the detection in its box is not wrong either


def test_worse_masks_are_found_worse_in_the_same_boxes(found, records):
    task = registry.make(CONFIG, context(records, OUTPUTS))
    good, worse = (
        task.score(scored(found, records, noise).outputs, Targets(records)) for noise in (0, 8)
    )
    comparison = task.compare(worse, good)
    assert comparison.interval[1] < 0 and comparison.p_value < 0.05
    assert plots.box_changes(worse, good).any() and not plots.box_changes(good, good).any()


SIDES = st.integers(1, 12)


@given(st.data(), SIDES, SIDES)
def test_a_mask_is_the_same_after_packing(data, height, width):
    """By pycocotools, by our own reader of run lengths, and as a part of a larger picture."""
    cells = data.draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width))
    inside = np.array(cells).reshape(height, width)
    expected = reference.encode(np.asfortranarray(inside.astype(np.uint8)))
    text = masks.encode(inside, 0, 0, height, width)
    assert text == expected["counts"]
    assert masks.read({"size": [height, width], "counts": text.decode()}, height, width) == text
    whole = np.zeros((height + 5, width + 7), np.uint8)
    whole[2 : 2 + height, 3 : 3 + width] = inside
    np.testing.assert_array_equal(
        masks.decode(masks.encode(inside, 2, 3, *whole.shape), *whole.shape), whole
    )
    moved = masks.move(text, (height, width), (1, 1), (-3, -2), whole.shape)
    np.testing.assert_array_equal(masks.decode(moved, *whole.shape), whole)


@given(
    st.one_of(
        st.none(),
        st.text(),
        st.lists(st.lists(st.floats() | st.integers(), max_size=9), max_size=3),
        st.fixed_dictionaries(
            {
                "size": st.just([9, 9]) | st.none(),
                "counts": st.text() | st.lists(st.integers() | st.none()),
            }
        ),
    )
)
def test_any_segmentation_is_read_or_none(segmentation):
    text = masks.read(segmentation, 9, 9)
    assert text == b"" or masks.decode(text, 9, 9).shape == (9, 9)


def test_polygons_are_as_pycocotools_draws_them():
    polygons = [[1.2, 2.0, 7.7, 3.1, 4.0, 8.9], [0, 0, 3, 0, 3, 2.5, 0, 2.5]]
    expected = reference.merge(reference.frPyObjects(polygons, 10, 10))
    assert masks.read(polygons, 10, 10) == expected["counts"]
    assert masks.read([polygons[0][:4]], 10, 10) == b""
    for far in (1e18, 10**400):
        assert masks.read([[0, 0, far, 0, far, 1]], 10, 10) == b""


def test_masks_beyond_all_memory_are_refused(folder, monkeypatch):
    monkeypatch.setattr(coco, "MAX_TEXT", 20)
    with pytest.raises(PtqError, match=r"annotations\[\d+\]: segmentation: the masks so far take"):
        coco.read_annotations(folder / "instances.json")


def test_a_mask_is_moved_to_a_larger_picture():
    inside = np.zeros((20, 20), bool)
    inside[4:16, 6:14] = True
    text = masks.encode(inside, 0, 0, 20, 20)
    moved = masks.decode(masks.move(text, (20, 20), (0.5, 0.5), (2, 4), (24, 36)), 24, 36)
    rows, columns = np.nonzero(moved)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (0, 23, 8, 23)
