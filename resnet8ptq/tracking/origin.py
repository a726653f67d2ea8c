"""Which runs of a store were made here. A store is untrusted: it may name any folder as a run's."""

from collections.abc import Sequence
from pathlib import Path

from resnet8ptq.core import files
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.record import RunRecord

RUNS = Path("runs")  # in the folder where the program is called; see `conf/config.yaml`


def own_folder(record: RunRecord, root: Path = RUNS) -> Path | None:
    """Return a run's folder if it lies below `root` and holds the run's record; else None.

    What lies below `root` was written by a run of this user. Being owned by the user is not
    enough: a server that the user runs owns the files that others upload.
    """
    folder = Path(record.folder).resolve()
    if not folder.is_relative_to(root.resolve()):
        return None
    try:
        kept = Journal.load(folder)
    except TrackingError:
        return None
    return folder if kept.key == record.key else None


def made_here(record: RunRecord, copies: Sequence[Path]) -> bool:
    """Tell whether files of a store are, byte for byte, those that a run has written here."""
    folder = own_folder(record)
    if folder is None:
        return False
    pairs = [(path, folder / path.name) for path in copies]
    return all(own.is_file() and files.sha256(own) == files.sha256(path) for path, own in pairs)
