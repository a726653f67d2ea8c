"""What the store gets of a run while it runs, as long as the store is there.

The calls come in order, in the process that uploads (`core.background`) or in that of the run.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resnet8ptq.core.text import one_line
from resnet8ptq.tracking import upload
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.store import Store, is_away

log = logging.getLogger(__name__)


@dataclass
class _RemoteRun:
    """An open run in the store.

    Attributes:
        run_id: empty where the store could not be reached.
        away: the store did not take a call: the run is logged as a whole when it ends.
    """

    run_id: str = ""
    away: bool = False


_open: dict[Path, _RemoteRun] = {}  # by the folders of their runs; of this process


def warm_up() -> None:
    """Import what drawing and logging take, before the first run asks for it."""
    from mlflow import onnx, pyfunc  # noqa: F401

    from resnet8ptq.core import figures  # noqa: F401


def open_run(store: Store, journal: Journal, folder: Path) -> str:
    """Make the run of a folder in the store; return its id, empty where the store is away."""
    remote = _open[folder] = _RemoteRun()
    try:
        remote.run_id = _send(store, folder, lambda *_: _create(store, journal)) or ""
    except Exception:
        remote.away = True  # one error is enough for a run that is refused
        raise
    return remote.run_id


def _create(store: Store, journal: Journal) -> str:
    store.check_answers()  # MLflow would wait for four timeouts
    return upload.create(store, journal)


def send(store: Store, folder: Path, call: Callable[..., object], *what: Any) -> None:
    """Call with the store, the run's id and `what`, unless the store is away; find out that it is.

    A run that this process has not opened, because the one that did has died, is logged at its end.
    """
    _open.setdefault(folder, _RemoteRun(away=True))
    _send(store, folder, call, *what)


def close_run(store: Store, journal: Journal, folder: Path) -> None:
    """Close the run in the store, which may have come back meanwhile."""
    remote = _open.setdefault(folder, _RemoteRun(away=True))
    if remote.away and store.answers:
        remote.away = False
        _send(store, folder, lambda *_: upload.push(store, journal, folder))
    else:
        _send(store, folder, upload.finish, journal)
    del _open[folder]


def _send(store: Store, folder: Path, call: Callable[..., Any], *what: Any) -> Any:
    remote = _open[folder]
    if remote.away:
        return None
    try:
        return call(store, remote.run_id, *what)
    except Exception as error:  # MLflow's, SQLAlchemy's, requests', the disk's
        if not is_away(error):
            raise
        remote.away = True
        shout = "TRACKING STORE UNAVAILABLE: the run is kept in %s (%s)"
        log.warning(shout, folder, one_line(error))
        return None
