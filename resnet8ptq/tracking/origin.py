"""Recognizes runs that were made here, because an untrusted store may name any folder."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from resnet8ptq.config import words
from resnet8ptq.core import files
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.record import RunRecord

RUNS = Path("runs")  # below the folder where the program is called; see `conf/config.yaml`


def own_folder(record: RunRecord, root: Path = RUNS) -> Path | None:
    """Return a run's folder if it is below `root` and holds the run's record; else None.

    Only this user's runs write below `root`. The owner of a file proves nothing, because a server
    that this user runs owns the files that others upload.
    """
    return find_own(Path(record.folder), record.key, root)


def find_own(folder: Path, key: str, root: Path = RUNS) -> Path | None:
    """Return a folder if it is below `root` and its journal has the key; else None."""
    folder = folder.resolve()
    if not folder.is_relative_to(root.resolve()):
        return None
    try:
        is_own = Journal.load(folder).key == key
    except TrackingError:
        is_own = False
    return folder if is_own else None


def find_overrides(record: RunRecord, root: Path = RUNS) -> list[str] | None:
    """Return the settings that repeat a job of a sweep as a single run; empty for other runs.

    Settings of Hydra and of the sweep, such as `sweep.resume`, are left out.

    Returns:
        The settings; None if the logged text cannot be split into settings. For a run that was not
        made here, the text comes from the untrusted store. The result is then also None if a
        setting is not safe to repeat, see `words.is_plain`.
    """
    own = own_folder(record, root)
    text = record.job_overrides
    if own is not None:
        text = Journal.load(own).tags.get("job_overrides", "")
    try:
        settings = shlex.split(text)
    except ValueError:  # such as an open quote
        return None
    kept = [word for word in settings if not words.key_of(word).startswith(("hydra", "sweep."))]
    if own is None and not all(map(words.is_plain, kept)):
        return None
    return kept


def made_here(record: RunRecord, copies: Sequence[Path]) -> bool:
    """Return whether a run was made here, and the copies of its files equal its own, by hash."""
    folder = own_folder(record)
    if folder is None:
        return False
    for path in copies:
        own = folder / path.name
        if not own.is_file() or files.sha256(own) != files.sha256(path):
            return False
    return True
