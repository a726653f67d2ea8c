"""The table of the zoo, as Markdown."""

import re
from collections.abc import Iterable, Mapping

from tests.zoo.flows import EACH, EXACT_DB, FLOWS, LEAST_OF_FLOW, SOME, Outcome
from tests.zoo.registry import LEAST_DB, STRUCTURES

NNCF_DB = LEAST_OF_FLOW["openvino_nncf"]
HEAD = f"""# Structures that have hurt people

Which backends take a structure, and how much noise 8 bits add there: the SQNR in dB of the worst
output, or in brackets the reason below why the backend does not support it. Small networks with
random weights run through each backend as a run does, per channel, with 20 samples, and are
compared with FP32 of the same framework. The calibration samples are the reported ones, a
hundredth larger, so no value lies outside of its range.

A test asserts at least {LEAST_DB:g} dB ({NNCF_DB:g} dB for NNCF, whose ranges cut off large
values); where 8 bits cost more, the limit is beside the structure in `tests/zoo/`. An empty cell is
not measured. This page is written by

    RESNET8PTQ_TEST_ONNX2TF=1 ZOO_TABLE=docs/zoo.md python -m pytest tests/zoo/test_zoo.py
"""


def render(outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """Return the page: structures of public reports, variations, further settings, reasons."""
    reasons: dict[str, int] = {}
    reported = [name for name, structure in STRUCTURES.items() if structure.reports]
    variations = [name for name in STRUCTURES if name not in reported]
    parts = [HEAD, "## From public reports\n", _structures(reported, outcomes, reasons)]
    parts += ["\n## Variations\n", _structures(variations, outcomes, reasons)]

    others = [["structure", "settings", "SQNR, dB"], ["---", "---", "---:"]]
    for name, structure in STRUCTURES.items():
        for flow in structure.flows:
            if flow in SOME and (name, flow) in outcomes:
                words = " ".join(FLOWS[flow])
                others.append([_title(name), f"`{words}`", _show(outcomes[name, flow], reasons)])
    parts += ["\n## Further settings\n", _lines(others), "\n## Reasons\n"]
    parts += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(parts) + "\n"


def _structures(
    names: Iterable[str],
    outcomes: Mapping[tuple[str, str], Outcome],
    reasons: dict[str, int],
) -> str:
    """Return a row for each structure; flows share a column if all their cells are equal."""
    names = list(names)
    cells = {
        (name, flow): _show(outcomes.get((name, flow)), reasons) for name in names for flow in EACH
    }
    columns: dict[tuple[str, ...], list[str]] = {}
    for flow in EACH:
        column = tuple(cells[name, flow] for name in names)
        if any(column):
            columns.setdefault(column, []).append(flow)
    titles = [", ".join(flows) for flows in columns.values()]

    has_reports = any(STRUCTURES[name].reports for name in names)
    rows = [["structure", "report", *titles], ["---", "---", *["---:"] * len(titles)]]
    for number, name in enumerate(names):
        values = [column[number] for column in columns]
        rows.append([_title(name), STRUCTURES[name].reports or "", *values])
    if not has_reports:
        rows = [[row[0], *row[2:]] for row in rows]
    return _lines(rows)


def _title(name: str) -> str:
    return name.replace("_", " ")


def _show(outcome: Outcome | None, reasons: dict[str, int]) -> str:
    if outcome is None:
        return ""
    if outcome.sqnr_db is None:
        return f"({reasons.setdefault(_shorten(outcome.reason), len(reasons) + 1)})"
    return "equal" if outcome.sqnr_db == EXACT_DB else f"{outcome.sqnr_db:.1f}"


def _shorten(reason: str) -> str:
    """Return a reason as one item of a list, without the paths of this machine and its counts."""
    reason = re.sub(r"; (try|backend=\w+ takes it).*|: Conv \d+ stay in float", "", reason)
    reason = re.sub(r"\ball \d+ layers\b", "all layers", reason)
    words = [word.rpartition("/")[2] if word.startswith("/") else word for word in reason.split()]
    return " ".join(words).replace("|", "\\|").replace("<", "\\<")[:200]


def _lines(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
