"""The record of a run, which tables, pages, commands and programs read.

`RunRecord` gives names and types to the params, metrics and tags of a run in MLflow (`of_mlflow`)
or in the run's folder (`of_journal`). `report.verdicts` and `results` assess a run among those of
its sweep, and fill the attributes below "Assessed among the runs of the sweep".
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import BY_BATCH
from resnet8ptq.core import command_process, files, invocation
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.text import printable
from resnet8ptq.evaluation.stopped_hits import PLANNED, STOPPED_LOSS
from resnet8ptq.tasks import registry
from resnet8ptq.tasks.scoring.metric import BASELINE, GROUPED, SAME_SAMPLES, TOTAL, Metric
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking.journal import CARRIED_TAG, ENDED, EXIT_CODE_TAG, PARENT_TAG, Journal
from resnet8ptq.tracking.mlflow_store.store import check_id
from resnet8ptq.tracking.params import complete

if TYPE_CHECKING:  # takes half a second to import
    import pandas

_MOST = 2.0**53  # the largest float that is an exact count
# Settings of `deploy` that name the store -> the run's param and its default.
_STORE = {
    "uri": ("tracking.uri", "null"),
    "root": ("tracking.root", "mlruns"),
    "experiment": ("tracking.experiment_name", "resnet8ptq"),
}


def _finite(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value


def _whole(value: Any) -> Any:
    if not isinstance(value, float):
        return value  # pydantic refuses values that are neither int nor None
    if 0 <= value <= _MOST:
        return round(value)
    return None


def _id_or_empty(text: str) -> str:
    return check_id(text) if text else ""


Text = Annotated[str, AfterValidator(printable)]
Number = Annotated[float | None, AfterValidator(_finite)]
Count = Annotated[int | None, BeforeValidator(_whole)]


def _param(key: str, about: str = "", default: str = "") -> Any:
    return Field(default, validation_alias=AliasPath("params", key), description=about)


def _metric(key: str, about: str) -> Any:
    return Field(None, validation_alias=AliasPath("metrics", key), description=about)


def _tag(key: str, about: str = "", default: str = "") -> Any:
    return Field(default, validation_alias=AliasPath("tags", key), description=about)


def _assessed(about: str, default: Any = None) -> Any:
    return Field(default, description=about)


class RunRecord(BaseModel):
    """One run, ended or in progress, or the parent run of a sweep.

    A store is untrusted, so fields of the types `Text`, `Number` and `Count` hold only printable
    texts and finite numbers. A missing text has the default of its field, usually empty or `?`. A
    number that was not measured or not logged is None. `results.load_run` and `results.load_sweep`
    return assessed runs.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    run_id: Annotated[str, AfterValidator(check_id)] = Field(description="id of the run in MLflow")
    params: dict[str, str]  # the settings by their config keys, and resolved settings
    metrics: dict[str, float]  # the last values, including NaN; `value_of` reads the task's metrics
    tags: dict[str, str] = Field(repr=False)
    artifact_uri: str = ""
    ended: bool = True
    in_folder: bool = False  # whether the record was read from the run's folder, with the files
    unread: str = ""  # the reason why the result of a run in a store cannot be read
    # The settings that select the store, see `Store.words`; None if read from the run's folder.
    store_words: tuple[str, ...] | None = None

    name: Text = _tag("mlflow.runName", "name of the run")
    status: Text = _tag("status", "ok, unsupported, failed, killed or running", "?")
    reason: Text = _tag("reason", "why the run is unsupported, failed or killed")
    sweep_id: Annotated[str, AfterValidator(_id_or_empty)] = _tag(
        PARENT_TAG, "id of the sweep's parent run; empty for a single run"
    )
    kind: Text = _tag("kind")  # "sweep", or empty
    key: Text = _tag("record")  # the key of the run's journal
    job_number: Text = _tag("job_number")
    jobs_at_once: Text = _tag("jobs_at_once", default="1")
    host_cpu: Text = _tag("cpu", "the CPU of the machine that made the run")
    measured_on: Text = _param(
        "measured_on", "the machine that ran the file, if not that of the run"
    )
    platform: Text = _tag("platform")
    calibration_digest: Text = _tag("calibration_digest")

    backend: Text = _param("backend", "the backend", "?")
    calib: Text = _param("calib", "the calibration method", "?")
    model: Text = _param("model", "name of the network", "?")
    dataset: Text = Field(
        "?",
        validation_alias=AliasChoices(AliasPath("params", "dataset"), AliasPath("params", "data")),
        description="name of the data set; if the run did not read it, name of its source",
    )
    seed: Text = _param("seed")
    split: Text = _param("evaluate.split")
    execution: Text = _param(
        "execution", "how the layers ran, such as integer, simulated, or mixed with counts"
    )
    cause: Text = _param("cause", "why a file is far from FP32")
    doubt: Text = _param("doubt", "why FP32 is broken and the verdict void")
    silent: Text = _param("silent", "an output that depends on the sample in FP32 only")
    chosen_by: Text = _param("chosen_by", "number and kind of the selection samples")
    scored_as: Text = _param("scored_as", "name of the task", "classification")
    calibration_samples: Text = _param("calibration_samples")
    latency_threads: Text = _param("latency.threads", "threads of the latency", "?")
    benchmark: Text = _param("benchmark.name", default="null")
    target: Text = _param("benchmark.target", default="nan")
    float_operators: Text = _param("float_operators", "operators that stay in float")
    planned_bits: Text = _param("planned_bits", "layers with other bits than the dtype's")
    engine: Text = _param("engine", "torch's integer kernels, or openvino")
    artifact_sha256: Text = _param("artifact_sha256", "hash of the quantized file")
    outputs_sha256: Text = _param("outputs_sha256", "hash of the outputs for all scored samples")

    samples: Count = _metric(TOTAL, "number of scored samples")
    samples_planned: Count = _metric(
        PLANNED,
        "with evaluate.stop=decided, the samples of which the first ones were scored until the "
        "verdict was decided; else null",
    )
    samples_digest: Text = _tag(
        "test_digest", "hash of the scored samples, of all planned ones with evaluate.stop=decided"
    )
    loss: Number = _metric(
        "drop",
        "measured loss against FP32, positive if worse: a difference of the metric, or a fraction "
        "of FP32's value for errors, or noise over signal without labels",
    )
    stopped_loss: Number = _metric(STOPPED_LOSS, "the loss, corrected for stopping when decided")
    stopped_loss_low: Number = _metric(f"{STOPPED_LOSS}_low", "low end of its 95% interval")
    stopped_loss_high: Number = _metric(f"{STOPPED_LOSS}_high", "high end of its 95% interval")
    p_alone: Number = _metric("paired/p_value", "of the difference from FP32, not corrected")
    p_within: Number = _metric("paired/p_within", "of a loss at the limit or above, not corrected")
    size_bytes: Count = _metric("size_bytes", "size of the quantized file, in bytes")
    fp32_size_bytes: Count = _metric(
        f"{BASELINE}size_bytes", "size of the FP32 file in the same framework, in bytes"
    )
    latency_ms: Number = _metric(
        "latency_p50_ms",
        "median latency of one sample at a time, in milliseconds; for models timed in turns with "
        "each other, the geometric mean of the medians",
    )
    batch_latency_ms: Number = _metric(
        "latency_batch_p50_ms", "latency of a batch, computed as latency_ms is, in milliseconds"
    )
    fp32_latency_ms: Number = _metric(
        f"{BASELINE}latency_p50_ms",
        "latency_ms of FP32 in the same framework, measured in turns with the run",
    )
    speedup: Number = _metric(
        "speedup",
        "fp32_latency_ms divided by latency_ms; for models timed in turns with each other, that of "
        "the fastest FP32",
    )

    # Assessed among the runs of the sweep
    label: Text = _assessed("the combination in words, as in the report", "")
    settings: dict[str, str] = _assessed("other settings that vary in the sweep, by key", {})
    metric: Metric | None = _assessed("the primary metric of the task")
    value: Number = _assessed("the metric of the quantized network; accuracies are fractions")
    fp32_value: Number = _assessed("the metric of FP32 in the same framework on the same samples")
    least: Number = _assessed(
        "smallest accepted value (report.min_accuracy); null without this limit"
    )
    limit: Number = _assessed("largest loss that passes, such as report.max_drop")
    verdict: str | None = _assessed(
        "pass, fail, undecided, void or unsupported; fail also for a `fault`; null for FP32 and "
        "for runs that did not end with a result"
    )
    loss_verdict: str | None = _assessed("verdict on the loss alone; null without a measurement")
    verdict_text: Text = _assessed("the verdict as in the report's table", "")
    fault: Text = _assessed("why the model fails independently of its loss", "")
    loss_upper_bound: Number = _assessed(
        "the loss is at most this: one-sided 95% bound, corrected (Holm) as the verdict is"
    )
    loss_lower_bound: Number = _assessed(
        "the loss is at least this: one-sided 95% bound, corrected in the same way"
    )
    p_value: Number = _assessed("of the difference from FP32, two-sided, corrected (Holm)")
    samples_needed: Count = _assessed(
        "where undecided, about the sample size for 80% power at the measured loss; null beyond a "
        "million or without spread"
    )
    artifact: Text | None = _assessed(
        "path of the quantized file, or its address in a remote store"
    )
    equal_runs: tuple[str, ...] = _assessed(
        "ids of the other runs of the sweep with an equal file, in the same row of the report", ()
    )
    reproduce_command: str | None = _assessed(
        "the command that repeats a sweep's run; null if it is not known or not safe to repeat"
    )

    @classmethod
    def of(
        cls,
        run_id: str,
        params: Mapping[str, str],
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        **others: Any,
    ) -> Self:
        """Return the record of a run's params, metrics and tags.

        Raises:
            TrackingError: an id is not plain, or a value does not have its attribute's type.
        """
        logged = {"params": dict(params), "metrics": dict(metrics), "tags": dict(tags)}
        try:
            return cls.model_validate({"run_id": run_id, **logged, **others})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise TrackingError(
                f"run {run_id}: {printable(key)}: got {printable(repr(first['input']))[:100]}, "
                f"expected another type ({first['msg']})"
            ) from None

    @classmethod
    def of_mlflow(cls, run: Any, store_words: Sequence[str] = ()) -> Self:
        """Return the record of an MLflow run, with the defaults of the settings not shown there.

        Args:
            store_words: see `Store.words`.

        Raises:
            TrackingError: see `of`.
        """
        info = run.info
        data = run.data
        return cls.of(
            info.run_id,
            params=complete(data.params),
            metrics=data.metrics,
            tags=data.tags,
            artifact_uri=info.artifact_uri,
            ended=info.status in ENDED,
            store_words=tuple(store_words),
        )

    @classmethod
    def of_journal(cls, journal: Journal, folder: Path, run_id: str = "") -> Self:
        """Return the record of a run from its own folder.

        Args:
            run_id: the id in the store; by default the journal's id, or else its key.

        Raises:
            TrackingError: see `of`.
        """
        return cls.of(
            run_id or journal.run_id or journal.key,
            journal.params,
            journal.metrics,
            tags={**journal.tags, "record": journal.key, "mlflow.runName": journal.name},
            artifact_uri=folder.as_uri(),
            ended=journal.ended,
            in_folder=True,
        )

    def changed(self, **logged: Any) -> Self:
        """Return the record with new values of attributes.

        Earlier values of attributes outside `_READ`, such as an assessment, are not kept.
        """
        before = {name: getattr(self, name) for name in _READ}
        return self.of(**before | logged)

    def as_failed(self, reason: str) -> Self:
        """Return the record with the status `failed`, such as for a run that lost its files."""
        return self.changed(tags={**self.tags, "status": "failed", "reason": reason})

    @property
    def folder(self) -> str:
        """The run's folder, as logged; empty if it was not logged."""
        return self.tags.get("folder", "")

    @property
    def job_overrides(self) -> str:
        """The settings of a sweep's job, as logged; empty for a single run."""
        return self.tags.get("job_overrides", "")

    @property
    def finished(self) -> bool:
        """Whether the run ended as `ok` or `unsupported`."""
        return self.status in ("ok", "unsupported")

    @property
    def has_wrong_input(self) -> bool:
        """Whether a wrong input made the run fail, such as a file that cannot be read."""
        return self.status == "failed" and self.tags.get(EXIT_CODE_TAG) == "2"

    @property
    def why_none(self) -> str:
        """The logged reason why the run has no result, or why its verdict is void; else empty."""
        return self.reason or self.doubt

    @property
    def combination(self) -> Combination:
        """The settings that name the run, such as framework and dtype."""
        return Combination.of_params(self.params)

    @property
    def framework(self) -> str:
        """The framework, with the flow if it is pt2e or onnx2tf.

        For a file of another program, it is the kind and the name of the file.
        """
        return printable(self.combination.cells[0])

    @property
    def was_carried(self) -> bool:
        """Whether somebody measured the file on another machine by hand, after the run."""
        return CARRIED_TAG in self.tags

    @property
    def cpu(self) -> str:
        """The CPU that ran the file; on a target machine, with machine type and runtime."""
        return self.measured_on or self.host_cpu

    @property
    def dtype(self) -> str:
        """The dtype setting, such as int8; for a file of another program, the dtype in the file."""
        return printable(self.combination.cells[1])

    @property
    def calibration(self) -> str:
        """The calibration method, or a `method` other than static; both for mixed and qat.

        Floats and files of other programs have none.
        """
        return printable(self.combination.cells[2])

    @property
    def weights(self) -> str:
        """The granularity of the weights: per tensor, per channel or in blocks.

        Floats and files of other programs have none.
        """
        return printable(self.combination.cells[3])

    @property
    def quantized(self) -> bool:
        """Whether the dtype is not fp32."""
        return self.dtype != "fp32"

    @property
    def is_for_npu(self) -> bool:
        """Whether the file is meant for an NPU, and the run only simulated it."""
        return self.execution == "simulated" and self.dtype == "w8a16"

    @property
    def is_analysis(self) -> bool:
        """Whether the run is an analysis, which has no result to compare."""
        return self.params.get("analysis.name", "null") != "null"

    @property
    def held_out(self) -> bool:
        """Whether the run scored held-out or selection samples, see `evaluate.split`.

        Selection samples may be the test samples, see `same_samples`.
        """
        return self.split in ("held_out", "choice")

    @property
    def same_samples(self) -> bool:
        """Whether the run scored the test samples in place of separate selection samples."""
        return bool(self.params.get(SAME_SAMPLES))

    @property
    def samples_from(self) -> str:
        """The kind of the scored samples: test, selection or held-out training."""
        if self.split == "choice":
            return "selection"
        if self.held_out:
            return "held-out training"
        return "test"

    @property
    def dynamic_batch(self) -> str | None:
        """The batch size of the evaluation as text, with `method=dynamic | mixed`; else None."""
        if self.params.get("method") not in BY_BATCH:
            return None
        return str(self.metrics.get("system/evaluate_batch_size"))

    @property
    def stopped_early(self) -> bool:
        """Whether scoring could stop early, with `evaluate.stop=decided`."""
        return self.samples_planned is not None

    @property
    def grouped(self) -> bool:
        """Whether samples of one group were scored as if they were independent."""
        return bool(self.params.get(GROUPED))

    @property
    def confirmations(self) -> int:
        """`report.confirmations`, at least 1; also 1 if it is damaged."""
        text = self.params.get("report.confirmations", "")
        if not text.isdecimal() or len(text) >= 10:
            return 1
        return max(1, int(text))

    @property
    def task(self) -> Task:
        """The task that scored the run.

        Raises:
            TrackingError: the params or class names are not valid for a run.
        """
        return registry.recall(self.params, self.class_names)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names; empty if none are logged, as for many classes (see `Task.few_names`).

        Raises:
            TrackingError: the tag is not a list of names.
        """
        text = self.tags.get("class_names", "[]")
        try:
            names = json.loads(text)
        except (ValueError, RecursionError):
            names = None
        is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not is_list:
            raise TrackingError(f"class_names: got {text[:100]!r}, expected a list of names")
        return tuple(names)

    def value_of(self, metric: Metric, prefix: str = "") -> float | None:
        """Return the value of a task's metric, even NaN; None if it was not measured.

        Args:
            prefix: `BASELINE` for the value of FP32, `CHOICE` for that on the selection samples;
                empty for the value of the run.
        """
        return self.metrics.get(prefix + metric.name)

    def delta(self, metric: Metric) -> float | None:
        """Return the value of the run minus that of FP32; None if either was not measured."""
        value = self.value_of(metric)
        baseline = self.value_of(metric, BASELINE)
        if value is None or baseline is None:
            return None
        return value - baseline

    @property
    def size_reduction(self) -> float | None:
        """The fraction of the FP32 file's bytes that the model saves; None without both sizes."""
        size = self.size_bytes
        baseline = self.fp32_size_bytes
        if size is None or not baseline:
            return None
        return 1 - size / baseline

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return a 95% interval as (low, high); None if it was not measured.

        Args:
            name: `value` for the metric; `delta` for the difference from FP32, with labels; `drop`
                for the loss, with task=deviation.
        """
        low = self.metrics.get(f"ci95/{name}_low")
        high = self.metrics.get(f"ci95/{name}_high")
        if low is None or high is None:
            return None
        return low, high

    def select(self, *keys: str) -> tuple[str | None, ...]:
        """Return the values of params, in the order of `keys`; None for each missing param."""
        return tuple(map(self.params.get, keys))

    @property
    def path(self) -> Path | None:
        """The path of the file `artifact`; None if this machine has no such file."""
        if self.artifact is None:
            return None
        path = Path(self.artifact)
        return path if path.exists() else None

    @property
    def deploy_words(self) -> list[str]:
        """The settings of `deploy` that name the run and its store; empty if another program wrote
        the file.
        """
        if self.combination.path:
            return []
        words = [f"run_id={self.run_id}", *(self.store_words or ())]
        if self.store_words is None:  # the record was read from a folder
            for name, (key, default) in _STORE.items():
                value = self.params.get(key, default)
                if value != default:
                    words.append(f"{name}={value}")
        return words

    @property
    def deploy_command(self) -> str | None:
        """The command that exports the file with a model card; None unless the run ended as `ok`.

        It is also None if another program wrote the file, if the verdict is void, because `deploy`
        refuses it, or if the command is not printable.
        """
        if self.status != "ok" or self.doubt or not self.deploy_words:
            return None
        return printable_or_none(invocation.command("deploy", *self.deploy_words))

    def deploy(self, folder: str | Path, **settings: object) -> Path:
        """Export the model with its card, test vectors and example into a new folder.

            load_run().deploy("folder", verify=False)

        Args:
            settings: keys of `resnet8ptq deploy`, with `__` for a dot.

        Returns:
            The folder.

        Raises:
            PtqError: the run has no file of this tool, or the command fails as on the command line.
        """
        if self.deploy_command is None and not self.doubt:
            raise ConfigError(f"run_id: run {self.run_id} has no file of this tool to deploy")
        target = files.expand(folder).absolute()
        asked = []
        for key, value in settings.items():
            dotted = key.replace("__", ".")
            asked.append(f"{dotted}={value}")
        command_process.run("deploy", [*self.deploy_words, *asked, f"folder={target}"])
        return target

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Return the few fields that `repr` shows, among hundreds of params and metrics."""
        return [(name, getattr(self, name)) for name in ("run_id", "name", "status", "verdict")]

    def _repr_html_(self) -> str:
        """Return the run as a table of one row, for a notebook."""
        return show_frame([self])


