"""Wrong answers that a run keeps for its report."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from resnet8ptq.data.dataset import Split
from resnet8ptq.experiment import wrong_examples
from resnet8ptq.tasks import classification, regression
from resnet8ptq.tasks.classification import ClassScores
from resnet8ptq.tasks.scoring.hits import Hits

LABELS = np.arange(40) % 2
NAMES = ("cat", "dog")
MODEL = np.where(np.arange(40) < 12, 1 - LABELS, LABELS)  # wrong on the first 12
BASELINE = np.where(np.arange(40) < 4, 1 - LABELS, LABELS)  # of them, wrong on 4 too


def scores(predictions: np.ndarray) -> ClassScores:
    return ClassScores(np.eye(2, dtype=np.float32)[predictions], LABELS)


def pictures(height: int = 8, channels: int = 3) -> Split:
    images = np.zeros((40, height, 2 * height, channels), np.uint8)
    images[:] = np.arange(40).reshape(-1, 1, 1, 1)
    return Split(images, LABELS, "drawn")


def write(folder, samples: Split) -> dict | None:
    task = classification.build(NAMES)
    comparison = task.compare(scores(MODEL), scores(BASELINE))
    wrong_examples.write(folder, task, comparison, samples)
    path = folder / wrong_examples.FILE
    return json.loads(path.read_text()) if path.exists() else None


def decode(example: dict) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(example["png"])))


def test_the_answers_that_fp32_gets_right_come_first():
    chosen = wrong_examples.choose(Hits(MODEL, LABELS), Hits(BASELINE, LABELS))
    assert chosen.tolist() == [*range(4, 12), 0, 1]


@pytest.mark.parametrize("channels", [1, 3])
def test_an_example_is_the_picture_that_was_scored_with_three_answers(tmp_path, channels):
    kept = write(tmp_path, pictures(channels=channels))
    assert (kept["wrong"], kept["lost"], len(kept["examples"])) == (12, 8, 10)
    first = kept["examples"][0]
    assert [first[name] for name in ("true", "fp32", "model")] == ["cat", "cat", "dog"]
    assert np.unique(np.asarray(decode(first))).tolist() == [4]


def test_a_large_picture_is_reduced(tmp_path):
    kept = write(tmp_path, pictures(height=200))
    assert decode(kept["examples"][0]).size == (160, 80)


def test_a_text_is_kept_as_it_was_read(tmp_path):
    texts = np.array([f"question {number}" for number in range(40)], np.object_)
    tokens = np.zeros(40, np.dtype([("input_ids", "<i8", (4,))]))
    kept = write(tmp_path, replace(Split(tokens, LABELS, "t.csv"), texts=texts).take(np.arange(40)))
    assert kept["examples"][0]["text"] == "question 4"
    assert "png" not in kept["examples"][0]


def test_other_samples_and_other_tasks_keep_none(tmp_path):
    assert write(tmp_path, Split(np.zeros((40, 7), np.float32), LABELS, "made")) is None
    assert regression.build().files.answers(None) is None
