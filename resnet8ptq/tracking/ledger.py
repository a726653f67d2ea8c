"""The number of earlier runs that were scored on the same test samples.

Each run is one more chance of a wrong pass, and the correction of a sweep counts its own runs only.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from resnet8ptq.core.text import one_line
from resnet8ptq.tracking import history
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.store import Store, check_answers, is_away

log = logging.getLogger(__name__)

MOST = 50  # runs that are read, of any number: each takes MLflow 4 ms


@dataclass(frozen=True)
class Looks:
    """The number of earlier runs of the experiment on the same test samples; `more`: at least."""

    count: int = 0
    more: bool = False


NO_LOOKS = Looks()


def count_earlier(store: Store, records: Sequence[RunRecord]) -> Looks:
    """Count the quantized runs that were scored on the samples of `records` before their sweep.

    Deleted ones count too: somebody has seen their results. Analyses and FP32 do not. A store that
    is away counts none, with a warning.

    Args:
        records: the runs of one family: of one sweep, or a single run that has just ended.
    """
    scored = next((record for record in records if record.test_digest), None)
    if scored is None or not re.fullmatch("[0-9a-f]{64}", scored.test_digest):
        return NO_LOOKS
    try:
        check_answers(store.uri)
        before = _find(store, scored)
    except Exception as error:
        if not is_away(error):
            raise
        log.warning("earlier runs on these samples are not counted: %s", one_line(error))
        return NO_LOOKS
    own = {record.key for record in records}
    counted = [
        record
        for record in before
        if record.status == "ok" and record.quantized and not record.is_analysis
        if record.key not in own
    ]
    return Looks(len(counted), len(before) >= MOST)


def _find(store: Store, scored: RunRecord) -> list[RunRecord]:
    """Return the newest runs on the same samples; of a sweep, those from before it."""
    filters = f"tags.test_digest = '{scored.test_digest}'"
    if scored.parent_id:
        begun = store.client.get_run(scored.parent_id).info.start_time
        filters += f" AND attributes.start_time < {begun}"
    return history.find_runs(store, filters, most=MOST, deleted=True)
