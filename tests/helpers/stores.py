"""Empty MLflow stores, made faster than MLflow does."""

import shutil
import sqlite3
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from resnet8ptq.core import cache

if TYPE_CHECKING:  # most tests do without MLflow
    from resnet8ptq.tracking.mlflow_store.store import Store


def without_waiting_for_the_disk() -> Any:
    """Patch SQLite so that a commit returns before the disk has it: 5 ms and more each.

    A killed process loses nothing by that; a machine without power would, which no test shows.
    """
    connect = sqlite3.dbapi2.connect

    def connect_quickly(*args: Any, **named: Any) -> sqlite3.Connection:
        connection = connect(*args, **named)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    return mock.patch.object(sqlite3.dbapi2, "connect", connect_quickly)


def new_store(root: Path) -> "Store":
    """Make an empty store in `root`, faster than MLflow does."""
    from resnet8ptq.config.schema import TrackingConfig
    from resnet8ptq.tracking.mlflow_store import store

    root.mkdir(parents=True, exist_ok=True)
    copy_database(store._make_database, root / "mlflow.db")
    return store.open_store(TrackingConfig(root=str(root)))


def copy_database(make: Callable[[Path], None], path: Path) -> None:
    """Put an empty store at `path`: a copy of one of `make`, which takes MLflow three seconds."""
    share_between_stores()
    kept = cache.entry(cache.folder(None), "stores", {}, lambda folder: make(folder / "mlflow.db"))
    shutil.copyfile(kept / "mlflow.db", path)


@once
def share_between_stores() -> None:
    """Share the latest migration and the compiled queries among all stores of this process.

    MLflow looks through its migrations whenever it opens a store, and SQLAlchemy compiles each
    query again for each file. Together they take half of the time in which a short run logs.
    """
    from mlflow.store.db import utils

    utils._get_latest_schema_revision = once(utils._get_latest_schema_revision)
    make = utils.create_sqlalchemy_engine
    shared = make("sqlite://")
    shared.connect().close()  # the dialect asks SQLite for its version
    shared.dispose()

    def create(uri: str) -> Any:
        engine = make(uri)
        if uri.startswith("sqlite:"):
            engine.dialect = engine.pool._dialect = shared.dialect
            engine._compiled_cache = shared._compiled_cache
        return engine

    utils.create_sqlalchemy_engine = create
