"""Results of other tools on the same images, to compare with a sweep's runs.

A reference is a CSV file with the columns `tool`, `configuration`, `correct`, `expected_correct`
(ties at the top broken at random; may be empty), `total` (test images) and `size_bytes`. It is
given as a path, or as the name of a file in `resnet8ptq/report/references/`.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.core.errors import ConfigError
from resnet8ptq.report.comparison import Cell, Family
from resnet8ptq.report.spread import group_by_configuration, without_seed
from resnet8ptq.tasks.metric import TOTAL

COLUMNS = ("tool", "configuration", "correct", "expected_correct", "total", "size_bytes")
HEADINGS = ("tool", "configuration", "draws", "correct", "with ties at random", "size bytes")


@dataclass(frozen=True)
class Entry:
    """One line of the table: correct images out of `total`; means if there are several `draws`."""

    tool: str
    configuration: str
    correct: float
    expected_correct: float | None
    total: int
    size_bytes: float
    draws: int = 1
    own: bool = False

    @property
    def fair(self) -> float:
        """Correct images with ties broken at random, if known."""
        return self.correct if self.expected_correct is None else self.expected_correct


def load(name: str) -> list[Entry]:
    """Read a reference.

    Raises:
        ConfigError: the file is missing, or a line lacks a column.
    """
    shipped = _shipped(name)
    path = shipped if shipped.is_file() else Path(name)
    names = " | ".join(sorted(file.stem for file in shipped.parent.glob("*.csv")))
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"report.reference: got {name} ({error}), expected {names} or a CSV file"
        ) from error
    return [_entry(path, number, line) for number, line in enumerate(lines, 2)]


def _shipped(name: str) -> Path:
    return Path(__file__).with_name("references") / f"{name}.csv"


def _entry(path: Path, number: int, line: dict[str, str]) -> Entry:
    try:
        expected = line["expected_correct"]
        return Entry(
            tool=line["tool"],
            configuration=line["configuration"],
            correct=float(line["correct"]),
            expected_correct=float(expected) if expected else None,
            total=int(line["total"]),
            size_bytes=float(line["size_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"report.reference: {path}, line {number}: {error}; expected {', '.join(COLUMNS)}"
        ) from error


def fits(name: str, family: Family) -> bool:
    """Whether a reference fits a family; shipped ones are named after network and data set.

    A named sweep such as `experiment=flagship` keeps its reference on other networks.
    """
    if not _shipped(name).is_file():
        return True
    return all(f"{record.model}_{record.dataset}" == name for record in family.records)


def rank(family: Family, references: Sequence[Entry]) -> list[Entry]:
    """Return the sweep's configurations and the references, the most accurate first.

    References with another number of test images are left out.
    """
    own = [_own(cells) for cells in group_by_configuration(family)]
    totals = {entry.total for entry in own}
    same = [entry for entry in references if entry.total in totals]
    return sorted([*own, *same], key=lambda entry: -entry.fair / entry.total)


def rows(entries: Sequence[Entry]) -> list[list[str]]:
    """Return the cells of the columns HEADINGS."""
    return [
        [
            entry.tool,
            entry.configuration,
            str(entry.draws) if entry.own else "",
            f"{entry.correct:.{0 if entry.correct == int(entry.correct) else 1}f}",
            "" if entry.expected_correct is None else f"{entry.expected_correct:.1f}",
            f"{entry.size_bytes:,.0f}",
        ]
        for entry in entries
    ]


def _own(cells: Sequence[Cell]) -> Entry:
    def mean(name: str) -> float:
        return sum(cell.metric(name) for cell in cells) / len(cells)

    total = int(cells[0].metric(TOTAL))
    return Entry(
        tool="this sweep",
        configuration=without_seed(cells[0]) if len(cells) > 1 else cells[0].label,
        correct=sum(round(cell.metric("accuracy") * total) for cell in cells) / len(cells),
        expected_correct=mean("expected_accuracy") * total,
        total=total,
        size_bytes=mean("size_bytes"),
        draws=len(cells),
        own=True,
    )
