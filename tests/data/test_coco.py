"""`data=coco`: pictures with boxes, and pictures that only calibrate."""

import json
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.core.errors import DataError, PtqError
from resnet8ptq.data import locate, pictures, registry
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.data.sources import coco
from resnet8ptq.tasks import registry as tasks
from resnet8ptq.tasks.scoring.outputs import TaskContext
from tests.helpers import detectors
from tests.helpers.configs import make_config


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    """A folder of pictures with their annotations."""
    detectors.write_pictures(tmp_path / "boxes")
    return tmp_path / "boxes"


def read(folder: Path, *more: str) -> Dataset:
    registry._read.cache_clear()
    config = make_config(*detectors.overrides(folder), *more)
    settled = locate.find_data(config.data)
    cache = folder.parent / "cache"
    return registry.read(settled, config.preprocess, cache, config.calib.images)


def test_sizes_of_the_annotated_pictures_are_compared(boxes):
    config = locate.find_data(make_config(*detectors.overrides(boxes)).data)
    assert len(coco.list_pictures(config, boxes)) == len(read(boxes).train) + len(read(boxes).test)
    assert len(registry.list_sizes(config, boxes)) > 1
    for path in (boxes / "images").iterdir():
        Image.new("RGB", (7, 9)).save(path)
    assert registry.list_sizes(config, boxes / "other cache") == {(9, 7)}


def test_boxes_come_with_their_pictures(boxes):
    data = read(boxes)
    content = json.loads((boxes / "instances.json").read_text())
    assert (data.class_names, data.class_ids) == (detectors.NAMES, detectors.IDS)
    labels = np.concatenate([data.train.labels, data.test.labels])
    assert sorted(labels["image_id"].tolist()) == [image["id"] for image in content["images"]]
    for record in labels:
        expected = [a for a in content["annotations"] if a["image_id"] == record["image_id"]]
        result = record["boxes"][: record["count"]]
        assert result["bbox"].tolist() == [a["bbox"] for a in expected]
        assert [data.class_ids[c] for c in result["category"]] == [
            a["category_id"] for a in expected
        ]
        assert result["crowd"].tolist() == [bool(a["iscrowd"]) for a in expected]
    assert 0 in labels["count"]  # an empty picture is one too


def test_classes_may_be_in_the_networks_order_and_more(boxes):
    data = read(boxes, "data.classes=[blue,other,red,green]")
    assert data.class_ids == (20, -2, 3, 7)


def test_a_category_with_a_negative_id_keeps_it(tmp_path):
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 8}],
        "categories": [{"id": -2, "name": "cat"}, {"id": 3, "name": "dog"}],
        "annotations": [{"image_id": 1, "category_id": -2, "bbox": [1, 1, 4, 4]}],
    }
    (tmp_path / "a.json").write_text(json.dumps(content))
    annotations = coco.read_annotations(tmp_path / "a.json", ["cat", "cow", "dog"])
    [(_, _, label, _)] = annotations.boxes[1]
    assert (label, len(set(annotations.class_ids))) == (0, 3)


def test_all_pictures_are_scored_where_others_calibrate(boxes, tmp_path):
    detectors.write_pictures(tmp_path / "more", count=5, seed=1)
    others = tmp_path / "more" / "images"
    data = read(boxes, "data.test_fraction=1", f"calib.images={others}")
    assert (len(data.train), len(data.test)) == (0, 24)
    drawn = draw_calibration(data, None, 0)
    assert len(drawn.indices) == 5 and drawn.split.labels is None
    assert drawn.split.input_shape == data.test.input_shape
    with pytest.raises(PtqError, match=r"calib\.images: got null, expected a folder"):
        draw_calibration(read(boxes, "data.test_fraction=1"), None, 0)
    same = f"calib.images={boxes / 'images'}"
    with pytest.raises(PtqError, match="24 calibration samples are test samples too"):
        draw_calibration(read(boxes, "data.test_fraction=1", same), None, 0)


