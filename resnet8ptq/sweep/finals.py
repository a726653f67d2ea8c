"""After a sweep's last run: its best models timed against each other and against FP32."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from resnet8ptq.core import files, machine
from resnet8ptq.core.text import one_line
from resnet8ptq.evaluation.race import FILE, Race
from resnet8ptq.experiment import finals
from resnet8ptq.report.comparison import Cell
from resnet8ptq.report.recommend import Selection, finalists, fp32_name

log = logging.getLogger(__name__)


def race(chosen: Sequence[Selection], folder: Path) -> list[Race | None]:
    """Time the finalists of each family, and keep the latencies in `folder`.

    Returns:
        None for a family of which nothing was timed, or not on this machine.
    """
    races = [_race(selected) for selected in chosen]
    if any(races):
        kept = [None if found is None else found.to_json() for found in races]
        files.write_text(folder / FILE, json.dumps(kept))
    return races


def _race(selected: Selection) -> Race | None:
    models = finalists(selected)
    timed = [cell for cell in selected.family.measured if "speedup" in cell.record.metrics]
    baselines = {fp32_name(cell): _folder(cell) for cell in timed}
    if not models or not baselines:
        return None
    cpu = machine.describe().get("cpu")
    if any(cell.record.tags.get("cpu") != cpu for cell in (*models, *timed)):
        log.warning("the best models ran on other machines, and are not timed against each other")
        return None
    try:
        return finals.run({cell.record.run_id: _folder(cell) for cell in models}, baselines)
    except Exception as error:  # the runs are whole without it
        log.warning("the best models could not be timed against each other: %s", one_line(error))
        return None


def _folder(cell: Cell) -> Path:
    return Path(cell.record.tags["folder"])
