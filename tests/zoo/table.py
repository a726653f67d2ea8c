"""The table of the zoo, as Markdown."""

from collections.abc import Mapping

from tests.zoo.flows import EACH, EXACT_DB, FLOWS, LEAST_OF_FLOW, Outcome
from tests.zoo.registry import LEAST_DB, STRUCTURES

NNCF_DB = LEAST_OF_FLOW["openvino_nncf"]
HEAD = f"""# Structures that have hurt people

Small networks from public reports about quantization, and variations of them, each with random
weights. Each runs through each backend as a run does: converted, quantized per channel with 20
samples, written, loaded again, and compared with FP32 of the same framework on 20 samples. The
calibration samples are the reported ones, a hundredth larger, so no value lies outside of its
range.

A cell is the SQNR in dB of the worst output; `equal` has no noise. A test asserts at least
{LEAST_DB:g} dB; where 8 bits cost more, the limit is beside the structure in `tests/zoo/`. NNCF's
ranges are means over the samples, which cut off large values: its limit is
{NNCF_DB:g} dB. A number in brackets is a reason below: the backend does not support the structure.
An empty cell is not measured. This page is written by

    ZOO_TABLE=docs/zoo.md python -m pytest tests/zoo/test_zoo.py
"""


def render(outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """Return the page."""
    reasons: dict[str, int] = {}
    rows = [["structure", "report", *EACH], ["---", "---", *["---:"] * len(EACH)]]
    others = []
    for name, structure in STRUCTURES.items():
        shown = [_show(outcomes.get((name, flow)), reasons) for flow in EACH]
        rows.append([name.replace("_", " "), structure.reports or "variation", *shown])
        for flow in structure.flows:
            outcome = _show(outcomes.get((name, flow)), reasons)
            words = " ".join(FLOWS[flow])
            others.append([name.replace("_", " "), f"`{words}`", outcome])
    parts = [HEAD, "## Every backend\n", _lines(rows)]
    others = [["structure", "settings", "SQNR, dB"], ["---", "---", "---:"], *others]
    parts += ["\n## Further settings\n", _lines(others), "\n## Reasons\n"]
    parts += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(parts) + "\n"


def _show(outcome: Outcome | None, reasons: dict[str, int]) -> str:
    if outcome is None:
        return ""
    if outcome.sqnr_db is None:
        return f"({reasons.setdefault(_shorten(outcome.reason), len(reasons) + 1)})"
    return "equal" if outcome.sqnr_db == EXACT_DB else f"{outcome.sqnr_db:.1f}"


def _shorten(reason: str) -> str:
    """Return a reason as one item of a list, without the paths of this machine."""
    words = [word.rpartition("/")[2] if word.startswith("/") else word for word in reason.split()]
    return " ".join(words).replace("|", "\\|").replace("<", "\\<")[:240]


def _lines(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
