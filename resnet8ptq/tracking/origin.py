"""Recognizes runs that were made here, because an untrusted store may name any folder."""

from collections.abc import Sequence
from pathlib import Path

from resnet8ptq.core import files
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.record import RunRecord

RUNS = Path("runs")  # in the folder where the program is called; see `conf/config.yaml`


def own_folder(record: RunRecord, root: Path = RUNS) -> Path | None:
    """Return a run's folder if it is below `root` and holds the run's record; else None.

    Only this user's runs write below `root`. The file owner proves nothing: a server run by this
    user owns the files that others upload.
    """
    folder = Path(record.folder).resolve()
    if not folder.is_relative_to(root.resolve()):
        return None
    try:
        return folder if Journal.load(folder).key == record.key else None
    except TrackingError:
        return None


def made_here(record: RunRecord, copies: Sequence[Path]) -> bool:
    """Return whether a store's files are byte-identical to those of a run made here."""
    folder = own_folder(record)
    if folder is None:
        return False
    pairs = [(path, folder / path.name) for path in copies]
    return all(own.is_file() and files.sha256(own) == files.sha256(path) for path, own in pairs)
