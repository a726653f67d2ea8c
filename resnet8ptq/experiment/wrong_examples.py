"""Samples with a wrong answer of the quantized model, and FP32's answer to them, for the report.

The run writes these examples, because a report reads no data set. Examples exist only for pictures
and texts, and only if answers are classes.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import files
from resnet8ptq.data.dataset import Split
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.task import Task

FILE = "wrong_examples.json"
COUNT = 10
MOST_PIXELS = 160  # most pixels along a side of a picture
MOST_CHARACTERS = 400  # most characters of a text


def write(folder: Path, task: Task, comparison: Comparison, samples: Split) -> None:
    """Write `FILE` for pictures that `to_png` takes and for texts, if each answer is a class.

    Args:
        samples: the scored samples, in the order of the answers.
    """
    answers = None if task.scope.joins_groups else task.files.answers(comparison)
    if answers is None or not (_is_picture(samples) or samples.texts is not None):
        return
    model, baseline = answers
    wrong = ~model.right
    lost = wrong & baseline.right
    examples = []
    for index in choose(model, baseline).tolist():
        examples.append(_describe(task, model, baseline, samples=samples, index=index))
    content = {"wrong": int(wrong.sum()), "lost": int(lost.sum()), "examples": examples}
    files.write_text(folder / FILE, json.dumps(content))


def choose(model: Hits, baseline: Hits) -> NDArray[np.int64]:
    """Return the indices of at most `COUNT` wrong answers, first of those that FP32 gets right."""
    wrong = np.flatnonzero(~model.right)
    by_fp32 = baseline.right[wrong]
    return np.concatenate([wrong[by_fp32], wrong[~by_fp32]])[:COUNT]


def _describe(
    task: Task, model: Hits, baseline: Hits, samples: Split, index: int
) -> dict[str, str]:
    names = task.class_names
    example = {
        "true": names[model.labels[index]],
        "fp32": names[baseline.predictions[index]],
        "model": names[model.predictions[index]],
    }
    if samples.texts is not None:
        return {**example, "text": str(samples.texts[index])[:MOST_CHARACTERS]}
    [picture] = samples.stored[np.array([index])]
    return {**example, "png": base64.b64encode(to_png(picture)).decode()}


def _is_picture(samples: Split) -> bool:
    return samples.has_pictures and samples.stored.shape[3] in (1, 3)


def to_png(picture: NDArray[Any]) -> bytes:
    """Return a picture [H, W, 1 or 3] of bytes as PNG, with at most `MOST_PIXELS` along a side."""
    from PIL import Image

    if picture.shape[2] == 1:  # PIL takes grey pictures without the axis of channels
        picture = picture[..., 0]
    image = Image.fromarray(picture)
    image.thumbnail((MOST_PIXELS, MOST_PIXELS))
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return content.getvalue()
