"""The verdict as JSON (`docs/verdict.schema.json`), and as Markdown for a pull request.

The schema is generated from `Document`: `make schema` writes it, and a test compares it.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import GenerateJsonSchema

from resnet8ptq.core import templates
from resnet8ptq.core.table import show_kb
from resnet8ptq.core.text import escape_markdown, printable
from resnet8ptq.report.answer import say_verdict
from resnet8ptq.report.families import by_run_id
from resnet8ptq.report.table import VOID, show_ms
from resnet8ptq.report.verdicts import EXIT_CODES, MARGIN
from resnet8ptq.results.summaries import SweepSummary
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tracking.record import RunRecord, Text

Known = Annotated[Text | None, BeforeValidator(lambda text: text or None)]
Size = Annotated[int | None, Field(ge=0)]


def _of(name: str) -> Any:
    """Return a field of the document that reads an attribute of a run, and has its description."""
    known = RunRecord.model_fields.get(name)
    if known is not None:
        about = known.description
    else:  # a property of the record
        about = " ".join(getattr(RunRecord, name).__doc__.split())
    return Field(validation_alias=name, description=about)


class _Part(BaseModel):
    """A part of the document; parts about a run read the run's attributes."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", from_attributes=True, serialize_by_alias=True
    )


class ChosenRun(_Part):
    """The run that the verdict is about."""

    run_id: str = _of("run_id")
    name: Known = _of("name")
    label: Known = _of("label")
    status: Known = _of("status")
    framework: Known = _of("framework")
    dtype: Known = _of("dtype")
    calibration: Known = _of("calibration")
    weights: Known = _of("weights")
    execution: Known = _of("execution")
    settings: dict[str, str] = _of("settings")
    equal_runs: tuple[str, ...] = _of("equal_runs")


class Measured(_Part):
    """The primary metric of the task."""

    name: Text = Field(
        validation_alias=AliasPath("metric", "name"), description="name in MLflow, such as accuracy"
    )
    direction: Literal["maximize", "minimize"] = Field(
        validation_alias=AliasPath("metric", "direction"),
        description="whether higher or lower is better",
    )
    value: float | None = _of("value")
    fp32: float | None = _of("fp32_value")
    least: float | None = _of("least")


class Loss(_Part):
    """The loss against FP32, in the unit of the limit."""

    value: float | None = _of("loss")
    upper_bound: float | None = _of("loss_upper_bound")
    lower_bound: float | None = _of("loss_lower_bound")
    limit: float = _of("limit")
    verdict: Literal["pass", "fail", "undecided", "void"] | None = _of("loss_verdict")
    # The bounds decide the verdict, not this p-value
    difference_p_value: float | None = _of("p_value")


class Samples(_Part):
    """The scored samples."""

    scored: Size = _of("samples")
    planned: Size = _of("samples_planned")
    needed: Size = _of("samples_needed")
    source: Literal["test", "selection", "held-out training"] = Field(
        validation_alias="samples_from",
        serialization_alias="from",
        description=RunRecord.samples_from.__doc__,
    )
    digest: Known = _of("samples_digest")


class FileSizes(_Part):
    """Sizes of the quantized file and of the FP32 file."""

    bytes: Size = _of("size_bytes")
    fp32_bytes: Size = _of("fp32_size_bytes")


class Latency(_Part):
    """Latencies in milliseconds, the speedup, and the CPU."""

    ms: float | None = _of("latency_ms")
    fp32_ms: float | None = _of("fp32_latency_ms")
    speedup: float | None = _of("speedup")
    batch_ms: float | None = _of("batch_latency_ms")
    cpu: Known = _of("cpu")


class Files(_Part):
    """The files of the run and of its sweep."""

    artifact: str | None = _of("artifact")
    sha256: Known = _of("artifact_sha256")
    report: str | None = Field(description="path or address of the sweep's report.html")


class Commands(_Part):
    """Commands for a shell, in the folder where the sweep or the run was started."""

    deploy: str | None = _of("deploy_command")
    reproduce: str | None = _of("reproduce_command")