def test_pictures_without_any_object_cannot_be_scored(boxes):
    path = boxes / "instances.json"
    content = json.loads(path.read_text())
    for annotation in content["annotations"]:
        annotation["iscrowd"] = 1
    path.write_text(json.dumps(content))
    labels = read(boxes).test.labels
    setting = TaskContext(
        "them", labels, detectors.NAMES, True, (3, 64, 64), {"o": (7, 16)}, "values"
    )
    with pytest.raises(PtqError, match="the pictures of them have no objects"):
        tasks.make(make_config("task=detection").task, setting)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("categories"), "has no list 'categories'; expected COCO's format"),
        (lambda c: c["annotations"][2].update(image_id=1), r"annotations\[2\]: image_id 1 is in"),
        (lambda c: c["annotations"][0].update(category_id=4), "category_id 4 is in none"),
        (lambda c: c["annotations"][0].update(bbox=[0, 0, 1]), "expected left, top, width"),
        (lambda c: c["annotations"][0].update(bbox="x"), r"annotations\[0\]: 'x' is not a number"),
        (lambda c: c["annotations"][0].pop("bbox"), "has no 'bbox'"),
        (lambda c: c["images"][1].update(id="5"), "'5' is not an integer"),
        (lambda c: c["images"][1].update(id=5), "images: two have the same id"),
        (lambda c: c["images"][1].update(width=65), "is 64 x 32, the annotations say 65 x 32"),
        (lambda c: c["images"][3].update(file_name="y.png"), "1 of 24 pictures are not in"),
        (lambda c: c["images"][3].update(file_name="../../x"), "is outside of data.images"),
        (lambda c: c["images"][3].update(file_name="a\0b"), r"images\[3\]: 'a\?b' is not a"),
        (lambda c: c["images"][3].update(file_name="a" * 5000), "is not a name of a file"),
    ],
)
def test_annotations_that_are_wrong_are_one_line(boxes, change, message):
    path = boxes / "instances.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(PtqError, match=message):
        read(boxes)


def test_a_picture_has_so_many_boxes_at_most(boxes, monkeypatch):
    monkeypatch.setattr(coco, "MAX_BOXES", 1)
    with pytest.raises(DataError, match=r"picture \d+ has more than 1 annotations"):
        read(boxes)


def test_an_annotation_file_of_any_size_is_not_read(boxes, monkeypatch):
    monkeypatch.setattr(coco, "MAX_JSON_BYTES", 100)
    with pytest.raises(DataError, match=r"instances\.json: is not JSON .*larger than 100 bytes"):
        read(boxes)


@pytest.mark.parametrize("limit", ["MAX_ROOM", "MAX_ENTRIES"])
def test_annotations_that_would_fill_the_memory_are_refused(boxes, monkeypatch, limit):
    small = {"images": 3, "annotations": 3, "categories": 3}
    monkeypatch.setattr(coco, limit, small if limit == "MAX_ENTRIES" else 3)
    with pytest.raises(DataError, match=r"instances\.json: .*, expected at most 3"):
        read(boxes)


def test_a_large_annotation_file_is_parsed_in_a_separate_process(boxes, monkeypatch):
    """Python's objects take 25 times the bytes of some files."""
    here = read(boxes).test.labels
    monkeypatch.setattr(coco, "SMALL_BYTES", 0)
    path = boxes / "instances.json"
    assert (read(boxes).test.labels == here).all()
    monkeypatch.setattr(coco, "read_annotations", parse_endlessly)
    with pytest.raises(DataError, match=r"instances\.json: reading it took too much memory"):
        coco._read_large(path, None)


def parse_endlessly(path: Path, classes: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "name", "bbox", "image_id", "width"]), inner)
    ),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries({k: JSON | st.lists(JSON, max_size=3) for k in ("images", "categories")}),
    JSON,
)
def test_any_other_json_is_refused_and_nothing_else_is_raised(content, boxes_of_any_kind):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.json")
        path.write_text(json.dumps({**content, "annotations": boxes_of_any_kind}))
        with pytest.raises(DataError, match=r"a\.json: "):
            coco.read_annotations(path)


