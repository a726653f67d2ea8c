"""The tables of the study."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.tables import table
from studies.kinds.measuring import ONE_LINER, RECIPE, SHIP, Row
from studies.kinds.orders import leave_kinds_out

NOISE = 0.05  # a p-value at or below it: the winner loses more than the one-liner
ABOUT_EQUAL = 1.05  # sizes whose ratio is at most this are equal
SLOWER = 1.15  # times of equal files differ by up to this on a machine with other load


@dataclass(frozen=True)
class Ending:
    """A network's winner, compared with its one-liners.

    Attributes:
        rival: the best one-liner that is about as small as the winner; else the smallest.
        quicker: the fastest one-liner that loses no more than the winner.
    """

    winner: Row
    rival: Row | None
    quicker: Row | None

    @property
    def is_worse(self) -> bool:
        """Whether the winner loses more than a rival of its size, beyond chance."""
        p = self.winner.p_worse
        return p is not None and p <= NOISE

    @property
    def is_slower(self) -> bool:
        """Whether a one-liner without more loss is faster."""
        if self.quicker is None or self.quicker.ms is None or self.winner.ms is None:
            return False
        return self.winner.ms > SLOWER * self.quicker.ms


def group_by_network(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each network, in order."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.network].append(row)
    return groups


def find_rival(winner: Row, rows: Iterable[Row]) -> Row | None:
    """Return the best one-liner that is about as small as the winner; None without one."""
    theirs = []
    for row in rows:
        if row.source == ONE_LINER and row.measured and _is_as_small(row, winner):
            theirs.append(row)
    return min(theirs, key=nearness, default=None)


def _is_as_small(row: Row, winner: Row) -> bool:
    return (row.bytes or 0) <= (winner.bytes or 0) * ABOUT_EQUAL


def nearness(row: Row) -> tuple[float, float]:
    """Return a key by which the model with the least loss comes first, then the nearest to FP32."""
    return (row.loss or 0.0, -(row.sqnr_db or 0.0))


def end(rows: Sequence[Row]) -> Ending | None:
    """Return a network's winner compared with the one-liners; None without a winner."""
    winner = next((row for row in rows if row.source == SHIP and row.measured), None)
    if winner is None:
        return None
    loss = winner.loss or 0.0
    as_good = []
    for row in rows:
        timed = row.source == ONE_LINER and row.measured and row.ms is not None
        if timed and (row.loss or 0.0) <= loss:
            as_good.append(row)
    quicker = min(as_good, key=lambda row: row.ms or 0.0, default=None)
    theirs = [row for row in rows if row.source == ONE_LINER and row.measured]
    smallest = min(theirs, key=lambda row: row.bytes or 0, default=None)
    return Ending(winner, find_rival(winner, theirs) or smallest, quicker)


def show_loss(row: Row | None) -> str:
    """Return the loss in points, a fraction in percent, or the SQNR without labels."""
    if row is None or row.loss is None:
        return ""
    if row.metric == "relative_error":
        return "equal" if row.sqnr_db is None else f"{row.sqnr_db:.1f} dB"
    return f"{100 * row.loss:.2f}"


def show_cells(row: Row | None) -> list[str]:
    """Return loss, SQNR, kB, and speed against FP32."""
    if row is None or not row.measured:
        return ["", "", "", ""]
    sqnr = "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}"
    loss = "" if row.metric == "relative_error" else show_loss(row)
    speed = f"{row.fp32_ms / row.ms:.2f}" if row.ms and row.fp32_ms else ""
    return [loss, sqnr, f"{(row.bytes or 0) / 1000:.1f}", speed]


def show_recipes(rows: Sequence[Row], source: str) -> str:
    """Return one line for each network: SQNR, kB and speed of each recipe or one-liner."""
    names = list(dict.fromkeys(row.name for row in rows if row.source == source))
    lines = []
    for network, mine in group_by_network(rows).items():
        by_name = {row.name: row for row in mine if row.source == source}
        if not by_name:
            continue
        first = next((row for row in mine if row.measured), None)
        fp32 = f"{(first.fp32_bytes or 0) / 1000:.0f}" if first else ""
        cells = []
        for name in names:
            cells.append(_in_short(by_name.get(name)))
        lines.append([network, mine[0].kind, fp32, *cells])
    return table(["network", "kind", "FP32 kB", *names], lines)


def _in_short(row: Row | None) -> str:
    if row is None:
        return ""
    if not row.measured:
        return "none"
    loss, sqnr, size, speed = show_cells(row)
    shown = f"{loss}; " if loss else ""
    return f"{shown}{sqnr or '-'} dB, {size} kB, {speed}x"


def show_endings(rows: Sequence[Row]) -> str:
    """Return a table of each network's winner and the best one-liner of its size."""
    lines = []
    for network, mine in group_by_network(rows).items():
        ending = end(mine)
        if ending is None:
            continue
        winner = ending.winner
        rival = ending.rival
        notes = ["worse"] * ending.is_worse + ["slower"] * ending.is_slower
        took = "" if winner.minutes is None else f"{winner.minutes:.1f}"
        lines.append(
            [
                network,
                str(winner.samples),
                winner.verdict,
                *show_cells(winner),
                took,
                rival.name if rival else "",
                *show_cells(rival),
                ", ".join(notes),
            ]
        )
    heads = ["loss", "dB", "kB", "speed"]
    return table(
        ["network", "samples", "verdict", *heads, "minutes", "one-liner", *heads, "winner is"],
        lines,
    )


def render(rows: Sequence[Row]) -> str:
    """Return all tables."""
    parts = [
        show_endings(rows),
        show_recipes(rows, RECIPE),
        show_recipes(rows, ONE_LINER),
        leave_kinds_out(group_by_network(rows)),
    ]
    return "\n\n".join(parts)
