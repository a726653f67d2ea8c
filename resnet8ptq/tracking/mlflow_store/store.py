"""Opens the MLflow store and its experiment."""

import functools
import logging
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from filelock import FileLock

# MLflow reads these at import. They turn off telemetry, and run URLs and bars between our tables.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# Three retries cover a server that restarts. With MLflow's seven, a missing server would take four
# minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
# The timeout of each try. By default, a server that never answers would block calls for 8 minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core import files, invocation
from resnet8ptq.core.errors import ConfigError, PtqError, TrackingError
from resnet8ptq.core.text import redact, safe_name
from resnet8ptq.tracking.mlflow_store import address, artifacts, view

if TYPE_CHECKING:  # only the process that uploads needs this, which takes a second to import
    import mlflow

for _noisy in ("alembic", "mlflow.models.model", "mlflow.pyfunc"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
# This module would log the traceback of each error that it raises.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

# Tags of a new experiment, so that MLflow's UI shows the columns that matter.
_TAGS = {view.TAG: view.VALUE, "mlflow.experimentKind": "custom_model_development"}
ID = re.compile(r"\w+")  # an id, because other characters could change a query or a command
HEALTH_S = 10  # timeout of a server's health check
DATABASE = "mlflow.db"
_LOCAL = artifacts.SQLITE
_MEMORY = "/dev/shm"  # Linux's file system in memory
_DAMAGED = ("disk image is malformed", "file is not a database")  # parts of SQLite's messages


def check_id(text: str, key: str = "run_id") -> str:
    """Return an id from an untrusted store if it is safe in queries and commands.

    Raises:
        TrackingError: the id is empty, or holds characters other than letters, digits and `_`.
    """
    if not ID.fullmatch(text):
        raise TrackingError(f"{key}: got {text[:100]!r}, expected letters, digits and _")
    return text


@dataclass(frozen=True)
class Store:
    """The address of an MLflow store, and the experiment in it.

    Attributes:
        root: the folder that may hold the artifacts of a database whose address the user has named;
            empty for a local store; see `artifacts`.
    """

    uri: str
    experiment_id: str
    experiment_name: str
    root: str = ""

    @property
    def client(self) -> "mlflow.MlflowClient":
        """MLflow's client of this store; each of its errors becomes a `TrackingError`."""
        return cast("mlflow.MlflowClient", _Client(self))

    def locate(self, uri: str) -> Path | None:
        """Return the path of an artifact's address; None if a server holds the artifact.

        Raises:
            TrackingError: the address does not belong to this store, which is untrusted.
        """
        return artifacts.locate(uri, self.uri, self.root)

    @property
    def answers(self) -> bool:
        """Whether the server answers, see `check_answers`; always true for a database."""
        try:
            check_answers(self.uri)
        except TrackingError:
            return False
        return True

    @property
    def ui_command(self) -> str:
        """How to browse the runs: a page of the server, or the command `ui` and its page."""
        page = view.path(self.experiment_id)
        if self.uri.startswith("http"):
            return f"{redact(self.uri)}{page}"
        return f"{invocation.command('ui', *self.words)}, then http://127.0.0.1:5000{page}"

    @property
    def words(self) -> list[str]:
        """The key=value settings by which a command selects this store, without default values.

        An address that may hold a password is left out, see `_name`.
        """
        words = _name(self.uri, self.experiment_name)
        is_named = self.root not in ("", str(Path(TrackingConfig.root).absolute()))
        is_server = self.uri.startswith("http")  # a server holds its artifacts itself
        if is_named and not is_server:
            words.append(f"root={self.root}")
        return words


@dataclass(frozen=True)
class _Client:
    """MLflow's client, whose calls each run in `in_one_line`."""

    store: Store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import mlflow

        @functools.wraps(getattr(mlflow.MlflowClient, name))
        def call(*args: Any, **named: Any) -> Any:
            with in_one_line(self.store):
                client = mlflow.MlflowClient(tracking_uri=self.store.uri)
                return getattr(client, name)(*args, **named)

        return call


def _name(uri: str, experiment: str) -> list[str]:
    """Return the settings `uri` or `root`, and `experiment`, without default values.

    An address that `address.check` refuses in a setting comes from the environment, and is left
    out.
    """
    words = []
    database = Path(uri.removeprefix(_LOCAL))
    # The package's own database is named by its folder, all other stores by their address
    if uri.startswith(_LOCAL) and database.name == DATABASE:
        root = database.parent
        current = Path.cwd()
        if root.is_relative_to(current):
            root = root.relative_to(current)
        if root != Path(TrackingConfig.root):
            words.append(f"root={root}")
    else:
        with suppress(ConfigError):
            address.check(uri, written=True)
            words.append(f"uri={uri}")
    if experiment != TrackingConfig.experiment_name:
        words.append(f"experiment={experiment}")
    return words


def import_mlflow() -> None:
    """Import MLflow's modules for a database, before `open_store` needs them."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


@dataclass
class StoreArguments:
    """The settings of a command that name the MLflow store; each command adds further settings."""

    experiment: str = TrackingConfig.experiment_name
    uri: str | None = None
    root: str = TrackingConfig.root

    @property
    def tracking(self) -> TrackingConfig:
        """The same values as the settings `tracking` of a run."""
        return TrackingConfig(self.uri, self.root, self.experiment)


def find_store(config: TrackingConfig) -> Store | None:
    """Return the local store if its database has the experiment; else None.

    The result is also None if the experiment was deleted, the user has named an address, MLflow
    would misread the path, or the folder is not writable.
    The function does not import MLflow and takes milliseconds. So a run can begin while
    `open_store`, which takes seconds, imports MLflow and checks the store.
    """
    path = Path(config.root).absolute() / DATABASE
    if config.uri or os.environ.get(address.VARIABLE) or _is_misread(path):
        return None
    query = "SELECT experiment_id FROM experiments WHERE name = ? AND lifecycle_stage = 'active'"
    try:
        with closing(_connect(path)) as connection:
            row = connection.execute(query, (config.experiment_name,)).fetchone()
    except sqlite3.Error:
        return None
    if row is None or not str(row[0]).isdecimal() or not os.access(path.parent, os.W_OK):
        return None
    return Store(f"{_LOCAL}{path}", str(row[0]), config.experiment_name)


def open_database(store: Store) -> sqlite3.Connection:
    """Open the database of a local store, see `find_store`, to read it."""
    return _connect(Path(store.uri.removeprefix(_LOCAL)))


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)


def open_store(config: TrackingConfig) -> Store:
    """Open the store and the experiment; create them if they are missing.

    A local store is opened under a lock. With a new database, this takes seconds.

    The order of precedence is: URI in the config, `$MLFLOW_TRACKING_URI`, `<root>/mlflow.db`.

    Raises:
        ConfigError: `address.check` refuses the address, or `tracking.root` holds characters that
            MLflow misreads.
        TrackingError: the store cannot be written or read, the server does not answer, the
            experiment was deleted, or its files lie outside of the store.
    """
    # Use the server or database that the user has named
    uri = config.uri or os.environ.get(address.VARIABLE)
    if uri:
        address.check(uri, written=bool(config.uri))
        check_answers(uri)
        return _open(
            uri, name=config.experiment_name, named=str(Path(config.root).absolute()), root=None
        )

    # Otherwise use the local store
    root = Path(config.root).absolute()
    if _is_misread(root):
        raise ConfigError(
            f"tracking.root: got {root}, expected a path without ? and %: MLflow reads them as "
            "parts of an address, and stores the runs elsewhere"
        )
    uri = f"{_LOCAL}{root / DATABASE}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root), FileLock(root / ".lock"):
            # Without the lock, two processes could migrate a new SQLite store at once.
            return _open(uri, name=config.experiment_name, named="", root=root)
    except OSError as error:
        if files.full_disk(error):
            raise _unusable(uri, config.experiment_name, error) from error
        raise TrackingError(f"tracking.root: cannot write to {root} ({error})") from error


def _is_misread(path: Path) -> bool:
    return bool({*"?%"} & {*str(path)})


def _make_database(path: Path) -> None:
    """Create MLflow's tables in a temporary database, and copy it into place when complete.

    MLflow migrates an empty database through all its versions. Each of the dozens of steps waits
    for the disk, which takes seconds in total, unless the file is in memory.
    """
    import mlflow

    in_memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        scratch = Path(folder) / path.name
        mlflow.MlflowClient(tracking_uri=f"{_LOCAL}{scratch}").search_experiments()
        with files.atomic(path) as temporary:
            shutil.copyfile(scratch, temporary)


def _open(uri: str, name: str, named: str, root: Path | None) -> Store:
    """Open a store.

    Args:
        named: see `Store.root`.
        root: the folder of the package's own database; None if the user has named an address.
    """
    store = Store(uri, experiment_id="", experiment_name=name, root=named)
    with in_one_line(store):
        if root is not None and not (root / DATABASE).exists():
            _make_database(root / DATABASE)
        return _find_experiment(store, root and root / artifacts.FOLDER)


def _unusable(uri: str, experiment: str, error: Exception) -> TrackingError:
    """Return the error of a store that MLflow cannot use, without secrets and in one line."""
    shown = redact(uri)
    text = str(error) or type(error).__name__
    reason = redact(" ".join(text.split()).replace(uri, shown))[:300]

    # Name the mend of a local database's usual faults
    if uri.startswith(_LOCAL):
        path = uri.removeprefix(_LOCAL)
        is_damaged = any(words in reason for words in _DAMAGED)
        if is_damaged:
            again = invocation.command("sync", *_name(uri, experiment))
            return TrackingError(
                f"tracking.root: {path} is damaged; move it away, and `{again}` "
                "creates it again from the folders of the runs"
            )
        if files.full_disk(error):
            return TrackingError(
                f"tracking.root: no space left on the disk of {path}; expected a folder on another "
                "disk, or free some space"
            )
    return TrackingError(f"tracking.uri: {shown} cannot be used ({reason})")


@contextmanager
def in_one_line(store: Store) -> Iterator[None]:
    """Turn the errors of MLflow and its database, which may have dozens of lines, into one line.

    Any exception but a `PtqError` becomes a `TrackingError`, because a store is untrusted and
    MLflow does not check its content.
    """
    try:
        yield
    except PtqError:
        raise
    except Exception as error:
        raise _unusable(store.uri, store.experiment_name, error) from error


def check_answers(uri: str) -> None:
    """Raise `TrackingError` if a server does not answer within `HEALTH_S`.

    Databases are not checked.
    """
    if not uri.startswith(("http://", "https://")):
        return
    import requests

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=HEALTH_S)
    except requests.RequestException as error:
        raise TrackingError(
            f"tracking.uri: {redact(uri)} does not answer ({type(error).__name__}); start the "
            "server, or unset MLFLOW_TRACKING_URI to log to mlruns/"
        ) from error


def _find_experiment(store: Store, folder: Path | None) -> Store:
    """Return the store with its experiment; create the experiment if it is missing.

    Args:
        folder: the folder for artifacts, in which a new experiment gets its own; None for MLflow's
            default.

    Raises:
        TrackingError: the experiment was deleted, or its artifacts lie outside of the store.
    """
    client = store.client
    name = store.experiment_name
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = None
        if folder is not None:
            location = (folder / safe_name(name)).as_uri()
        try:
            return replace(store, experiment_id=client.create_experiment(name, location, _TAGS))
        except TrackingError:  # another process was faster
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise

    # Check the experiment that existed before
    if experiment.lifecycle_stage == "deleted":
        raise TrackingError(
            f"tracking.experiment_name: {name!r} was deleted in {redact(store.uri)}; restore "
            "it there, or choose another name"
        )
    # Refuse a foreign address, to which new runs would send their files
    try:
        store.locate(experiment.artifact_location)
    except TrackingError as error:
        if folder is None:
            raise
        again = invocation.command("sync", *_name(store.uri, name))
        raise TrackingError(
            f"{error}; if the folder was moved or copied: move {folder.parent} away, and `{again}` "
            "creates it again from the folders of the runs"
        ) from error
    if view.is_outdated(experiment.tags.get(view.TAG)):
        with suppress(TrackingError):  # without the permission, the earlier view stays
            client.set_experiment_tag(experiment.experiment_id, view.TAG, view.VALUE)
    return replace(store, experiment_id=check_id(experiment.experiment_id, "experiment_id"))


def is_away(error: Exception) -> bool:
    """Return whether an error counts as a store that is unavailable now.

    These are errors of a connection, database, disk or permission, and all errors of MLflow except
    those of HTTP status 400. After other errors, such as a refused value or a missing file, a retry
    would fail again.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    if isinstance(error, TrackingError):  # from `check_answers` or `in_one_line`
        return isinstance(error.__cause__, Exception) and is_away(error.__cause__)
    if isinstance(error, MlflowException):
        return bool(error.get_http_status_code() != 400)
    if isinstance(error, OSError):  # requests' errors are OSErrors too
        return not isinstance(error, FileNotFoundError)
    return isinstance(error, SQLAlchemyError)
