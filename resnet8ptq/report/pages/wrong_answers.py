"""Reads the wrong answers of the recommended model, see `experiment.wrong_examples`."""

import base64
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resnet8ptq.core import figures, files
from resnet8ptq.experiment.wrong_examples import COUNT, FILE
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import Store

MAX_BYTES = 2**22  # largest file


@dataclass(frozen=True)
class WrongAnswer:
    """A sample with a wrong answer of the model.

    Attributes:
        truth: the true class.
        fp32, model: the answers of FP32 and of the model.
        picture: the sample as a data URL; empty for a text.
        text: the sample, if it is a text; else empty.
    """

    truth: str
    fp32: str
    model: str
    picture: str = ""
    text: str = ""


@dataclass(frozen=True)
class WrongAnswers:
    """Wrong answers of a model.

    Attributes:
        wrong: the number of samples with a wrong answer.
        lost: the number of these samples that FP32 answers right.
        examples: some of these samples, at most `wrong_examples.COUNT`.
    """

    label: str
    wrong: int
    lost: int
    examples: tuple[WrongAnswer, ...]


def load_wrong_answers(store: Store, selected: ModelSelection) -> WrongAnswers | None:
    """Return the wrong answers of the first recommended model.

    Returns None without a recommended model, or without a sound file with examples.
    """
    recommended = selected.recommendations
    if not recommended or recommended[0].choice is None:
        return None
    record = recommended[0].choice.record
    reader = partial(_read, recommended[0].label)
    lacks = "the report leaves out the wrong answers"
    return history.read_if_sound(
        store, record, name=FILE, reader=reader, lacks=lacks, optional=True
    )


def _read(label: str, path: Path) -> WrongAnswers | None:
    kept = json.loads(files.read_bytes(path, MAX_BYTES))
    examples = tuple(map(_example, kept["examples"][:COUNT]))
    answers = WrongAnswers(
        label, wrong=int(kept["wrong"]), lost=int(kept["lost"]), examples=examples
    )
    if not examples:
        return None
    return answers


def _example(entry: dict[str, Any]) -> WrongAnswer:
    picture = ""
    if "png" in entry:
        png = figures.check_png(base64.b64decode(entry["png"], validate=True))
        picture = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return WrongAnswer(
        truth=str(entry["true"]),
        fp32=str(entry["fp32"]),
        model=str(entry["model"]),
        picture=picture,
        text=str(entry.get("text", "")),
    )
