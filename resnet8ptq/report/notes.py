"""The notes below a table of runs: on single runs, on the tests, and on the columns."""

from collections.abc import Collection, Sequence

from resnet8ptq.evaluation.sequential import ANALYSES
from resnet8ptq.report import equal_files
from resnet8ptq.report.equal_files import adjusted_p, count_models
from resnet8ptq.report.families import Family
from resnet8ptq.report.naming import labels, varied
from resnet8ptq.report.table import VOID
from resnet8ptq.report.verdicts import FAIL, PASS, UNDECIDED, say_added
from resnet8ptq.tasks.scoring.metric import UNDEFINED, Metric
from resnet8ptq.tasks.scoring.statistics import KNOWN
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking.record import RunRecord

EQUAL_NOTE = "equal files, one row: {names}. The row shows the figures of the first."
NAMED = 12  # runs that one note names
P_NOTE = (
    "p: {test} against the FP32 baseline of the same framework, on the same samples{correction}. A "
    "small p shows a difference from FP32, which may still be within the limit."
)
LIMIT_NOTE = (
    "limit: {limit} ({key}), tested by one-sided 95% bounds of the loss{several}. {outcomes}A "
    "verdict applies to this file only; another calibration draw makes another file. "
    "experiment=spread judges a configuration over several draws."
)
OUTCOME_NOTES = {
    PASS: "pass: these samples prove that the model keeps the limit (upper bound within it). ",
    FAIL: (
        "fail: these samples prove that the model exceeds it (lower bound beyond it), or the model "
        "fails for the reason named. "
    ),
    UNDECIDED: (
        "undecided: these samples are too few for either proof. In brackets: the sample size that "
        "decides with 80% power if the true loss is the measured one. "
    ),
}
EARLIER_NOTE = (
    "{count} earlier {runs} scored on these samples{part}; verdicts do not correct for that. "
    "In each run, a model beyond the limit may pass by chance: with 30 single runs at the limit, "
    "at least one passes wrongly in up to 34% of simulated cases, instead of 5%. Confirm a pass on "
    "new test samples."
)
STOP_NOTE = (
    "after N of M: evaluate.stop=decided scored the M samples in random order, and stopped after "
    "the N-th, because the verdict was decided or no decision was likely. Verdicts, p and the "
    "intervals of the loss are corrected for the {analyses} looks; other values are those of the N "
    "samples. Runs that stop at different samples are not compared with each other, and no class "
    "is tested."
)
STOPPED_NOTE = "{label}: loss {loss} points (95%: {low} to {high}), corrected for stopping."
VOID_NOTE = (
    "void: FP32 is not shown to be better than chance, or is significantly below "
    "report.expected_accuracy. A loss against it is meaningless."
)
GROUPED_NOTE = (
    "groups: samples of one group are correlated, but the tests assume independence. Intervals are "
    "too narrow, p is too small, and every verdict stays undecided."
)
DYNAMIC_NOTE = (
    "{label}: each batch sets its ranges, so {title} depends on evaluate.batch_size. At batch size "
    "1: {value}."
)
SIMULATED_NOTE = (
    "execution: a simulated run emulates integer kernels in float. Its latency is not "
    "representative and is not measured."
)
PASSED_OVER_NOTE = (
    "passes, but is not recommended, because this machine only simulates its integer kernels: "
    "{names}"
)
INTERVAL_NOTE = (
    "interval: the 95% confidence interval of delta, not corrected{for_all}. It contains the "
    "differences from FP32 that these samples do not rule out. Method: {how}."
)
UNDEFINED_NOTE = "{label}: {share:.2%} of the bootstrap samples have no value of {title}. {effect}."
SPEEDUP_NOTE = (
    "ms: the median latency of one image, {threads} thread(s); speedup: FP32's latency divided by "
    "the run's, timed in turns. Runs are timed at different times: compare their speedups, not "
    "their ms."
)
TURNS_NOTE = (
    "ms: the latency of one image, {threads} thread(s), of FP32 and the models timed in turns, the "
    "geometric mean of the medians of blocks; speedup: the latency of the fastest FP32 divided by "
    "the run's."
)
UNTIMED_NOTE = (
    "without ms: not among the fastest, the smallest and the best, which alone are timed in turns; "
    "latency_p50_ms in result.json is the latency of the run by itself"
)
FAMILIES_NOTE = (
    "The runs were scored on {count} different sets of samples, or by different metrics. Each set "
    "has its own table, tests and recommendations."
)


def collect(family: Family) -> list[str]:
    """Return the notes on the runs and the columns of a family, for a table of all columns."""
    task = family.task
    records = family.records
    named = list(zip(records, labels(records), strict=True))
    hidden = {"execution"}  # the table has a column for it
    if "planned_bits" in varied(records):
        hidden.add("planned_bits")

    # Single runs first, then the tests, then the costs
    lines = _reasons(task.metric, named, hidden)
    lines += _on_equal_files(named)
    lines += _on_tests(task, records)
    lines += _on_limits(family)
    lines += _on_stops(task, named)
    is_scored = any(record.value_of(task.metric) is not None for record in records)
    if task.reference and is_scored:
        lines.append(task.reference.note)
    lines += _on_batches(task, named)
    lines += _on_undefined(task, named)
    lines += _on_speed(family)
    lines += _on_untimed(family)
    return lines


