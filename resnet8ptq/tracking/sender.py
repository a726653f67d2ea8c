"""Sends an open run to MLflow while MLflow is reachable.

The calls run in order, in the background process (`core.background`) or in the run's own.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resnet8ptq.core.text import one_line
from resnet8ptq.tracking import upload
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.store import Store, check_answers, is_away

log = logging.getLogger(__name__)


@dataclass
class _RemoteRun:
    """An open run in the store.

    Attributes:
        run_id: empty if the store was unavailable.
        away: the store failed once; the whole run is logged when it ends.
    """

    run_id: str = ""
    away: bool = False


_open: dict[Path, _RemoteRun] = {}  # by the folders of their runs; of this process


def warm_up() -> None:
    """Import what drawing and logging take, before the first run asks for it."""
    from mlflow import onnx, pyfunc  # noqa: F401
    from mlflow.utils import requirements_utils

    from resnet8ptq.core import figures  # noqa: F401

    # MLflow would read the records of all installed packages to learn which of them a module is of,
    # a third of a second. It compares a model's requirements with what is installed, and ours are
    # what is installed.
    requirements_utils._MODULES_TO_PACKAGES = {}


def open_run(store: Store, journal: Journal, folder: Path) -> str:
    """Create the run of a folder in the store; return its id, empty if the store is unavailable."""
    remote = _open[folder] = _RemoteRun()
    try:
        remote.run_id = _send(store, folder, lambda *_: _create(store, journal)) or ""
    except Exception:
        remote.away = True  # one error is enough for a run that is refused
        raise
    return remote.run_id


def _create(store: Store, journal: Journal) -> str:
    check_answers(store.uri)  # MLflow would wait for four timeouts
    return upload.create(store, journal)


def send(store: Store, folder: Path, call: Callable[..., object], *arguments: Any) -> None:
    """Call with the store, the run's id and `arguments`, unless the store is unavailable.

    If the process that opened the run has died, the run is logged at its end.
    """
    _open.setdefault(folder, _RemoteRun(away=True))
    _send(store, folder, call, *arguments)


def close_run(store: Store, journal: Journal, folder: Path) -> None:
    """Close the run in the store; log all of it if the store was unavailable and is back."""
    remote = _open.setdefault(folder, _RemoteRun(away=True))
    if remote.away and store.answers:
        remote.away = False
        _send(store, folder, lambda *_: upload.push(store, journal, folder))
    else:
        _send(store, folder, upload.finish, journal)
    del _open[folder]


def _send(store: Store, folder: Path, call: Callable[..., Any], *arguments: Any) -> Any:
    remote = _open[folder]
    if remote.away:
        return None
    try:
        return call(store, remote.run_id, *arguments)
    except Exception as error:  # MLflow's, SQLAlchemy's, requests', the disk's
        if not is_away(error):
            raise
        remote.away = True
        shout = "TRACKING STORE UNAVAILABLE: the run is kept in %s (%s)"
        log.warning(shout, folder, one_line(error))
        return None
