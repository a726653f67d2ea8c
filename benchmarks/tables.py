"""Numbers as text, and tables in Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A row of the first table: the seconds of each round, ours and the other side's.

    Attributes:
        theirs: empty if there is nothing to compare with.
        beside: the name of the other side.
    """

    name: str
    ours: Sequence[float]
    theirs: Sequence[float] = ()
    beside: str = ""

    def cells(self) -> list[str]:
        """Return the name, our seconds, the other side with its seconds, and the ratio."""
        if not self.theirs:
            return [self.name, spread(self.ours), "", "", ""]
        ratio = spread(ratios(self.ours, self.theirs))
        return [self.name, spread(self.ours), self.beside, spread(self.theirs), ratio]


def walls(usages: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the wall seconds of each round."""
    return [usage["wall_s"] for usage in usages]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is aligned left, the others right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median, with the smallest and the largest where there are several."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each round, as far as both sides ran."""
    return [a / b for a, b in zip(above, below, strict=False)]


def megabytes(size_bytes: float) -> str:
    """Return a size in MB (10^6 bytes)."""
    return f"{size_bytes / 1e6:.0f}"


def usage_table(usages: Mapping[str, Sequence[Mapping[str, Any]]], bases: Mapping[str, str]) -> str:
    """Return a table of seconds, CPU seconds, peak MB, and the ratio of seconds to each base.

    Args:
        usages: `process.Usage` of each round, as dicts, by contender.
        bases: the contenders to compare with, each with the words for the head of its column.
    """
    seconds = {name: walls(rounds) for name, rounds in usages.items()}
    rows = []
    for name, rounds in usages.items():
        cpu = [usage["user_s"] + usage["sys_s"] for usage in rounds]
        peak = megabytes(max(usage["max_rss_bytes"] for usage in rounds))
        against = ["" if name == b else spread(ratios(seconds[name], seconds[b])) for b in bases]
        rows.append([name, spread(seconds[name], 1), spread(cpu, 1), peak, *against])
    heads = [f"to {words}" for words in bases.values()]
    return table(["", "wall s", "CPU s", "peak MB", *heads], rows)