def collect_warnings(family: Family) -> list[str]:
    """Return the notes that the short table needs: on runs, on verdicts, and on missing latencies.

    docs/settings.md explains the columns, docs/decisions.md the verdicts, and the report both.
    """
    task = family.task
    records = family.records
    named = list(zip(records, labels(records), strict=True))
    lines = _reasons(task.metric, named, hidden={"execution", "planned_bits", "float_operators"})
    lines += _on_open_verdicts(records)
    lines += _on_batches(task, named)
    lines += _on_undefined(task, named)
    lines += _on_untimed(family)
    lines += _on_passed_over(named)
    return lines


def _on_equal_files(named: Sequence[tuple[RunRecord, str]]) -> list[str]:
    """Return a note with the names of runs that share a row, if any."""
    records = []
    names = {}
    for record, label in named:
        records.append(record)
        names[record.run_id] = label
    groups = []
    for members in equal_files.group(records):
        if len(members) > 1:
            own_names = [names[member.run_id] for member in members]
            groups.append(" = ".join(dict.fromkeys(own_names)))
    if not groups:
        return []
    return [EQUAL_NOTE.format(names=_join(groups))]


def _on_speed(family: Family) -> list[str]:
    """Return the notes on simulated runs, and on the columns of latencies and speedups."""
    executions = set()
    threads = set()
    for record in family.records:
        executions.add(record.execution)
        if record.speedup is not None:
            threads.add(record.latency_threads)
    lines = []
    if "simulated" in executions:
        lines.append(SIMULATED_NOTE)
    if threads:
        note = TURNS_NOTE if family.in_turns else SPEEDUP_NOTE
        lines.append(note.format(threads=" or ".join(sorted(threads))))
    return lines


def _on_untimed(family: Family) -> list[str]:
    """Return a note on the empty latencies of models that were not timed in turns, if any."""
    if not family.in_turns:
        return []
    untimed = []
    for cell in family.models:  # equal files share a row
        if cell.record.latency_ms is None and cell.record.execution != "simulated":
            untimed.append(cell)
    if not untimed:
        return []
    return [UNTIMED_NOTE]


def _on_passed_over(named: Sequence[tuple[RunRecord, str]]) -> list[str]:
    """Return a note with the passing simulated runs, unless all passing runs are simulated."""
    passing = [(record, label) for record, label in named if record.verdict == PASS]
    names = [label for record, label in passing if record.execution == "simulated"]
    if not names or len(names) == len(passing):
        return []
    return [PASSED_OVER_NOTE.format(names=_join(names))]


def say_machine(metric: Metric, record: RunRecord) -> str:
    """Return the target machine that ran a file, and how far its outputs differ, if known.

    The outputs are compared with those on the machine of the run. The text is empty without a
    target machine.
    """
    here = record.metrics.get(f"target/here_{metric.name}")
    if not record.measured_on or here is None:
        return record.measured_on
    sqnr_db = record.metrics.get("target/sqnr_db")
    if sqnr_db is not None:
        near = f"outputs within {sqnr_db:.1f} dB"
    elif record.metrics.get(metric.name) == here:
        near = "equal outputs"
    else:  # outputs of NaN have no SQNR
        near = "other outputs"
    return f"{record.measured_on}; on the machine of the run {near}, {metric.show(here)}"


def _reasons(
    metric: Metric, named: Sequence[tuple[RunRecord, str]], hidden: Collection[str]
) -> list[str]:
    """Return the notes on single runs, each text once with the labels of its runs.

    Args:
        hidden: names among `planned_bits`, `execution` and `float_operators` to leave out.
    """
    # Group the runs by text, because many fail for one reason
    reasons: dict[str, list[str]] = {}
    for record, label in named:
        texts = [
            (f"{record.status}: ", record.reason),
            ("", record.doubt),
            ("far from FP32: ", record.cause),
            ("measured on ", say_machine(metric, record)),
        ]

        # Add what the table does not show
        if "float_operators" not in hidden:
            texts.append(("in float: ", record.float_operators))
        if "planned_bits" not in hidden:
            texts.append(("weight bits (dtype sets the rest): ", record.planned_bits))
        if "execution" not in hidden and record.execution not in ("integer", "float"):
            texts.append(("execution: ", record.execution))
        for begin, text in texts:
            if text:
                reasons.setdefault(begin + text, []).append(label)
    return [f"{text} ({_join(members)})" for text, members in reasons.items()]


def _join(members: Sequence[str]) -> str:
    text = "; ".join(members[:NAMED])
    if len(members) > NAMED:
        text += f"; and {len(members) - NAMED:,} more"
    return text


def _say_correction(count: int, what: str) -> str:
    """Return the part of a note on Holm's correction for several tests; empty for one."""
    if count < 2:
        return ""
    return f", corrected for {count} {what} (Holm)"


