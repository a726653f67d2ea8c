"""An order of steps from the rows, checked on kinds of networks that it does not know."""

from collections.abc import Mapping, Sequence

from benchmarks.tables import table
from studies.kinds.measuring import RECIPE, Row

SMALL = 1.1  # times the bytes of the smallest file that passes: about as small
NO_SLOWER = 1.05  # times the latency of FP32

Answers = Mapping[str, frozenset[str]]  # by network: the recipes that suffice


def find_answers(groups: Mapping[str, Sequence[Row]]) -> dict[str, frozenset[str]]:
    """Return the recipes that suffice for each network.

    Such a file loses at most the limit, is about as small as the smallest of those, and no slower
    than FP32. A network without one is left out.
    """
    answers = {}
    for network, rows in groups.items():
        passing = []
        for row in rows:
            if row.source == RECIPE and _passes(row) and _is_fast(row):
                passing.append(row)
        if passing:
            least = min(row.bytes or 0 for row in passing)
            small = [row for row in passing if (row.bytes or 0) <= SMALL * least]
            answers[network] = frozenset(row.name for row in small)
    return answers


def _passes(row: Row) -> bool:
    return row.loss is not None and row.limit is not None and row.loss <= row.limit


def _is_fast(row: Row) -> bool:
    return row.ms is not None and row.fp32_ms is not None and row.ms <= NO_SLOWER * row.fp32_ms


def order_steps(answers: Answers) -> list[str]:
    """Return the steps, each the one that suffices for most networks without an answer so far.

    >>> order_steps({"a": frozenset({"x"}), "b": frozenset({"y", "z"}), "c": frozenset({"y"})})
    ['y', 'x']
    """
    left = dict(answers)
    order: list[str] = []
    while left:
        counts: dict[str, int] = {}
        for names in left.values():
            for name in sorted(names):
                counts[name] = counts.get(name, 0) + 1
        best = max(sorted(counts), key=counts.__getitem__)
        order.append(best)
        left = {network: names for network, names in left.items() if best not in names}
    return order


def leave_kinds_out(groups: Mapping[str, Sequence[Row]]) -> str:
    """Return, for each kind, the order by the other kinds, and the place of its first answers."""
    answers = find_answers(groups)
    kinds = {network: rows[0].kind for network, rows in groups.items()}
    lines = []
    for kind in dict.fromkeys(kinds.values()):
        others = {name: names for name, names in answers.items() if kinds[name] != kind}
        order = order_steps(others)
        places = []
        for network in [name for name in kinds if kinds[name] == kind]:
            known = answers.get(network, frozenset())
            hits = [place for place, name in enumerate(order, 1) if name in known]
            if not known:
                shown = "no recipe suffices"
            else:
                shown = str(hits[0]) if hits else f"none: {', '.join(sorted(known))}"
            places.append(f"{network}: {shown}")
        lines.append([kind, ", ".join(order), "; ".join(places)])
    return table(
        ["kind left out", "order by the others", "place of the first that suffices"], lines
    )
