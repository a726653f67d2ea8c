"""Sends an open run to MLflow while MLflow is reachable.

The calls run in order, in the background process (`core.background`) or the run's process.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resnet8ptq.core.text import one_line
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import upload
from resnet8ptq.tracking.mlflow_store.store import Store, check_answers, is_away

log = logging.getLogger(__name__)


# Folder of an open run of this process -> the run's id in the store. The id is None if the store
# failed once; then the whole run is logged when it ends.
_open: dict[Path, str | None] = {}


def warm_up() -> None:
    """Import the modules for figures and for MLflow's models ahead of their first use."""
    from mlflow import onnx, pyfunc  # noqa: F401

    from resnet8ptq.core import figures  # noqa: F401


def open_run(store: Store, journal: Journal, folder: Path) -> str:
    """Create the run of a folder in the store; return its id, empty if the store is unavailable."""
    _open[folder] = ""
    try:
        run_id = _send(store, folder, lambda *_: _create(store, journal))
    except Exception:
        _open[folder] = None  # report a refused run only once
        raise
    _open[folder] = run_id
    return run_id or ""


def _create(store: Store, journal: Journal) -> str:
    check_answers(store.uri)  # otherwise MLflow would wait for four timeouts
    return upload.create_run(store, journal)


def send(store: Store, folder: Path, call: Callable[..., object], *arguments: Any) -> None:
    """Call a function with store, run id and `arguments`, or leave the run to `close_run`.

    The run is left to `close_run` after a call that found the store unavailable, after a failure to
    create the run, and if the process that opened the run has died.
    """
    _open.setdefault(folder, None)
    _send(store, folder, call, *arguments)


def close_run(store: Store, journal: Journal, folder: Path) -> None:
    """Close the run in the store.

    If `send` leaves out the run's calls, and the store answers now, log the whole run instead.
    """
    if _open.setdefault(folder, None) is None and store.answers:
        _open[folder] = ""
        _send(store, folder, lambda *_: upload.push(store, journal, folder))
    else:
        _send(store, folder, upload.finish, journal)
    del _open[folder]


def _send(store: Store, folder: Path, call: Callable[..., Any], *arguments: Any) -> Any:
    run_id = _open[folder]
    if run_id is None:
        return None
    try:
        return call(store, run_id, *arguments)
    except Exception as error:  # an error of MLflow, SQLAlchemy, requests or the disk
        if not is_away(error):
            raise
        _open[folder] = None
        shout = "TRACKING STORE UNAVAILABLE: the run is kept in %s (%s)"
        log.warning(shout, folder, one_line(error))
        return None
