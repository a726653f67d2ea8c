"""Reads a local store's newest run from the database in milliseconds, where MLflow takes
seconds.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.tracking.journal import PARENT_TAG
from resnet8ptq.tracking.mlflow_store.store import Store, open_database

_NEWEST = """
    SELECT run_uuid FROM runs WHERE experiment_id = ? AND lifecycle_stage = 'active'
    ORDER BY start_time DESC LIMIT 1
"""
_TAG = "SELECT value FROM tags WHERE run_uuid = ? AND key = ?"
_CHILDREN = """
    SELECT key.value, runs.run_uuid FROM runs
    JOIN tags AS parent ON parent.run_uuid = runs.run_uuid
    JOIN tags AS key ON key.run_uuid = runs.run_uuid
    WHERE parent.key = ? AND parent.value = ? AND key.key = 'record'
    AND runs.lifecycle_stage = 'active'
"""


@dataclass(frozen=True)
class NewestRun:
    """The newest single run, or the sweep of the newest run, as recorded in the database.

    Attributes:
        folder: the folder that the run names for its files; it may be any, because the store is
            untrusted.
        key: the key of the run's journal.
        ids: MLflow's ids of the run and of the sweep's runs that are not deleted, by the keys of
            their journals. A journal may lack the id, if its run ended before the store gave it.
    """

    folder: Path
    key: str
    ids: Mapping[str, str]


def find_newest(store: Store) -> NewestRun | None:
    """Return the newest run of a local store's experiment, or the sweep of this run.

    Returns None if the experiment has no run, if the database cannot be read, or if the run lacks
    the tag of its folder or of its key.
    """
    try:
        with closing(open_database(store)) as connection:
            return _find_newest(connection, store.experiment_id)
    # The database is locked, damaged, or has the tables of another version of MLflow
    except sqlite3.Error:
        return None


def _find_newest(connection: sqlite3.Connection, experiment_id: str) -> NewestRun | None:
    newest = connection.execute(_NEWEST, (int(experiment_id),)).fetchone()
    if newest is None:
        return None

    # A sweep stands for its runs
    parent = connection.execute(_TAG, (newest[0], PARENT_TAG)).fetchone()
    run_id = newest[0] if parent is None else parent[0]
    folder = connection.execute(_TAG, (run_id, "folder")).fetchone()
    key = connection.execute(_TAG, (run_id, "record")).fetchone()
    if folder is None or key is None:
        return None
    children = connection.execute(_CHILDREN, (PARENT_TAG, run_id)).fetchall()
    return NewestRun(Path(folder[0]), key[0], ids={key[0]: run_id, **dict(children)})
