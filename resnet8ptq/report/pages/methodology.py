"""Describes how the runs of a sweep were measured, from their params and tags."""

from collections.abc import Iterable, Sequence

from resnet8ptq.report.comparison import Family
from resnet8ptq.report.facts import samples_of
from resnet8ptq.tracking.record import RunRecord

NAMED = 10  # values of one setting
STOPPING = (
    "group-sequential tests of the loss at the limit, Tango's score statistic at each look; level "
    "spent by Lan and DeMets (1983), O'Brien-Fleming type; intervals and estimates by the "
    "stage-wise ordering of Tsiatis, Rosner and Mehta (1984)"
)
_VERSION = "version."  # prefix of the tags with the versions of packages
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512vnni", "avx_vnni", "amx_int8")


def describe(family: Family) -> list[tuple[str, str]]:
    """Return (subject, text) pairs, with at most `NAMED` values of a varying setting.

    The notes below the table describe tests, intervals and verdicts; see `notes`.
    """
    runs = []
    scored = []
    tags: set[str] = set()
    for record in family.records:
        if record.samples is not None:
            runs.append(record)
            scored.append(f"{record.samples:,.0f}")
            tags.update(record.tags)
    if not runs:
        return [("runs", "none was measured")]

    def param(name: str) -> str:
        return _join(record.params.get(name) for record in runs)

    def tag(name: str) -> str:
        return _join(record.tags.get(name) for record in runs)

    task = family.task
    kind = samples_of(runs)
    samples = _join(scored)
    pairs = [
        ("model", f"{param('model')}, batch normalization folded: {param('model.fold')}"),
        (
            "data",
            f"{param('data.name')}; {samples} {kind} samples, digest {tag('test_digest')[:16]}…",
        ),
        (
            "calibration",
            f"{param('calibration_samples')} samples, none of them among the {kind} samples, seed "
            f"{param('seed')}, digest of the sample indices {tag('calibration_digest')[:16]}…",
        ),
        ("task", f"{task.name}, metric {task.metric.title}"),
        ("evaluated artifact", "the written file, reloaded from disk"),
    ]
    if family.stopped:
        pairs.append(("stopping", STOPPING))

    # The machine and its software
    flags = [flag for flag in tag("cpu_flags").split() if flag in FLAGS]
    latency, threads = _describe_timing(runs, param("latency.threads"), param("threads"))
    versions = []
    for key in sorted(tags):
        if key.startswith(_VERSION):
            versions.append(f"{key.removeprefix(_VERSION)} {tag(key)}")
    pairs += [
        ("latency", latency),
        ("CPU", f"{tag('cpu')} ({' '.join(flags) or 'no vector flags known'})"),
        ("threads", threads),
        ("versions", ", ".join(versions)),
    ]
    if "project_commit" in tags:
        pairs.append(("commit of the project", tag("project_commit")))
    return pairs


def _describe_timing(runs: Sequence[RunRecord], timed_on: str, threads: str) -> tuple[str, str]:
    """Return the texts about latency, threads and parallel jobs, which lengthen latencies."""
    latency = "not measured"
    at_once = max(int(run.jobs_at_once) for run in runs)
    timed = any(run.latency_ms is not None for run in runs)
    if timed:
        latency = f"{timed_on} thread(s), quantized and FP32 model measured in turns in one "
        latency += "process, medians"
    if at_once > 1:
        threads += f" for each job, {at_once} jobs at once"
        if timed:
            latency += f"; up to {at_once - 1} other job(s) ran at the same time, which lengthens "
            latency += "times: a ratio of two models is more reliable than a latency"
    return latency, threads


def _join(values: Iterable[str | None]) -> str:
    """Return the different values as text, at most `NAMED` of them."""
    texts = [value for value in dict.fromkeys(values) if value is not None]
    if len(texts) > NAMED:
        texts[NAMED:] = [f"and {len(texts) - NAMED} more"]
    return " / ".join(texts) or "unknown"
