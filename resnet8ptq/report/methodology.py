"""How the runs of a sweep were measured, in words, from their params and tags."""

from collections.abc import Callable, Sequence

from resnet8ptq.report.comparison import Family
from resnet8ptq.report.facts import images_of
from resnet8ptq.tasks.statistics import SIGNIFICANCE
from resnet8ptq.tracking.record import RunRecord

NAMED = 10  # values of one setting
BASELINE = ", against the FP32 baseline of the same framework"


def describe(family: Family) -> list[tuple[str, str]]:
    """Return (subject, text) pairs; where runs differ, up to `NAMED` values are named."""
    runs = [record for record in family.records if record.total is not None]
    task = family.task
    if not runs:
        return [("runs", "none was measured")]

    def param(name: str) -> str:
        return _values(runs, lambda record: record.params.get(name))

    def tag(name: str) -> str:
        return _values(runs, lambda record: record.tags.get(name))

    versions = sorted({key for run in runs for key in run.tags if key.startswith("version.")})
    latency = (
        f"{param('latency.threads')} thread(s), quantized and FP32 model measured in turns in one "
        "process, medians"
        if any(run.latency_ms is not None for run in runs)
        else "not measured"
    )
    at_once = max(int(run.jobs_at_once) for run in runs)
    threads = param("threads")
    if at_once > 1:
        threads += f" for each job, {at_once} jobs at once"
        if latency != "not measured":
            latency += (
                f"; up to {at_once - 1} other job(s) ran at the same time, which lengthens times: "
                "a ratio of two models is more reliable than a latency"
            )
    flags = {"avx2", "avx512f", "avx512_vnni", "avx512vnni", "avx_vnni", "amx_int8"}
    present = [flag for flag in tag("cpu_flags").split() if flag in flags]
    kind = images_of(runs)
    total = _values(runs, lambda record: f"{record.total:.0f}")
    return [
        ("model", f"{param('model')}, batch normalization folded: {param('model.fold')}"),
        ("data", f"{param('data.name')}; {total} {kind} images, digest {tag('test_digest')[:16]}…"),
        (
            "calibration",
            f"{param('calibration_samples')} samples, none of them among the {kind} images, seed "
            f"{param('seed')}, digest of the draw {tag('calibration_digest')[:16]}…",
        ),
        ("task", f"{task.name}, judged by {task.metric.title}"),
        ("evaluated artifact", "the file that was written, loaded again from disk"),
        (
            "tests",
            f"{task.test.name}, paired on the same images{'' if task.note else BASELINE}; Holm's "
            f"correction within a family; significant below {SIGNIFICANCE}",
        ),
        ("intervals", task.test.intervals),
        (
            "choice",
            f"on {param('chosen_by')}, which neither calibrate nor are reported"
            if any(run.chosen_by for run in runs)
            else "the best are chosen on the reported images, so that their results are optimistic",
        ),
        ("latency", latency),
        ("CPU", f"{tag('cpu')} ({' '.join(present) or 'no vector flags known'})"),
        ("threads", threads),
        ("versions", ", ".join(f"{key[8:]} {tag(key)}" for key in versions)),
        ("commit", tag("git_commit")),
    ]


def _values(runs: Sequence[RunRecord], read: Callable[[RunRecord], str | None]) -> str:
    values = list(dict.fromkeys(value for run in runs if (value := read(run)) is not None))
    more = f" / and {len(values) - NAMED} more" if len(values) > NAMED else ""
    return " / ".join(values[:NAMED]) + more or "unknown"
