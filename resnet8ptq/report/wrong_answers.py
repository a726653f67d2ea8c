"""Wrong answers of the recommended model, as its run has written them (`experiment`)."""

import base64
import json
import logging
from dataclasses import dataclass
from typing import Any

from resnet8ptq.core import files
from resnet8ptq.core.errors import TrackingError, errors_as
from resnet8ptq.core.text import one_line
from resnet8ptq.experiment.wrong_examples import COUNT, FILE
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.tracking import history
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.store import Store

log = logging.getLogger(__name__)

MAX_BYTES = 2**22  # of the file
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


@dataclass(frozen=True)
class Example:
    """A sample with a wrong answer: a picture as a data URL, or a text."""

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
        lost: the number of those that FP32 answers right.
    """

    label: str
    wrong: int
    lost: int
    examples: tuple[Example, ...]


def load(store: Store, selected: ModelSelection) -> WrongAnswers | None:
    """Return the wrong answers of the recommended model; None if its run has none or no model is.

    Warns of a damaged file, and leaves it out: a store is untrusted.
    """
    recommended = selected.recommendations
    if not recommended or recommended[0].choice is None:
        return None
    cell = recommended[0].choice
    try:
        if FILE not in history.list_artifacts(store, cell.record):
            return None
        return _read(store, cell.record, recommended[0].label)
    except (TrackingError, OSError) as error:
        log.warning("the report leaves out the wrong answers: %s", one_line(error))
        return None


def _read(store: Store, record: RunRecord, label: str) -> WrongAnswers | None:
    with history.artifact(store, record, FILE) as path:
        content = files.read_bytes(path, MAX_BYTES)
    with errors_as(TrackingError, f"run {record.run_id}: {FILE} is damaged"):
        kept = json.loads(content)
        examples = tuple(_example(entry) for entry in kept["examples"][:COUNT])
        answers = WrongAnswers(label, int(kept["wrong"]), int(kept["lost"]), examples)
    return answers if examples else None


def _example(entry: dict[str, Any]) -> Example:
    picture = ""
    if "png" in entry:
        png = base64.b64decode(entry["png"], validate=True)
        if not (png.startswith(_PNG_START) and png.endswith(_PNG_END)):
            raise ValueError("not a PNG file")
        picture = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return Example(
        truth=str(entry["true"]),
        fp32=str(entry["fp32"]),
        model=str(entry["model"]),
        picture=picture,
        text=str(entry.get("text", "")),
    )
