"""Counts the earlier runs that were scored on the same test samples, or on some of them.

Each run is another chance of a wrong pass, but the correction of a sweep counts only its own runs.
To find samples that were added after an undecided verdict, each run logs a sketch of its samples:
the smallest sample ids (Cohen and Kaplan, "Summarizing Data using Bottom-k Sketches", PODC 2007).
If a twentieth of an earlier run's samples are scored again, its sketch holds at least one of them
in 96% of the cases (1 - 0.95^64).
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.text import one_line
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import Store, check_answers, is_away
from resnet8ptq.tracking.record import RunRecord

log = logging.getLogger(__name__)

MOST = 50  # the most runs of a query, as each takes MLflow 4 ms
KEPT = 64  # ids in a sketch

Ids = NDArray[np.uint64]  # see `Split.sample_ids`


@dataclass(frozen=True)
class EarlierRuns:
    """The earlier quantized runs of a network on the same test samples, or on some of them.

    Attributes:
        count: the number of these runs; see `count_earlier`.
        more: whether there may be further ones; False if none was counted.
        others: those of the counted runs whose test samples are not exactly the same.
    """

    count: int = 0
    more: bool = False
    others: tuple[RunRecord, ...] = field(default=(), repr=False)


NO_EARLIER_RUNS = EarlierRuns()


def sketch(ids: Ids) -> str:
    """Return the `KEPT` smallest sample ids of a run, as a tag.

    >>> read_sketch(sketch(np.array([7, 5], np.uint64))).tolist()
    [5, 7]
    """
    return "".join(f"{number:016x}" for number in np.unique(ids)[:KEPT].tolist())


def read_sketch(tag: str) -> Ids:
    """Return the sample ids in a tag; empty if the tag is damaged."""
    if not re.fullmatch(f"([0-9a-f]{{16}}){{0,{KEPT}}}", tag):
        return np.zeros(0, np.uint64)
    return np.frombuffer(bytes.fromhex(tag), ">u8").astype(np.uint64)


def count_earlier(
    store: Store, records: Sequence[RunRecord], ids: Ids | None = None
) -> EarlierRuns:
    """Count the earlier quantized runs of the same network that scored all or some of the samples.

    Runs are earlier if they started before the sweep, or before the single run. Deleted runs count,
    because somebody has seen their results. Analyses, FP32 and runs without a result do not count.
    If the store is unavailable, a warning is logged, and no run is counted.

    Args:
        records: the runs of one family of a sweep, or a single run.
        ids: ids of the samples; None if only runs on exactly the same samples count.
    """
    scored = _find_scored(records)
    if scored is None or not re.fullmatch("[0-9a-f]{64}", scored.samples_digest):
        return NO_EARLIER_RUNS
    try:
        check_answers(store.uri)
        begun_ms = _find_start(store, records)
        same = _find(store, f"= '{scored.samples_digest}'", begun_ms)
        others = []
        if ids is not None:
            others = _find(store, f"!= '{scored.samples_digest}'", begun_ms)
    except Exception as error:
        if not is_away(error):
            raise
        log.warning("earlier runs on these samples are not counted: %s", one_line(error))
        return NO_EARLIER_RUNS

    # Count the runs of this network outside this sweep
    own = {record.key for record in records}
    count = 0
    for record in same:
        if _counts(record, scored) and record.key not in own:
            count += 1
    shared = []
    for record in others:
        some_ids = read_sketch(record.tags.get("sample_sketch", ""))
        if _counts(record, scored) and ids is not None and np.isin(some_ids, ids).any():
            shared.append(record)
    count += len(shared)
    is_full = MOST in (len(same), len(others))
    return EarlierRuns(count, more=is_full and count > 0, others=tuple(shared))


def _find_scored(records: Sequence[RunRecord]) -> RunRecord | None:
    """Return the first run that logged a digest of its test samples; None without one."""
    for record in records:
        if record.samples_digest:
            return record
    return None


def _network_of(record: RunRecord) -> tuple[str | None, ...]:
    return (record.model, *record.select("model.path", "model.module", "model.state_dict"))


def _counts(record: RunRecord, scored: RunRecord) -> bool:
    """Return whether a run ended with a quantized model of the network of `scored`."""
    is_model = record.status == "ok" and record.quantized and not record.is_analysis
    return is_model and _network_of(record) == _network_of(scored)


def _find_start(store: Store, records: Sequence[RunRecord]) -> int | None:
    """Return the start of the records' sweep or single run in ms; None if the store lacks it.

    The latest start counts, because a sweep may have taken over earlier runs from outside.
    """
    ids = set()
    for record in records:
        run_id = record.sweep_id or record.run_id
        if run_id != record.key:  # the id of a run that the store lacks is its key
            ids.add(run_id)
    starts = [store.client.get_run(run_id).info.start_time for run_id in ids]
    return max(starts, default=None)


def _find(store: Store, digest: str, before_ms: int | None) -> list[RunRecord]:
    """Return the newest runs whose digest meets a condition.

    Args:
        before_ms: the time before which the runs started; None for any.
    """
    filters = f"tags.test_digest {digest}"
    if before_ms is not None:
        filters += f" AND attributes.start_time < {before_ms}"
    return history.find_runs(store, filters, most=MOST, deleted=True)