VALUES = (
    JSON
    | st.integers(min_value=10**308)
    | st.floats(min_value=1e300)
    | st.sampled_from(["\ud800.png", "a" * 300, "a/" * 2000, "loop", "out.png", "../secret.png"])
)


@given(st.sampled_from(["images", "annotations", "categories"]), st.integers(0, 9), VALUES)
def test_any_value_in_an_entry_is_taken_or_refused_in_one_line(kind, number, value):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "boxes")
        detectors.write_pictures(folder, 4)
        (folder / "images" / "loop").symlink_to("loop")
        (folder / "images" / "out.png").symlink_to(Path(name, "secret.png"))
        Path(name, "secret.png").write_bytes((folder / "images" / "0.png").read_bytes())
        path = folder / "instances.json"
        content = json.loads(path.read_text())
        keys = sorted(content[kind][0])
        content[kind][0][keys[number % len(keys)]] = value
        path.write_text(json.dumps(content))
        with suppress(PtqError):
            assert len(read(folder).train)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.images=nowhere", r"data.images: got nowhere \(not there\), expected a folder of"),
        (
            "data.annotations=nowhere",
            r"data.annotations: got nowhere \(not there\), expected a .json",
        ),
        ("data.annotations=null", "data.annotations: got null, expected a .json file"),
        ("data.classes=[red,blue]", "got 2 names without 'green'"),
        ("calib.images=nowhere", r"calib.images: got nowhere \(not there\)"),
    ],
)
def test_settings_that_are_wrong_are_one_line(boxes, override, message):
    with pytest.raises(PtqError, match=message):
        read(boxes, override)


def test_what_is_no_json_is_one_line(boxes):
    (boxes / "instances.json").write_text("id,box\n")
    with pytest.raises(PtqError, match="is not JSON"):
        read(boxes)


def test_pictures_that_are_missing_are_left_out_on_demand(boxes):
    (boxes / "images" / "3.png").unlink()
    data = read(boxes, "data.on_bad=skip")
    assert len(data.train) + len(data.test) == 23
    assert 35 not in np.concatenate([data.train.labels, data.test.labels])["image_id"]


@given(
    size=st.tuples(st.integers(40, 300), st.integers(40, 300)),
    to=st.tuples(st.integers(60, 200), st.integers(60, 200)),
    resize=st.sampled_from(["squash", "fit", "crop", "letterbox"]),
    align=st.sampled_from(["center", "top_left"]),
)
def test_a_box_lies_where_the_picture_is_put(size, to, resize, align):
    """A bright half of a picture, and its edges in what the network is fed."""
    width, height = size
    given = PreprocessConfig(size=list(to), resize=resize, align=align, crop_fraction=0.9)
    placed = pictures.placement(width, height, given)
    for axis in (0, 1):
        stored = np.zeros((height, width), np.uint8)
        middle = size[axis] // 2
        stored[(slice(None), slice(middle)) if axis == 0 else slice(middle)] = 255
        shaped = pictures.to_array(pictures.fit(Image.fromarray(stored), given))[..., 0]
        lit = shaped.max(axis=axis).astype(float) / 255
        begin = max(0.0, placed.offset[axis])
        end = placed.scale[axis] * middle + placed.offset[axis]
        if end - begin > 2 and end < len(lit) - 2:
            # Half of the step's width on either side of the edge cancels.
            assert begin + lit.sum() == pytest.approx(end, abs=1.0)


@pytest.mark.parametrize("corners", [False, True])
def test_boxes_of_two_corners_are_reported(boxes, caplog, corners):
    path = boxes / "instances.json"
    content = json.loads(path.read_text())
    for entry in content["annotations"]:
        left, top, wide, high = entry["bbox"]
        if corners:
            entry["bbox"] = [left, top, left + wide, top + high]
    path.write_text(json.dumps(content))
    read(boxes)
    assert ("boxes end outside of their pictures" in caplog.text) == corners
