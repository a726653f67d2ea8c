"""Checks the order of steps on kinds of networks that it was not computed from.

Two orders are compared: one computed from the other kinds, and that of `ship`. Each goes through
the measured recipes of a network until a file passes. Both depend on the network's properties, such
as whether most weights are in matrix products.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.tables import table
from resnet8ptq.evaluation.worth import saves
from resnet8ptq.experiment.network_properties import BESIDE, PRODUCTS
from resnet8ptq.exploration.search import step_table
from studies.kinds.measuring import RECIPE, Row

# The recipes that are steps of `ship`, and the kinds of steps that they stand for.
STEPS = {
    "static": step_table.START,
    "dynamic": "dynamic",
    "mixed": "mixed",
    "static percentile": "calibrations",
    "static smooth": "smooth_quant",
    "static bias": "bias_correction",
    "w8 by channel": "weights_in_8_bits",
}
STARTS = ("static", "dynamic", "mixed")  # `ship` tries all that the network takes
_PRODUCTS = 0.6  # of FP32's bytes, at most, in a file with only matrix products in 8 bits
NO_SLOWER = 1.05  # times the latency of FP32


@dataclass(frozen=True)
class Walk:
    """A walk through the recipes of one network in a given order.

    Attributes:
        steps: number of recipes tried until one passes; of all recipes if none does.
        chosen: the first that passes, of several first steps the fastest; None without one.
        best: the smallest file that passes and is no slower than FP32; None without one.
    """

    steps: int
    chosen: Row | None
    best: Row | None

    @property
    def excess(self) -> float | None:
        """The bytes of the chosen file, as a part of the best one's; None without both."""
        if self.chosen is None or self.best is None:
            return None
        return (self.chosen.bytes or 0) / (self.best.bytes or 1)


def passes(row: Row) -> bool:
    """Return whether a file loses at most the limit (no test), and is worth deploying."""
    if row.loss is None or row.limit is None or row.loss > row.limit:
        return False
    speedup = row.fp32_ms / row.ms if row.ms and row.fp32_ms else None
    return saves(row.bytes or 0, row.fp32_bytes or 0, speedup)


def walk(order: Iterable[str], rows: Sequence[Row], starts: Collection[str] = ()) -> Walk:
    """Try the recipes of one network in an order; recipes without a measurement are skipped.

    Args:
        starts: the first recipes of the order, all of which are tried.
    """
    recipes = {row.name: row for row in rows if row.source == RECIPE and row.name in STEPS}
    passing = [row for row in recipes.values() if passes(row)]
    fast = [row for row in passing if _is_fast(row)]
    best = min(fast, key=lambda row: row.bytes or 0, default=None)
    measured = [name for name in order if name in recipes and recipes[name].measured]
    first = [name for name in measured if name in starts]
    started = [recipes[name] for name in first if recipes[name] in passing]
    if started:
        return Walk(len(first), min(started, key=lambda row: row.ms or 0), best)
    for steps, name in enumerate(measured, 1):
        if recipes[name] in passing:
            return Walk(steps, recipes[name], best)
    return Walk(len(measured), None, best)


def _is_fast(row: Row) -> bool:
    return bool(row.ms and row.fp32_ms and row.ms <= NO_SLOWER * row.fp32_ms)


def find_properties(rows: Sequence[Row]) -> list[str]:
    """Return the network's properties, found by the recipes that worked and their files' sizes."""
    measured = {row.name: row for row in rows if row.source == RECIPE and row.measured}
    found = [BESIDE] if "mixed" in measured else []
    products = measured.get("dynamic matrices")
    if products and (products.bytes or 0) < _PRODUCTS * (products.fp32_bytes or 0):
        found.append(PRODUCTS)
    return found


def order_of_ship(properties: Sequence[str]) -> list[str]:
    """Return the recipes in the order in which `ship` takes the steps that they stand for."""
    seen = step_table.Seen("onnx", exact_sums=True, limit=0.01, properties=tuple(properties))
    ranked = step_table.order(properties, "fastest")
    kinds = [name for name in ranked if step_table.propose(name, seen)]
    recipes = [name for name, kind in STEPS.items() if kind in kinds]
    return sorted(recipes, key=lambda name: kinds.index(STEPS[name]))


def compute_order(networks: Iterable[Sequence[Row]]) -> list[str]:
    """Return an order: each recipe passes on the most networks left by the earlier ones.

    Of recipes that pass on equally many, the one whose files are smaller comes first.
    """
    left = [list(rows) for rows in networks]
    order: list[str] = []
    while True:
        counts: dict[str, list[float]] = {}
        for rows in left:
            for row in rows:
                if row.source == RECIPE and row.name in STEPS and passes(row) and _is_fast(row):
                    counts.setdefault(row.name, []).append((row.bytes or 0) / (row.fp32_bytes or 1))
        if not counts:
            return order
        best = max(counts, key=lambda name: (len(counts[name]), -sum(counts[name])))
        order.append(best)
        left = [rows for rows in left if walk([best], rows).chosen is None]


def leave_kinds_out(groups: Mapping[str, Sequence[Row]]) -> str:
    """Return the walks of each network, by an order from the other kinds and by that of `ship`."""
    of_ship: list[Walk] = []
    computed: list[Walk] = []
    lines = []
    for network, rows in groups.items():
        properties = find_properties(rows)
        alike = []
        for others in groups.values():
            same = PRODUCTS in find_properties(others)
            if others[0].kind != rows[0].kind and same == (PRODUCTS in properties):
                alike.append(others)
        order = compute_order(alike)
        theirs, ours = walk(order, rows), walk(order_of_ship(properties), rows, STARTS)
        if ours.steps == 0:
            continue
        computed.append(theirs)
        of_ship.append(ours)
        lines.append([network, rows[0].kind, ", ".join(order), *_show(theirs), *_show(ours)])
    lines.append(["all", "", "", *_sum_up(computed), *_sum_up(of_ship)])
    heads = ["steps", "passes by", "kB / best"]
    return table(["network", "kind left out", "order by the others", *heads, *heads], lines)


def _show(one: Walk) -> list[str]:
    excess = "" if one.excess is None else f"{one.excess:.2f}"
    return [str(one.steps), one.chosen.name if one.chosen else "none", excess]


def _sum_up(walks: Sequence[Walk]) -> list[str]:
    """Return the mean number of steps, how many networks pass, and the mean excess of bytes."""
    passed = [one for one in walks if one.chosen is not None]
    excesses = [one.excess for one in passed if one.excess is not None]
    steps = sum(one.steps for one in walks) / max(len(walks), 1)
    excess = sum(excesses) / max(len(excesses), 1)
    return [f"{steps:.2f}", f"{len(passed)} of {len(walks)}", f"{excess:.3f}"]
