"""`sweep.resume=true`: continues a sweep without repeating finished jobs.

A run has finished if its status in MLflow is FINISHED, which is set last. A job repeats a run if
both have the same `identity`.
"""

import logging
import os
from pathlib import Path

from resnet8ptq.core import background
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tracking import history, journal
from resnet8ptq.tracking.mlflow_store.store import Store, is_away
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.sweep_file import SharedSweep

log = logging.getLogger(__name__)


def find_sweep(store: Store, key: str, own: Path | None = None) -> RunRecord | None:
    """Return the newest sweep with this key, or None.

    Args:
        own: the folder that this process has locked, which may be the sweep's folder.

    Raises:
        TrackingError: the sweep is still running.
    """
    sweep = history.find_parent(store, f"tags.sweep_key = '{key}'")
    if sweep is None or Path(sweep.folder) == own:
        return sweep
    if journal.is_alive(Path(sweep.folder)):
        raise TrackingError(
            f"sweep.resume: the sweep of these overrides is still running in {sweep.folder}"
        )
    return sweep


def find_killed(store: Store, key: str) -> RunRecord | None:
    """Return the newest sweep with this key if it was interrupted or killed; None otherwise.

    A killed sweep stays open until `resnet8ptq sync` closes it as killed. The result is None also
    for an open sweep whose lock this process cannot take: in a store for several machines, the
    sweep may be running on another one.
    """
    sweep = history.find_parent(store, f"tags.sweep_key = '{key}'")
    if sweep is not None and sweep.status == "killed":
        return sweep
    if sweep is None or sweep.ended:
        return None
    folder = Path(sweep.folder)
    if not os.access(folder / journal.LOCK, os.W_OK) or journal.is_alive(folder):
        return None
    return sweep


def find_finished(
    sweep: SharedSweep, number: int, identity: str | None, again: bool = False
) -> RunRecord | None:
    """Return the finished run that a job would repeat, or None.

    If a launcher restarts a finished job, this is the job's own run. With `sweep.resume`, it may be
    any run of the experiment, which this sweep then adopts by a tag, unless somebody measured its
    file by hand on another machine. With `again`, it may be a run of any job of this sweep. A run
    that its time limit cut short does not count.
    """
    if identity is None or not (again or _may_repeat(sweep)):
        return None
    background.wait_until_idle()  # a run that has just ended may not be in the store yet
    finished = _find(
        sweep.store, f"tags.identity = '{identity}' and attributes.status = 'FINISHED'"
    )
    matching = [record for record in finished if "cut_short" not in record.params]
    ours = [record for record in matching if record.sweep_id == sweep.parent_id]

    # Prefer the job's own run
    for record in ours:
        if record.job_number == str(number):
            return history.complete(sweep.store, record)

    # Then use another job's run
    if again and ours:
        return history.complete(sweep.store, ours[0])

    # Then use another sweep's run, unless it was carried to another machine
    for record in matching:
        if sweep.resume and not record.was_carried:
            history.adopt(sweep.store, sweep.parent_id, number, record=record)
            return history.complete(sweep.store, record)
    return None


def find_attempts(sweep: SharedSweep, number: int) -> list[RunRecord]:
    """Return a job's earlier runs in this sweep that did not finish.

    Such runs exist only after `sweep.resume`, or if a launcher restarts a job whose process died.

    Raises:
        TrackingError: one of these runs is still running.
    """
    if not _may_repeat(sweep):
        return []
    unfinished = (
        f"{history.under(sweep.parent_id)} and tags.job_number = '{number}'"
        " and attributes.status != 'FINISHED'"
    )
    attempts = _find(sweep.store, unfinished)
    for record in attempts:
        if not record.ended and journal.is_alive(Path(record.folder)):
            raise TrackingError(f"job {number} is still running in {record.folder}")
    return attempts


def _may_repeat(sweep: SharedSweep) -> bool:
    """Return whether a job may have run before: after a resume, or a restart by a launcher."""
    return sweep.resume or sweep.parallel is not None


def _find(store: Store, filters: str) -> list[RunRecord]:
    """Return the runs that match the filter; none, with a warning, if the store is unavailable.

    If the store is unavailable, the job runs, and its folder keeps the result.
    """
    if store.answers:
        try:
            return history.find_runs(store, filters)
        except Exception as error:
            if not is_away(error):
                raise
    log.warning("the tracking store does not answer: finished runs are unknown, and the job runs")
    return []
