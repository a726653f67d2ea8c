"""Describes how the runs of a family were measured, from their records."""

from collections.abc import Iterable, Sequence

from resnet8ptq.report.families import Family
from resnet8ptq.report.naming import samples_of
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking import history
from resnet8ptq.tracking.record import RunRecord

NAMED = 10  # largest number of values of a setting that are named
STOPPING = (
    "group-sequential tests of the loss at the limit, Tango's score statistic at each look; level "
    "spent by Lan and DeMets (1983), O'Brien-Fleming type; intervals and estimates by the "
    "stage-wise ordering of Tsiatis, Rosner and Mehta (1984)"
)
_VERSION = "version."  # prefix of the tags with the versions of packages
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512vnni", "avx_vnni", "amx_int8")


def describe(family: Family) -> list[tuple[str, str]]:
    """Return (subject, text) pairs on network, samples, task, machine and software of the runs.

    Only measured runs count. A text names at most `NAMED` values of a varying setting. For tests,
    intervals and verdicts, see `notes`.
    """
    runs = [record for record in family.records if record.samples is not None]
    if not runs:
        return [("runs", "none was measured")]
    pairs = _describe_samples(family.task, runs)
    if family.stopped:
        pairs.append(("stopping", STOPPING))
    return pairs + _describe_machine(runs)


def _describe_samples(task: Task, runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return the (subject, text) pairs on network, samples and task."""
    # Settings that vary are joined, digests are cut to 16 characters
    kind = samples_of(runs)
    scored = _join(f"{record.samples:,.0f}" for record in runs)
    test_digest = _join_tags(runs, "test_digest")[:16]
    calibration_digest = _join_tags(runs, "calibration_digest")[:16]
    folded = _join_params(runs, "model.fold")
    drawn = _join_params(runs, "calibration_samples")
    seed = _join_params(runs, "seed")
    return [
        ("model", f"{_join_params(runs, 'model')}, batch normalization folded: {folded}"),
        (
            "data",
            f"{_join_params(runs, 'data.name')}; {scored} {kind} samples, digest {test_digest}…",
        ),
        (
            "calibration",
            f"{drawn} samples, none of them among the {kind} samples, seed {seed}, digest of the "
            f"sample indices {calibration_digest}…",
        ),
        ("task", f"{task.name}, metric {task.metric.title}"),
        ("evaluated artifact", "the written file, reloaded from disk"),
    ]


def _describe_machine(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return the (subject, text) pairs on latency, CPU, threads and software."""
    latency, threads = _describe_timing(runs)
    cpu = _join_tags(runs, "cpu")
    all_flags = _join_tags(runs, "cpu_flags").split()
    flags = [flag for flag in all_flags if flag in FLAGS]

    # Collect the versions of all packages that a run has logged
    tags: set[str] = set()
    for run in runs:
        tags.update(run.tags)
    versions = []
    for tag in sorted(tags):
        if tag.startswith(_VERSION):
            versions.append(f"{tag.removeprefix(_VERSION)} {_join_tags(runs, tag)}")
    pairs = [
        ("latency", latency),
        ("CPU", f"{cpu} ({' '.join(flags) or 'no vector flags known'})"),
        ("threads", threads),
        ("versions", ", ".join(versions)),
    ]
    if "project_commit" in tags:
        pairs.append(("commit of the project", _join_tags(runs, "project_commit")))
    return pairs


def _describe_timing(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """Return the text on latency and the text on threads."""
    latency = "not measured"
    threads = _join_params(runs, "threads")
    at_once = max(history.to_number(run.jobs_at_once) for run in runs)
    timed = any(run.latency_ms is not None for run in runs)
    if timed:
        timed_on = _join_params(runs, "latency.threads")
        latency = f"{timed_on} thread(s), quantized and FP32 model measured in turns in one "
        latency += "process, medians"

    # Jobs at the same time slow each other down
    if at_once > 1:
        threads += f" for each job, {at_once} jobs at once"
        if timed:
            latency += f"; up to {at_once - 1} other job(s) ran at the same time, which lengthens "
            latency += "times: a ratio of two models is more reliable than a latency"
    return latency, threads


def _join_params(runs: Sequence[RunRecord], key: str) -> str:
    return _join(run.params.get(key) for run in runs)


def _join_tags(runs: Sequence[RunRecord], key: str) -> str:
    return _join(run.tags.get(key) for run in runs)


def _join(values: Iterable[str | None]) -> str:
    """Return the different values as text, at most `NAMED` of them; `unknown` without any."""
    texts = [value for value in dict.fromkeys(values) if value is not None]
    if len(texts) > NAMED:
        texts[NAMED:] = [f"and {len(texts) - NAMED} more"]
    return " / ".join(texts) or "unknown"