_READ = (
    "run_id",
    "params",
    "metrics",
    "tags",
    "artifact_uri",
    "ended",
    "in_folder",
    "unread",
    "store_words",
)
# The columns of a frame that are not fields, and the fields that are not columns.
_DERIVED = (
    "framework",
    "dtype",
    "calibration",
    "weights",
    "cpu",
    "samples_from",
    "deploy_command",
)
_NO_COLUMNS = {*_READ[1:], "settings"}
# The columns that a notebook shows.
_SHOWN = ("label", "status", "value", "loss", "verdict", "size_bytes", "latency_ms", "speedup")


def to_frame(runs: Iterable[RunRecord]) -> "pandas.DataFrame":
    """Return a frame with a row for each run, indexed by `run_id`.

    The columns are the main attributes of `RunRecord`, without params, metrics and tags. `metric`
    is the metric's name. Each setting of `settings` is a separate column. A number that was not
    measured is NaN.

        frame = load_sweep().to_frame()
        frame[frame.loss_upper_bound <= 0.01].sort_values("size_bytes")
    """
    import pandas

    # Collect the columns, and those that hold numbers
    names = ["run_id"]
    numbers = []
    for name, field in RunRecord.model_fields.items():
        if name not in _NO_COLUMNS and name != "run_id":
            names.append(name)
            if field.annotation in (float | None, int | None):
                numbers.append(name)
    names += _DERIVED

    # Runs of several sweeps may have other settings, each with its own column
    columns = dict.fromkeys(names)
    rows = []
    for run in runs:
        row = {name: getattr(run, name) for name in names}
        row["metric"] = None if run.metric is None else run.metric.name
        row |= run.settings
        columns |= dict.fromkeys(row)
        rows.append(row)

    # Make numbers floats, with NaN for those that were not measured
    frame = pandas.DataFrame(rows, columns=list(columns))
    return frame.astype(dict.fromkeys(numbers, "float64")).set_index("run_id")


def show_frame(runs: Iterable[RunRecord]) -> str:
    """Return the main columns of runs as HTML, for a notebook."""
    frame = to_frame(runs).reset_index()[list(_SHOWN)]
    return str(frame.to_html(index=False, na_rep="", float_format="%.4g"))


def printable_or_none(command: str) -> str | None:
    """Return a command if it is printable; else None, because escapes would change the command."""
    if not command or not command.isprintable():
        return None
    return command