class AsGood(_Part):
    """The runs that are or may be as good as the best one, on the scored samples."""

    best: str = Field(description="id of the run recommended as the best")
    margin: float = Field(description="half of the limit, in the unit of loss.limit")
    shown: tuple[str, ...] = Field(
        description="ids of the runs whose loss against the best is shown to be within the margin: "
        "one-sided 95% bound, corrected for the number of runs (Holm)"
    )
    unknown: tuple[str, ...] = Field(
        description="ids of the runs that may be within the margin, undecided by the samples"
    )


class Sweep(_Part):
    """The sweep that was judged."""

    run_id: str = Field(description="id of the sweep's run in MLflow")
    name: str = Field(description="name of the sweep")
    status: str = Field(description="ok, failed, killed or running")
    runs: dict[str, int] = Field(description="number of runs by status")
    as_good_as_best: AsGood | None = Field(
        description="null without a best run, or if several sets of scored samples have one"
    )


class Document(_Part):
    """The output of resnet8ptq verdict.

    A number that was not measured is null. Later versions of schema 1 may add fields.
    """

    version: Literal[1] = Field(
        serialization_alias="schema",
        description="raised when a field is removed or changes its meaning",
    )
    verdict: Literal["pass", "fail", "undecided", "void", "unsupported"] = Field(
        description="fail also if the metric is below metric.least"
    )
    exit_code: Literal[0, 3, 4] = Field(
        description="0 pass; 3 fail; 4 undecided, void or unsupported"
    )
    use: str | None = Field(description="the requested use; null if a run was judged, not a sweep")
    because: Known = Field(
        description="why the run was chosen, or why none; if a run was judged, not a sweep, why it "
        "is unsupported or void"
    )
    choice: ChosenRun | None = Field(description="null if the sweep recommends none")
    metric: Measured | None
    loss: Loss | None
    samples: Samples | None
    size: FileSizes | None
    latency: Latency | None
    files: Files
    commands: Commands
    sweep: Sweep | None = Field(description="null if a run was judged, not a sweep")


