"""Keeps the best model of a search as a file in the sweep's folder, from the first step on."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.core import files
from resnet8ptq.tracking.record import RunRecord

NAME = "winner"  # the file's name, without its suffix


@dataclass
class Delivery:
    """The best model of a search so far, and its file.

    Attributes:
        folder: the folder of the sweep; None to write nothing, as in tests.
        fp32: the FP32 network, for the case that no step leaves a file.
        record: the run of the model; None before the first measured one.
        outcome: the measurements of the model as text.
        is_confirmed: whether the model was measured on the reported samples.
        path: the file that was copied last; None before the first one.
        is_measured: whether the file, if there is one, was scored or is FP32.
        is_current: whether the file, if there is one, is that of `record`, if there is one.
    """

    folder: Path | None = None
    fp32: Path | None = None
    record: RunRecord | None = None
    outcome: str = ""
    is_confirmed: bool = False
    path: Path | None = None
    is_measured: bool = True
    is_current: bool = True

    @property
    def confirmed_id(self) -> str | None:
        """The id of the run that counts as confirmed; None without one."""
        if self.record is None or not self.is_confirmed:
            return None
        return self.record.run_id

    def keep(self, record: RunRecord, outcome: str, is_confirmed: bool = False) -> None:
        """Keep a run as the best model so far; copy its file, if the run's folder still has it."""
        self.record = record
        self.outcome = outcome
        self.is_confirmed = is_confirmed
        self.is_measured = True
        source = _find_model(record)
        self.is_current = source is not None
        if source is not None:
            self._copy(source)

    def keep_unmeasured(self, number: int) -> None:
        """Copy the file that an interrupted job has left, if no file is kept yet.

        Args:
            number: the job's number in the sweep.
        """
        if self.path is not None or self.folder is None:
            return
        suffixes: set[str] = set()
        for backend in BACKENDS.values():
            suffixes.update(backend.suffixes)
        for path in sorted(self.folder.glob(f"{number}_*/model.*")):
            if path.suffix in suffixes:
                self._copy(path)
                self.is_measured = False
                return

    def keep_fp32(self) -> None:
        """Copy the FP32 network, if no other file is kept."""
        if self.path is None and self.fp32 is not None:
            self._copy(self.fp32)

    def _copy(self, source: Path) -> None:
        if self.folder is None:
            return
        before = self.path
        self.path = self.folder / f"{NAME}{source.suffix}"
        with files.atomic(self.path) as temporary:
            shutil.copyfile(source, temporary)
        if before not in (None, self.path):  # last, so that a kill leaves at least one file
            before.unlink(missing_ok=True)


def _find_model(record: RunRecord) -> Path | None:
    """Return the model in the folder of a run; None if it is missing there."""
    backend = BACKENDS.get(record.backend)
    if backend is None or not record.folder:
        return None
    for name in backend.model_files:
        path = Path(record.folder, name)
        if path.is_file():
            return path
    return None
