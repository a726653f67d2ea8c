"""Typed records of runs; the only module that names params, metrics and tags."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from resnet8ptq.config.naming import Combination
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.evaluation.stopped_hits import PLANNED, STOPPED_LOSS
from resnet8ptq.tasks import registry
from resnet8ptq.tasks.metric import BASELINE, GROUPED, TOTAL, Metric
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking.journal import ENDED, PARENT_TAG, Journal, check_id
from resnet8ptq.tracking.params import complete

T = TypeVar("T")


class _Value(Generic[T]):
    """An attribute of a record that reads a param, metric or tag of the run, or `default`."""

    def __init__(self, kind: str, key: str, default: T) -> None:
        self.kind, self.key, self.default = kind, key, default

    def __get__(self, record: "RunRecord", owner: type | None = None) -> T:
        value: T = getattr(record, self.kind).get(self.key, self.default)
        return value


class _Count(_Value[float | None]):
    """A metric that counts, or None: a store may hold NaN, or more than there can be."""

    def __get__(self, record: "RunRecord", owner: type | None = None) -> float | None:
        value = super().__get__(record, owner)
        return value if value is not None and 0 <= value <= _MOST else None


_MOST = 2.0**53  # a larger float is no exact count


def _param(key: str, default: str = "") -> _Value[str]:
    return _Value("params", key, default)


def _metric(key: str) -> _Value[float | None]:
    return _Value("metrics", key, None)


def _tag(key: str, default: str = "") -> _Value[str]:
    return _Value("tags", key, default)


@dataclass(frozen=True)
class RunRecord:
    """One run: finished, in progress, or the parent run of a sweep.

    A store is untrusted, so a text may hold anything. A missing text is empty, or `?` if it is
    shown; a metric that was not measured is None.
    """

    run_id: str
    params: dict[str, str]  # the settings by their config keys, and resolved settings
    metrics: dict[str, float]  # last values; `value` reads those that depend on the task
    tags: dict[str, str] = field(repr=False)
    artifact_uri: str = ""
    ended: bool = True
    in_folder: bool = False  # read from its folder, where its files are too
    # The settings that select the store it was read from, see `Store.words`; None: from its folder.
    store_words: tuple[str, ...] | None = None

    name = _tag("mlflow.runName")
    status = _tag("status", "?")  # ok, unsupported, failed, running or killed
    reason = _tag("reason")
    kind = _tag("kind")  # "sweep", or empty
    key = _tag("record")  # of its journal
    parent_id = _tag(PARENT_TAG)
    job_number = _tag("job_number")
    job_overrides = _tag("job_overrides")
    jobs_at_once = _tag("jobs_at_once", "1")
    folder = _tag("folder")
    cpu = _tag("cpu")
    platform = _tag("platform")
    test_digest = _tag("test_digest")  # of the scored samples
    sample_sketch = _tag("sample_sketch")  # of their numbers, see `ledger.sketch`
    calibration_digest = _tag("calibration_digest")

    backend = _param("backend", "?")
    dtype = _param("dtype")
    calib = _param("calib", "?")
    model = _param("model", "?")
    seed = _param("seed")
    split = _param("evaluate.split")
    execution = _param("execution")  # see `backends.contract.Resolved`
    cause = _param("cause")  # why a file is far from FP32
    doubt = _param("doubt")  # why FP32 is broken and the verdict void
    silent = _param("silent")  # an output that does not depend on the sample, as FP32's does
    chosen_by = _param("chosen_by")
    scored_as = _param("scored_as", "classification")  # the task's name
    calibration_samples = _param("calibration_samples")
    latency_threads = _param("latency.threads", "?")
    benchmark = _param("benchmark.name", "null")
    target = _param("benchmark.target", "nan")
    float_operators = _param("float_operators")
    planned_bits = _param("planned_bits")
    engine = _param("engine")  # torch's
    artifact_sha256 = _param("artifact_sha256")
    outputs_sha256 = _param("outputs_sha256")  # of the outputs for all scored samples

    total = _Count("metrics", TOTAL, None)  # scored samples
    planned = _Count("metrics", PLANNED, None)  # samples of a sequential test
    stopped_loss = _metric(STOPPED_LOSS)  # corrected for its looks
    stopped_loss_low = _metric(f"{STOPPED_LOSS}_low")  # ends of its 95% interval
    stopped_loss_high = _metric(f"{STOPPED_LOSS}_high")
    drop = _metric("drop")  # how much worse than FP32; lower is better
    p_value = _metric("paired/p_value")
    p_within = _metric("paired/p_within")  # of a loss at the limit or above, uncorrected
    size_bytes = _Count("metrics", "size_bytes", None)
    baseline_size_bytes = _Count("metrics", f"{BASELINE}size_bytes", None)
    latency_ms = _metric("latency_p50_ms")
    batch_latency_ms = _metric("latency_batch_p50_ms")
    baseline_latency_ms = _metric(f"{BASELINE}latency_p50_ms")
    speedup = _metric("speedup")

    @classmethod
    def of_mlflow(cls, run: Any, store_words: Sequence[str] = ()) -> "RunRecord":
        """Return the record of an MLflow run.

        Raises:
            TrackingError: the id of the run, or of its sweep, is not plain.
        """
        info, data = run.info, run.data
        values = complete(data.params), dict(data.metrics), dict(data.tags)
        for run_id in filter(None, (info.run_id, data.tags.get(PARENT_TAG))):
            check_id(run_id)
        ended = info.status in ENDED
        words = tuple(store_words)
        return cls(info.run_id, *values, info.artifact_uri, ended, store_words=words)

    @classmethod
    def of_journal(cls, journal: Journal, folder: Path, run_id: str = "") -> "RunRecord":
        """Return the record of a run from its own folder."""
        tags = {**journal.tags, "record": journal.key, "mlflow.runName": journal.name}
        run_id = run_id or journal.run_id or journal.key
        values = journal.params, journal.metrics, tags
        return cls(run_id, *values, folder.as_uri(), journal.ended, in_folder=True)

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return self.status in ("ok", "unsupported")

    @property
    def combination(self) -> Combination:
        """The framework, dtype, calibration and granularity."""
        return Combination.of_params(self.params)

    @property
    def quantized(self) -> bool:
        """Whether the run's network is quantized."""
        return self.dtype != "fp32"

    @property
    def is_for_npu(self) -> bool:
        """Whether the file is meant for an NPU, and only simulated on this machine."""
        return self.execution == "simulated" and self.dtype == "w8a16"

    @property
    def dataset(self) -> str:
        """The name of the data set; if the run did not read it, the name of its source."""
        return self.params.get("dataset", self.params.get("data", "?"))

    @property
    def is_analysis(self) -> bool:
        """Whether the run is an analysis, which has no result to compare."""
        return self.params.get("analysis.name", "null") != "null"

    @property
    def held_out(self) -> bool:
        """Whether the run was scored on held-out or selection samples, not on the reported ones."""
        return self.split in ("held_out", "choice")

    @property
    def dynamic_batch(self) -> str | None:
        """With `method=dynamic`, the batch size of the evaluation; None for other methods."""
        if self.params.get("method") != "dynamic":
            return None
        return str(self.metrics.get("system/evaluate_batch_size"))

    @property
    def grouped(self) -> bool:
        """Whether samples of one group were scored as if they were independent."""
        return bool(self.params.get(GROUPED))

    @property
    def confirmations(self) -> int:
        """`report.confirmations`, at least 1."""
        text = self.params.get("report.confirmations", "")
        return max(1, int(text)) if text.isdecimal() and len(text) < 10 else 1

    @property
    def task(self) -> Task:
        """The task that scored the run.

        Raises:
            TrackingError: the params or class names are not valid for a run.
        """
        return registry.recall(self.params, self.class_names)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names.

        Raises:
            TrackingError: the tag is not a list of names.
        """
        text = self.tags.get("class_names", "[]")
        try:
            names = json.loads(text)
        except (ValueError, RecursionError):
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TrackingError(f"class_names: got {text[:100]!r}, expected a list of names")
        return tuple(names)

    def value(self, metric: Metric, prefix: str = "") -> float | None:
        """Return the run's value of a task's metric; with `BASELINE`, that of FP32."""
        return self.metrics.get(prefix + metric.name)

    def delta(self, metric: Metric) -> float | None:
        """Return the run's value minus FP32's; None if either was not measured."""
        value, baseline = self.value(metric), self.value(metric, BASELINE)
        return None if value is None or baseline is None else value - baseline

    @property
    def size_reduction(self) -> float | None:
        """The fraction of the FP32 file's bytes that the model saves."""
        size, baseline = self.size_bytes, self.baseline_size_bytes
        return None if size is None or not baseline else 1 - size / baseline

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return a 95% interval: `value` of the metric, `delta` of its difference from FP32.

        `drop` is that of the loss, if FP32 is the reference and the loss has its own unit.
        """
        low, high = (self.metrics.get(f"ci95/{name}_{end}") for end in ("low", "high"))
        return None if low is None or high is None else (low, high)

    def as_failed(self, reason: str) -> "RunRecord":
        """Return the record as that of a failed run, such as one whose file was lost."""
        return replace(self, tags={**self.tags, "status": "failed", "reason": reason})

    def settings(self, *keys: str) -> tuple[str | None, ...]:
        """Return params by their keys; None for missing ones."""
        return tuple(map(self.params.get, keys))