@dataclass(frozen=True)
class Answer:
    """A verdict and its run.

    Attributes:
        run: the run; None if the sweep recommends no run for the use.
        sweep: the judged sweep; None if a run was judged.
        use: the requested use; empty without a sweep.
        because: the reason for this run, or why there is none; if it is empty, `document` has
            `RunRecord.why_none` instead.
    """

    verdict: str
    run: RunRecord | None
    sweep: SweepSummary | None = None
    use: str = ""
    because: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code of the command `verdict`; docs/verdict.md lists the codes."""
        return EXIT_CODES[self.verdict]

    @property
    def document(self) -> Document:
        """The verdict with the values of its run, for programs."""
        run = self.run
        sweep = self.sweep
        because = self.because
        files = dict.fromkeys(("artifact", "artifact_sha256", "report"))
        commands = dict.fromkeys(("deploy_command", "reproduce_command"))

        # Fill in what is known of the run and of the sweep
        if run is not None:
            because = because or run.why_none
            files |= {"artifact": run.artifact, "artifact_sha256": run.artifact_sha256}
            commands = {
                "deploy_command": run.deploy_command,
                "reproduce_command": run.reproduce_command,
            }
        if sweep is not None:
            files["report"] = sweep.report

        # Each of these parts reads its attributes of the run
        parts = dict.fromkeys(("choice", "metric", "loss", "samples", "size", "latency"), run)
        return Document.model_validate(
            {
                **parts,
                "version": 1,
                "verdict": self.verdict,
                "exit_code": self.exit_code,
                "use": self.use or None,
                "because": because,
                "files": files,
                "commands": commands,
                "sweep": _sweep(sweep),
            }
        )


def to_json(answer: Answer) -> str:
    """Return the document as JSON, in ASCII so that no name in it can control a terminal."""
    return json.dumps(answer.document.model_dump(), indent=2, allow_nan=False)


def to_schema() -> str:
    """Return the JSON schema of the document, as indented JSON."""
    schema = _without_titles(Document.model_json_schema(mode="serialization"))
    return json.dumps({"$schema": GenerateJsonSchema.schema_dialect, **schema}, indent=2) + "\n"


def _without_titles(part: Any) -> Any:
    """Return a schema without the titles that pydantic makes from names of fields and classes."""
    if isinstance(part, list):
        return [_without_titles(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = dict(part)
    if isinstance(part.get("title"), str):  # the title of a field, not a field named title
        del kept["title"]
    return {key: _without_titles(value) for key, value in kept.items()}


def _sweep(sweep: SweepSummary | None) -> dict[str, Any] | None:
    if sweep is None:
        return None
    return {
        "run_id": sweep.run_id,
        "name": sweep.name,
        "status": sweep.status,
        "runs": dict(Counter(run.status for run in sweep.runs)),
        "as_good_as_best": _as_good(sweep),
    }


def _as_good(sweep: SweepSummary) -> dict[str, Any] | None:
    """Return the values of `AsGood`; None unless one best run is recommended and has a limit."""
    # Each set of scored samples has its own best run; they are not compared with each other
    best = [choice for choice in sweep.choices if choice.use == "best"]
    if len(best) != 1:
        return None
    run = best[0].run
    if run is None or run.limit is None:
        return None
    return {
        "best": run.run_id,
        "margin": MARGIN * run.limit,
        "shown": tuple(by_run_id(best[0].equals)),
        "unknown": tuple(by_run_id(best[0].unknown)),
    }


def to_markdown(answer: Answer) -> str:
    """Return the verdict in words, a short table and the deploy command as Markdown.

    Untrusted texts are escaped.
    """
    run = answer.run
    lines = [f"**Quantization: {answer.verdict}.** {describe(answer, _escape)}", ""]
    if run is not None:
        lines += [_row(["", "FP32", _escape(run.label)]), "|---|---:|---:|"]
        measured = [cells for cells in _rows(run) if any(cells[1:])]
        lines += [*map(_row, measured), ""]
        if run.deploy_command:
            lines += [f"    {run.deploy_command}", ""]
    return templates.tidy("\n".join(lines))


def describe(answer: Answer, show: Callable[[str], str] = printable) -> str:
    """Return the verdict in a few sentences; without a measured run, the reason.

    Args:
        show: escapes untrusted texts.
    """
    run = answer.run
    if run is None:
        text = show(answer.because)
        if answer.use:
            text = f"No model is recommended for `use={answer.use}`. {text}"
        return text
    if run.metric is None or run.loss is None or run.loss_verdict is None:  # not measured
        return f"{show(run.label)}: {show(run.why_none)}"
    text = f"{show(run.label)}: {show(say_verdict(run))}"
    if answer.verdict == VOID:
        return text
    name = run.metric.loss_title.partition(",")[0]
    return f"{text} {show(name[:1].upper() + name[1:])}: {_say_loss(run.metric, run)}."


def _say_loss(metric: Metric, run: RunRecord) -> str:
    """Return the loss with its bounds as text: in points, in the metric's unit, or in percent."""
    say = metric.say_change if metric.bounded else metric.show_loss
    assert run.loss is not None
    bounds = []
    if run.loss_lower_bound is not None:
        bounds.append(f"at least {say(run.loss_lower_bound)}")
    if run.loss_upper_bound is not None:
        bounds.append(f"at most {say(run.loss_upper_bound)}")
    if not bounds:
        return say(run.loss)
    return f"{say(run.loss)} ({', '.join(bounds)}, one-sided 95% bounds)"


def _rows(run: RunRecord) -> list[list[str]]:
    metric = run.metric
    assert metric is not None  # every assessed run has one
    return [
        [_escape(metric.title), *_show(metric.show, run.fp32_value, run.value)],
        ["size, kB", *_show(show_kb, run.fp32_size_bytes, run.size_bytes)],
        ["latency of one sample, ms", *_show(show_ms, run.fp32_latency_ms, run.latency_ms)],
    ]


def _show(show: Callable[[float], str], *values: float | None) -> list[str]:
    """Return the values as cells; empty for a value that was not measured."""
    cells = []
    for value in values:
        cell = "" if value is None else show(value)
        cells.append(cell)
    return cells


def _row(cells: Sequence[str]) -> str:
    joined = " | ".join(cells)
    return f"| {joined} |"


def _escape(text: str) -> str:
    """Escape Markdown, and separate an @ from the name after it, whose owner would be notified."""
    return escape_markdown(text).replace("@", "@<!-- -->")
