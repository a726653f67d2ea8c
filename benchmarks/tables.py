"""Numbers as text, and tables in Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


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


def usage_rows(
    usages: Mapping[str, Sequence[Mapping[str, Any]]], yardstick: str
) -> list[list[str]]:
    """Return a row for each command: seconds, CPU seconds, peak MB, seconds to the yardstick's.

    Args:
        usages: `process.Usage` of each round, as dicts, by what ran.
        yardstick: one of them.
    """
    below = [usage["wall_s"] for usage in usages[yardstick]]
    rows = []
    for name, each in usages.items():
        wall = [usage["wall_s"] for usage in each]
        cpu = [usage["user_s"] + usage["sys_s"] for usage in each]
        peak = megabytes(max(usage["max_rss_bytes"] for usage in each))
        ratio = "" if name == yardstick else spread(ratios(wall, below))
        rows.append([name, spread(wall, 1), spread(cpu, 1), peak, ratio])
    return rows
