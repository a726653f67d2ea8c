"""The answer of a sweep: the recommended models, with their verdicts, measurements and commands."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from resnet8ptq.core.table import Column, Table
from resnet8ptq.core.text import escape_markdown
from resnet8ptq.report import timing
from resnet8ptq.report.families import Cell, by_run_id
from resnet8ptq.report.recommend import (
    BALANCED,
    BEST,
    RECOMMENDED,
    ModelSelection,
    Recommendation,
    find_recommendation,
)
from resnet8ptq.report.rule import SAME_SIZE
from resnet8ptq.report.table import VOID, say_size
from resnet8ptq.report.untried import find_untried
from resnet8ptq.report.verdicts import FAIL, PASS
from resnet8ptq.tasks.scoring.metric import BASELINE
from resnet8ptq.tracking.record import RunRecord

NOTHING_FASTER = "One sample at a time, {models} is shown to be faster than FP32 on {machine}."
KNOWN = " Known to be fast here, and untried:"
UNKNOWN_SPEED = "for an NPU: its speed was not measured, because this CPU computes it in float"


_ADVICE = {
    "deploy": "Deploy {}",
    "test": "Test {} on more samples",
    "keep": "Keep FP32 instead of {}",
}


@dataclass(frozen=True)
class Explanation:
    """A recommended model with all its uses, summarized for the terminal and the report.

    Attributes:
        uses: the titles of the uses, such as `smallest`; without `recommended` if the advice is to
            keep FP32 instead. Without any title, `quantized`.
        label: see `Recommendation.label`.
        headline: the advice, such as `Keep NAME`; for the model of the headline, also the reason.
        outcome: the outcome of the verdict; empty for FP32.
        verdict: the verdict in words.
        facts: see `say_facts`; for FP32, its latencies.
        command: the deploy command; empty without one, as for FP32.
        note: for the best model, see `say_chance` and `say_balanced`; else empty.
        hint: for the model of the headline, `NOTHING_FASTER` if `Headline.nothing_faster`, with
            `KNOWN` before an `untried` command; else empty.
        untried: with a hint, see `find_untried`; else empty.
    """

    uses: tuple[str, ...]
    label: str
    headline: str
    outcome: str
    verdict: str
    facts: tuple[str, ...]
    command: str = ""
    note: str = ""
    hint: str = ""
    untried: str = ""


def explain(selected: ModelSelection) -> list[Explanation]:
    """Return an explanation of each recommended model, with that of the headline, if any, first."""
    models: dict[str, list[Recommendation]] = {}
    for recommended in selected.recommendations:
        models.setdefault(recommended.label, []).append(recommended)
    return [_explain(selected, choices) for choices in models.values()]


def _explain(selected: ModelSelection, choices: Sequence[Recommendation]) -> Explanation:
    first = choices[0]
    label = first.label
    cell = first.choice
    if cell is None:
        return _explain_fp32(label, choices)
    titles = [choice.title for choice in choices]

    # Only the headline gives advice
    headline = f"Do not deploy {label}"
    hint = ""
    untried = ""
    chosen = None
    if first.use == RECOMMENDED:
        chosen = selected.headline
    if chosen is not None:
        headline = f"{_ADVICE[chosen.advice].format(label)}: {chosen.reason}"
        if chosen.advice == "keep":  # FP32 is recommended instead of this model
            titles = titles[1:] or ["quantized"]
        if chosen.nothing_faster:
            untried = find_untried(selected.family.records)
            machine = cell.record.measured_on or "this CPU"
            hint = NOTHING_FASTER.format(models=_say_timed(selected), machine=machine)
            if untried:
                hint += KNOWN

    # The best model has a note on better and on smaller ones
    note = ""
    if any(choice.use == BEST for choice in choices):
        note = say_chance(selected, cell) + say_balanced(selected, cell)
    return Explanation(
        uses=tuple(titles),
        label=label,
        headline=headline,
        outcome=cell.record.verdict or "",
        verdict=say_verdict(cell.record),
        facts=say_facts(cell.record),
        command=first.command,
        note=note.strip(),
        hint=hint,
        untried=untried,
    )


def _say_timed(selected: ModelSelection) -> str:
    """Return the subject of the sentence `NOTHING_FASTER`.

    It is `nothing here`, unless a candidate outside of `ModelSelection.within` is shown to be
    faster than FP32.
    """
    # The sentence must not deny a faster model that the table shows
    within = by_run_id(selected.within)
    measured_within = by_run_id(selected.measured_within)
    for cell in selected.candidates:
        speed = None
        if selected.timing is not None and cell.record.run_id not in within:
            speed = timing.speed(cell.record, selected.timing, len(selected.candidates))
        if speed is None or not speed.faster:
            continue

        # Name the property that this faster model lacks
        if cell.record.run_id in measured_within:
            return "no model that passes"
        samples = "selection" if selected.apart else "reported"
        return f"no model within the limit on the {samples} samples"
    return "nothing here"


def _explain_fp32(label: str, choices: Sequence[Recommendation]) -> Explanation:
    """Return the explanation for the uses in which FP32 itself is the fastest."""
    # Each use has its own latency of FP32
    titles = []
    times = []
    for choice in choices:
        titles.append(choice.title)
        time, _, _ = choice.because.partition("; ")
        times.append(time)
    return Explanation(
        uses=tuple(titles),
        label=label,
        headline=f"Keep {label}",
        outcome="",
        verdict="FP32 itself: no quantized model within the limit is faster.",
        facts=tuple(times),
    )


COLUMNS: Sequence[Column[Explanation]] = (
    Column("for", lambda answer: "; ".join(answer.uses)),
    Column("model", lambda answer: answer.label),
    Column("verdict", lambda answer: answer.outcome),
    Column("measured", lambda answer: "; ".join(answer.facts)),
    Column("command", lambda answer: answer.command),
)


def to_markdown(answers: Sequence[Explanation]) -> str:
    """Return the answers as a paragraph on the first one and a table; empty without answers."""
    if not answers:
        return ""
    best = answers[0]
    headline = escape_markdown(best.headline)
    text = escape_markdown(f"{best.verdict} {best.note}")
    lines = [f"**{headline}.** {text}"]
    if best.hint:
        lines.append(escape_markdown(f"{best.hint} {best.untried}"))
    return "\n".join([*lines, "", Table(COLUMNS, answers).to_markdown(escape_markdown)])


def say_verdict(record: RunRecord) -> str:
    """Return the verdict on a measured and assessed run in one to three sentences.

    The sentences name the number of scored samples, unless the verdict is void.
    """
    assert record.metric is not None and record.limit is not None  # every assessed run has both
    limit = record.metric.say_limit(record.limit)
    total = f"{record.samples or 0:,} samples"
    if record.samples_planned is not None:
        total = f"the first {total} of {record.samples_planned:,.0f} in random order"
    if record.verdict == VOID:
        return f"No verdict: {record.doubt}."

    # A fault fails the model independently of the loss
    fault = f"Fails: {record.fault}. " if record.fault else ""
    if record.loss_verdict == PASS:
        return f"{fault}{limit[:1].upper()}{limit[1:]}, shown with 95% confidence on {total}."
    if record.loss_verdict == FAIL:
        return f"{fault}Fails the limit ({limit}), shown with 95% confidence on {total}."
    text = f"{fault}Undecided: {total} neither prove nor disprove the limit ({limit})."
    if record.samples_needed is not None:
        text += f" About {record.samples_needed:,} samples would, with 80% power at this loss."
    return text


def say_chance(selected: ModelSelection, best: Cell) -> str:
    """Return two sentences if a model looks better on the reported samples than the best one.

    The text is empty otherwise, and if the reported samples chose the best one.
    """
    metric = selected.family.metric
    costs = [metric.cost(cell.metric(metric.name)) for cell in selected.candidates]
    if not selected.apart or min(costs) >= metric.cost(best.metric(metric.name)):
        return ""
    samples = best.record.chosen_by or "other samples"
    better = f"Another model has a better {metric.title} here, possibly by chance."
    return f" Chosen on {samples}. {better}"


def say_balanced(selected: ModelSelection, best: Cell) -> str:
    """Return a sentence on the balanced model if it is smaller than the best; else empty.

    A model smaller by at most `SAME_SIZE` counts as equal.
    """
    balanced = find_recommendation(BALANCED, selected.recommendations)
    if balanced is None or balanced.choice is None:
        return ""
    balanced_bytes = balanced.choice.record.size_bytes or math.inf
    best_bytes = best.record.size_bytes or math.inf
    if balanced_bytes * (1 + SAME_SIZE) >= best_bytes:
        return ""
    return f" {balanced.label} is smaller, and {balanced.equals_mean}."


def say_facts(record: RunRecord) -> tuple[str, ...]:
    """Return texts on the metric with its 95% interval, the size, and the latency.

    Those that were not measured are left out. A file for an NPU has a text on its unknown speed.
    """
    metric = record.task.metric
    lines = []
    # The metric, its interval, and FP32's value
    value = record.value_of(metric)
    if value is not None:
        text = f"{metric.title} {metric.show(value)}"
        interval = record.interval("value")
        if interval:
            ends = " to ".join(map(metric.show, interval))
            text += f" ({ends})"
        baseline = record.value_of(metric, BASELINE)
        if baseline is not None:
            text += f", FP32 {metric.show(baseline)}"
        lines.append(text)

    # The costs
    if record.size_bytes is not None:
        lines.append(say_size(record.size_bytes, record.size_reduction))
    speed = _say_speed(record)
    if speed:
        lines.append(speed)
    if record.is_for_npu:
        lines.append(UNKNOWN_SPEED)
    return tuple(lines)


def _say_speed(record: RunRecord) -> str:
    if record.latency_ms is None:
        return ""
    text = f"{record.latency_ms:.3f} ms"
    if record.speedup is not None:
        text += f", {record.speedup:.2f} times as fast as FP32"
    return text
