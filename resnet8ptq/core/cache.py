"""Work that is kept on disk under the hash of everything that went into it.

An entry is a folder `<root>/<kind>/<hash of key>` with an `entry.json` that holds the key and the
SHA-256 of each file. It is built in a temporary folder and renamed, so that it is whole or absent;
an entry whose files do not match is made again.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pooch
from filelock import FileLock

from resnet8ptq.core import code, files, machine
from resnet8ptq.core.errors import ConfigError

log = logging.getLogger(__name__)

MAX_RECORD_BYTES = 2**24
Key = Mapping[str, str | int | bool]


def folder(setting: str | None) -> Path:
    """Return the cache's root: `setting`, `$RESNET8PTQ_CACHE` or the user's cache folder."""
    name = setting or os.environ.get("RESNET8PTQ_CACHE") or pooch.os_cache("resnet8ptq")
    return Path(name).expanduser().absolute()


def runtime(setting: str | None, threads: int | None) -> machine.Runtime:
    """Return what a run may use: its cache, and the threads that are set, or every core's."""
    return machine.Runtime(folder(setting), machine.threads(threads), threads is not None)


def entry(root: Path, kind: str, key: Key, make: Callable[[Path], None]) -> Path:
    """Return the folder of the entry `key`, calling `make(empty folder)` where there is none.

    Processes that ask for one entry at the same time wait for each other.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    text, path = _as_text(key), place(root, kind, key)
    home = path.parent
    lock = FileLock(home / f".{path.name}.lock")
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise ConfigError(f"cache_dir: cannot write to {home} ({error})") from error
    try:
        if path.exists() and not _is_whole(path, text):
            log.warning("cache: %s is damaged; making it again", path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not path.exists():
            _build(path, text, make)
    except Exception as error:  # of a library or another process, which keep the text alone
        if not (words := files.full_disk(error)):
            raise
        mend = "takes a folder on another disk, or free some space"
        raise ConfigError(f"cache_dir: cannot write to {home} ({words}); {mend}") from error
    finally:
        lock.release()
    return path


def made_with(module: str) -> Key:
    """Return what a measurement of a module depends on besides its inputs: code, CPU and versions.

    Float sums differ by CPU in their last bits.
    """
    return {"code": code.behind(module), "cpu": machine.cpu()[0], **machine.versions()}


def place(root: Path, kind: str, key: Key) -> Path:
    """Return where the entry `key` is or would be."""
    return root / kind / hashlib.sha256(_as_text(key).encode()).hexdigest()[:20]


def _as_text(key: Key) -> str:
    return json.dumps(dict(key), sort_keys=True)


def _build(path: Path, key: str, make: Callable[[Path], None]) -> None:
    # Left by processes that were killed while building: this one holds the lock.
    for left in path.parent.glob(f".{path.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as name:
        temporary = Path(name) / "entry"
        temporary.mkdir()
        make(temporary)
        hashes = {file.name: files.sha256(file) for file in sorted(temporary.iterdir())}
        record = {"key": json.loads(key), "sha256": hashes}
        (temporary / "entry.json").write_text(json.dumps(record, indent=2))
        temporary.replace(path)


def _is_whole(path: Path, key: str) -> bool:
    try:
        record = json.loads(files.read_bytes(path / "entry.json", MAX_RECORD_BYTES))
        kept = [file for file in path.iterdir() if file.name != "entry.json"]
        if any(not file.is_file() or file.is_symlink() for file in kept):  # a pipe would block
            return False
        hashes = {file.name: files.sha256(file) for file in kept}
        return record["key"] == json.loads(key) and record["sha256"] == hashes
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False


def downloads_folder() -> Path:
    """Return where downloads are kept: pooch's cache folder for this program."""
    return Path(pooch.os_cache("resnet8ptq"))