def _on_tests(task: Task, records: Sequence[RunRecord]) -> list[str]:
    """Return the notes on intervals and p-values, if the table has any."""
    p_values = adjusted_p(records)
    tested = []
    has_interval = False
    for record in records:
        if record.run_id in p_values:
            tested.append(record)
        if record.interval("delta"):
            has_interval = True

    # Explain only what the table has
    lines = []
    if has_interval:
        for_all = ""
        if len(tested) > 1:
            for_all = f" for the {len(tested)} runs"
        lines.append(INTERVAL_NOTE.format(for_all=for_all, how=task.test.intervals))
    models = count_models(tested)
    if models:
        correction = _say_correction(models, "comparisons")
        lines.append(P_NOTE.format(test=task.test.name, correction=correction))
    return lines


def _on_limits(family: Family) -> list[str]:
    """Return the notes on the verdicts: the limit, the outcomes, and reservations."""
    records = family.records
    metric = family.metric
    verdicts = {record.verdict for record in records if record.verdict_text}
    if not verdicts:
        return []
    several = _say_correction(family.corrected, "models")

    # Explain only outcomes that occur
    outcomes = ""
    for name, note in OUTCOME_NOTES.items():
        if name in verdicts:
            outcomes += note
    limit = metric.say_limit(metric.limit(family.limits))
    key = f"report.{metric.limit_key}"
    note = LIMIT_NOTE.format(limit=limit, key=key, several=several, outcomes=outcomes)
    return [note, *_on_open_verdicts(records), *_on_earlier_runs(family)]


def _on_open_verdicts(records: Sequence[RunRecord]) -> list[str]:
    """Return notes on void verdicts, and on grouped samples, with which verdicts stay undecided."""
    lines = []
    if any(record.verdict == VOID for record in records):
        lines.append(VOID_NOTE)
    if any(record.grouped for record in records):
        lines.append(GROUPED_NOTE)
    return lines


def _on_earlier_runs(family: Family) -> list[str]:
    """Return notes on earlier runs that scored all or some of the samples, and on added samples."""
    earlier = family.earlier_runs
    if not earlier.count:
        return []

    # Put the number into words
    count = f"{earlier.count:,}"
    if earlier.more:
        count = f"at least {count}"
    runs = "run was"
    if earlier.count > 1 or earlier.more:
        runs = "runs were"
    part = ""
    if earlier.others:
        part = " or some of them"
    lines = [EARLIER_NOTE.format(count=count, runs=runs, part=part)]
    if family.added is not None:
        lines.append(say_added(family))
    return lines


def _on_stops(task: Task, named: Sequence[tuple[RunRecord, str]]) -> list[str]:
    """Return notes on runs that could stop early: the method, and their corrected losses."""
    metric = task.metric
    stopped = [(record, label) for record, label in named if record.stopped_loss is not None]
    if not stopped:
        return []

    def show(loss: float | None) -> str:
        return "?" if loss is None else metric.show_change(loss)

    # Explain the column once, then give each run's loss
    lines = [STOP_NOTE.format(analyses=ANALYSES)]
    for record, label in stopped[:NAMED]:
        text = STOPPED_NOTE.format(
            label=label,
            loss=show(record.stopped_loss),
            low=show(record.stopped_loss_low),
            high=show(record.stopped_loss_high),
        )
        lines.append(text)
    if len(stopped) > NAMED:
        lines.append(
            f"The same for {len(stopped) - NAMED:,} more runs (stopping/loss in runs.csv)."
        )
    return lines


def _on_undefined(task: Task, named: Sequence[tuple[RunRecord, str]]) -> list[str]:
    """Return notes on the runs with bootstrap samples that have no value of the metric."""
    undefined = [(record, label) for record, label in named if record.metrics.get(UNDEFINED)]
    lines = []
    title = task.metric.title
    for record, label in undefined[:NAMED]:
        share = record.metrics[UNDEFINED]
        effect = "Interval, p and verdict use the others"
        if share > 1 - KNOWN:
            effect = "That is more than 1%: no interval, and the verdict is undecided"
        lines.append(UNDEFINED_NOTE.format(label=label, share=share, title=title, effect=effect))
    if len(undefined) > NAMED:
        more = f"{len(undefined) - NAMED:,} more runs ({UNDEFINED} in runs.csv)"
        lines.append(f"The same for {more}.")
    return lines


def _on_batches(task: Task, named: Sequence[tuple[RunRecord, str]]) -> list[str]:
    """Return notes on the runs with dynamic ranges: their metric at batch size 1."""
    metric = task.metric
    alone = f"batch1/{task.metric.name}"
    dynamic = [(record, label) for record, label in named if alone in record.metrics]
    lines = []
    for record, label in dynamic[:NAMED]:
        value = metric.show(record.metrics[alone])
        lines.append(DYNAMIC_NOTE.format(label=label, title=metric.title, value=value))
    if len(dynamic) > NAMED:
        lines.append(f"The same for {len(dynamic) - NAMED:,} more runs ({alone} in runs.csv).")
    return lines
