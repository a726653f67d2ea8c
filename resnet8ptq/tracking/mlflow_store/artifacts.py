"""Decides which addresses of artifacts may be used, before a file or a socket is opened.

A store is untrusted, and each of its runs names the address of its files. MLflow would send the
user's name, password and token to any host in these addresses, and read any file. An address is
used only if it belongs to the store. For a database, it must be a path below the store's artifacts,
or below `tracking.root` if the user has named the database. For a server, it must be an address
`mlflow-artifacts:`, which the server itself answers.
"""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import url2pathname

from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.text import redact

SQLITE = "sqlite:///"
FOLDER = "artifacts"  # next to the database of a local store
_SERVERS = ("http://", "https://")


def locate(uri: str, store_uri: str, root: str = "") -> Path | None:
    """Return the path that an artifact's address names; None if a server holds the artifact.

    Args:
        store_uri: the address of the store; empty for a record that was read from a run's folder.
        root: a further folder that may hold the artifacts of a database; empty for none.

    Raises:
        TrackingError: the address does not belong to the store.
    """
    if store_uri.startswith(_SERVERS):
        if _is_of_server(uri, store_uri):
            return None
        raise _refuse(uri, "mlflow-artifacts:/ on the server itself")
    address = _split(uri)
    path = Path(url2pathname(address.path))
    homes = [path.parent]
    if store_uri:
        homes = list(_homes(store_uri, root))
    # MLflow does not cut a plain path at ? and #, so refuse both
    is_local = uri.startswith(("/", "file:///")) and not (address.query or address.fragment)
    if is_local and any(_leads_into(home, path) for home in homes):
        return path
    raise _refuse(uri, f"a path below {' or '.join(map(str, homes))}, without links")


def _is_of_server(uri: str, server: str) -> bool:
    address = _split(uri)
    host = urlsplit(server).netloc.rpartition("@")[2]
    is_plain = not (address.query or address.fragment) and ".." not in Path(unquote(uri)).parts
    return address.scheme == "mlflow-artifacts" and address.netloc in ("", host) and is_plain


def _split(uri: str) -> SplitResult:
    try:
        return urlsplit(uri)
    except ValueError:  # the address is malformed, such as half an IPv6 address
        raise _refuse(uri, "an address of the store's own artifacts") from None


def _homes(store_uri: str, root: str) -> Iterator[Path]:
    """Yield the folders whose content a database may name."""
    if store_uri.startswith(SQLITE):
        yield Path(store_uri.removeprefix(SQLITE)).absolute().parent / FOLDER
    if root:
        yield Path(root)


def _leads_into(home: Path, path: Path) -> bool:
    """Return whether a path lies in a folder, and contains no `..` and no link from there on.

    Links above the folder are the user's, and allowed. Names are checked before the disk is read,
    because reading a path such as /net/host may contact the machine `host`.
    """
    for above in (home.parent, home.parent.resolve()):
        if path.is_relative_to(above / home.name) and ".." not in path.parts:
            step = above
            for name in path.relative_to(above).parts:
                step = step / name
                if step.is_symlink():
                    return False
            return True
    return False


def _refuse(uri: str, takes: str) -> TrackingError:
    return TrackingError(f"artifact_uri: got {redact(uri)[:200]}, expected {takes}")
