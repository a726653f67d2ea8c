"""Results kept on disk, each under a hash of all its inputs.

An entry is a folder `<root>/<kind>/<hash of key>` with an `entry.json` that holds the key and the
SHA-256 of each other file. An entry is built in a temporary folder and renamed, so that a killed
process leaves no partial entry. `entry` makes an entry again if its files do not match. At most
once a day, after a new entry, the entries that no run has used for `UNUSED_DAYS` are removed.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pooch
from filelock import FileLock

from resnet8ptq.core import code, files, machine
from resnet8ptq.core.deadline import Deadline
from resnet8ptq.core.errors import ConfigError, PtqError

log = logging.getLogger(__name__)

RECORD = "entry.json"  # the file in each entry that describes the others
MAX_RECORD_BYTES = 2**24
UNUSED_DAYS = 90
CHECKED = ".checked"  # the file in the root that was modified at the last removal
_DAY_S = 24 * 3600
_HASHED = 20  # hexadecimal digits of a key's hash, the name of an entry
Key = Mapping[str, str | int | bool]


def folder(setting: str | None) -> Path:
    """Return the root: `setting`, else `$RESNET8PTQ_CACHE`, else a folder in the user's cache."""
    name = setting or os.environ.get("RESNET8PTQ_CACHE") or pooch.os_cache("resnet8ptq")
    return files.expand(name).absolute()


def check_writable(setting: str | None) -> None:
    """Check that new entries can be made in the cache, before work that needs them.

    A full disk is not an error here, because all entries may exist already.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    root = folder(setting)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        if files.full_disk(error):
            return
        raise ConfigError(
            f"cache_dir: cannot write to {root} ({error}); try cache_dir= with a folder that can "
            "be written"
        ) from error


def runtime(
    setting: str | None, threads: int | None, seconds: float | None = None, device: str = "auto"
) -> machine.Runtime:
    """Return a run's cache folder, threads (None for one per core), time limit and device."""
    return machine.Runtime(
        cache_root=folder(setting),
        threads=machine.threads(threads),
        threads_fixed=threads is not None,
        deadline=Deadline.after(seconds),
        device=device,
    )


def entry(root: Path, kind: str, key: Key, make: Callable[[Path], None]) -> Path:
    """Return the folder of the entry `key`; `make(empty folder)` fills a missing or damaged one.

    Use this for a step that takes longer than reading its result. The key must identify all inputs
    of the step (files by their hash) and the step's code. Processes that need the same entry wait
    for each other.

        key = {"network": sha256, "code": code.behind(__name__)}
        folder = cache.entry(root, "folded", key, make)

    Raises:
        ConfigError: the cache folder cannot be written, or a disk is full.
        Exception: another error, such as one of `make`.
    """
    text = _as_text(key)
    path = path_of(root, kind, key)
    folder = path.parent
    lock = FileLock(folder / f".{path.name}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise ConfigError(f"cache_dir: cannot write to {folder} ({error})") from error

    # Look under the lock, because another process may have built the entry meanwhile
    try:
        _mark_used(path)
        if os.path.lexists(path) and not _is_whole(path, text):
            log.warning("cache: %s is damaged; making it again", path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not path.exists():
            _build(path, text, make)
            _remove_unused(root)
    except Exception as error:  # libraries and other processes pass on only its text
        reason = files.full_disk(error)
        if not reason:
            raise
        raise ConfigError(
            f"cache_dir: cannot write to {folder} ({reason}); free some space, or try a folder on "
            "another disk"
        ) from error
    finally:
        lock.release()
    return path


def find(root: Path, kind: str, key: Key) -> Path | None:
    """Return the folder of the entry `key`; None if it is missing or damaged."""
    path = path_of(root, kind, key)
    _mark_used(path)
    if path.exists() and _is_whole(path, _as_text(key)):
        return path
    return None


def check_still_there(root: Path, error: FileNotFoundError) -> None:
    """Check that a missing file does not belong to the cache.

    Raises:
        PtqError: it does, so it was removed while the run was using it.
    """
    missing = Path(str(error.filename))
    if missing.is_relative_to(root):
        raise PtqError(
            f"cache_dir: {missing} was removed while the run was using it; run it again, in a "
            "sweep with sweep.resume=true"
        ) from error


def made_with(module: str) -> Key:
    """Return the part of a cache key that does not depend on inputs: code, CPU and versions.

    The CPU is part of the key because the last bits of float sums depend on it.
    """
    return {"code": code.behind(module), "cpu": machine.cpu()[0], **machine.versions()}


def path_of(root: Path, kind: str, key: Key) -> Path:
    """Return the folder of the entry `key`, which may not exist yet."""
    return root / kind / hashlib.sha256(_as_text(key).encode()).hexdigest()[:_HASHED]


def _as_text(key: Key) -> str:
    return json.dumps(dict(key), sort_keys=True)


def _build(path: Path, key: str, make: Callable[[Path], None]) -> None:
    # This process holds the lock, so other temporary folders were left by killed processes.
    for abandoned in path.parent.glob(f".{path.name}-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as name:
        temporary = Path(name) / "entry"
        temporary.mkdir()
        make(temporary)
        hashes = {file.name: files.sha256(file) for file in sorted(temporary.iterdir())}
        record = {"key": json.loads(key), "sha256": hashes}
        (temporary / RECORD).write_text(json.dumps(record, indent=2))
        temporary.replace(path)


def _mark_used(path: Path) -> None:
    with suppress(OSError):  # the entry is missing, or belongs to another user
        os.utime(path / RECORD)


def _remove_unused(root: Path) -> None:
    """Remove the entries that no run has used for `UNUSED_DAYS`.

    This happens at most once a day, because listing the entries takes time.
    """
    now = time.time()
    checked = root / CHECKED
    with suppress(OSError):  # the folder is another user's, or another process removed it
        if checked.exists() and now - checked.stat().st_mtime < _DAY_S:
            return
        checked.touch()
        for record in root.glob(f"*/{'[0-9a-f]' * _HASHED}/{RECORD}"):
            if now - record.stat().st_mtime > UNUSED_DAYS * _DAY_S:
                shutil.rmtree(record.parent)


def _is_whole(path: Path, key: str) -> bool:
    if path.is_symlink():
        return False
    try:
        record = json.loads(files.read_bytes(path / RECORD, MAX_RECORD_BYTES))
        kept = [file for file in path.iterdir() if file.name != RECORD]
        if any(not file.is_file() or file.is_symlink() for file in kept):  # reading a pipe blocks
            return False
        hashes = {file.name: files.sha256(file) for file in kept}
        return record["key"] == json.loads(key) and record["sha256"] == hashes
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False


def downloads_folder() -> Path:
    """Return the folder for downloads: the cache's root for `cache_dir=null`."""
    return folder(None)
