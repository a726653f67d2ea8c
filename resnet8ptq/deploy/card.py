"""Renders the model card, `README.md`: metadata for the Hugging Face Hub, then Markdown."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from resnet8ptq.config.loading import find_paths
from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.core import files, invocation, templates
from resnet8ptq.core.records import names_of
from resnet8ptq.core.text import printable
from resnet8ptq.deploy import example
from resnet8ptq.deploy.interface import Interface
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.report import table
from resnet8ptq.tasks.scoring.metric import BASELINE
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking import params
from resnet8ptq.tracking.record import RunRecord

FILE = "README.md"
DIGITS = 6  # decimals of a metric; further ones of a difference are rounding errors
_SETTINGS = (
    "backend",
    "dtype",
    "calib",
    "method",
    "per_channel",
    "format",
    "float_output",
    "slim",
    "reduce_range",
    "op_types",
    "nodes_to_quantize",
    "nodes_to_exclude",
    "corrections.smooth_quant",
    "corrections.equalization",
    "corrections.bias_correction",
    "corrections.adaround",
    "corrections.reconstruction",
)
_IN_BLOCKS = (
    "weight_only.block_size",
    "weight_only.algorithm",
    "weight_only.int8_products",
    "symmetric.weights",
)
# The parts of the config that decide the file. The card names their other settings, such as
# `backend.flow`, if they differ from the defaults, so that a run with the card's settings makes the
# same file
_QUANTIZING = {*(field.name for field in fields(QuantizationConfig)), "qat"}
_KINDS = {
    "classification": "image-classification",
    "detection": "object-detection",
    "keypoints": "keypoint-detection",
    "instance_segmentation": "image-segmentation",
    "segmentation": "image-segmentation",
    "perplexity": "text-generation",
}
_KINDS_OF_TEXTS = {
    "classification": "text-classification",
    "tokens": "token-classification",
    "perplexity": "text-generation",
}


@dataclass(frozen=True)
class Facts:
    """Facts from the deploy command, in addition to the logged facts of the run."""

    interface: Interface
    vectors: Vectors
    reproduced: str  # the result of running the artifact again, in a sentence
    verified: str = ""  # output of the example in its fresh environment; empty if it was not run
    registered: str = ""  # URI in MLflow's registry, if any
    microcontroller: Mapping[str, str] | None = None  # figures, for .tflite files
    change: str = ""  # the conversion of the artifact, if any


def render_card(source: SourceRun, model: Path, facts: Facts) -> str:
    """Return the card of a model file as Markdown.

    Args:
        model: path of the file in the deployed folder.
    """
    record = source.record
    vectors = facts.vectors
    task = record.task
    name = _name(source)

    # Samples of several inputs are records, with a field for each input
    names = names_of(vectors.inputs.dtype)
    first = ""
    if names:
        first = f"inputs[{_quote(names[0])}]"
    verified = [printable(line) for line in facts.verified.splitlines()]
    outputs = [output.name for output in facts.interface.outputs]
    text = templates.load("resnet8ptq.deploy", "README.md.j2").render(
        header=_header(source, task, name, inputs=names),
        name=name,
        file=model.name,
        library=source.backend.runtime,
        summary=_summary(source, task),
        cautions=source.cautions,
        verified=verified,
        vectors=vectors,
        steps=example.steps(vectors),
        pictures=example.reads_pictures(vectors),
        texts=example.reads_texts(source),
        measured=_measured(task, record, model.stat().st_size),
        test=task.test,
        record=record,
        config=source.config,
        settings=_say_settings(record, find_paths(source.config)),
        sha256=files.sha256(model),
        names=names,
        first=first,
        serve=serve_command(facts.registered or "models:/NAME@recommended"),
        register=invocation.shell(
            "resnet8ptq", "deploy", f"run_id={record.run_id}", "register=NAME"
        ),
        request=request_command(vectors),
        answer=_answer(outputs),
        facts=facts,
    )
    return templates.tidy(text)


def _say_settings(record: RunRecord, paths: Collection[str]) -> str:
    """Return the settings that make the file, as `key=value` words, without unset ones.

    Args:
        paths: keys of paths, which are left out because they belong to the author's machine.
    """
    keys: tuple[str, ...] = _SETTINGS
    if record.combination.method == "weight_only":
        keys += _IN_BLOCKS
    settings = dict(zip(keys, record.select(*keys), strict=True))
    settings["precision.plan"] = record.planned_bits
    for key, value in params.find_changed(record.params).items():
        if key.partition(".")[0] in _QUANTIZING and key not in paths:
            settings.setdefault(key, value)
    unset = (None, "", "null", "[]", "{}")
    return " ".join(f"{key}={value}" for key, value in settings.items() if value not in unset)


def serve_command(uri: str, **variables: str) -> str:
    """Return the command that serves a registered model.

    Args:
        variables: environment variables of the command.
    """
    words = ("mlflow", "models", "serve", "-m", uri, "--env-manager", "local", "-p", "5001")
    return invocation.shell(*words, **variables)


def request_command(vectors: Vectors) -> str:
    """Return the command that sends a request, with dots in place of the values."""
    dtype = vectors.inputs.dtype
    inputs = f"[ ...{list(vectors.inputs.shape[1:])}... ]"
    if names_of(dtype):
        listed = []
        for name in names_of(dtype):
            listed.append(f"{_quote(name)}: [ ...{list(dtype[name].shape)}... ]")
        inputs = "{" + ", ".join(listed) + "}"
    address = "http://127.0.0.1:5001/invocations"
    kind = "Content-Type: application/json"
    return invocation.shell("curl", address, "-H", kind, "-d", f'{{"inputs": {inputs}}}')


def _answer(outputs: Sequence[str]) -> str:
    """Return a served model's answer to a request, with dots in place of the values."""
    listed = ", ".join(f"{_quote(name)}: [...]" for name in outputs)
    return f'{{"predictions": {{{listed}}}}}'


def _quote(name: str) -> str:
    """Return the name of an input or output as a JSON string, which Python reads too."""
    return json.dumps(printable(name), ensure_ascii=False)


def _name(source: SourceRun) -> str:
    return f"{source.config.model.name} {source.record.backend} {source.record.dtype}".strip()


def _summary(source: SourceRun, task: Task) -> str:
    record = source.record
    weights, activations = record.select("weight_dtype", "activation_dtype")
    dtypes = f"{weights or 'float32'} weights, {activations or 'float32'} activations"
    summary = f"{source.config.model.name} {_say_how(record)}, {dtypes}"
    value = record.value_of(task.metric)
    if value is not None:
        summary += f"; {task.metric.title} {task.metric.show(value)}"
    if source.use:
        summary += f"; recommended for use={source.use}"
    return summary


def _say_how(record: RunRecord) -> str:
    """Return in words whether and how the model was quantized."""
    if not record.quantized:
        return "in FP32, not quantized"
    if record.combination.method == "qat":
        return "quantized with fine-tuning"
    return "quantized after training"


def _tags(record: RunRecord) -> list[str]:
    """Return tags for the Hub: the dtype, and how the model was quantized, if it was."""
    if not record.quantized:
        return [record.dtype]
    if record.combination.method == "qat":
        return ["quantization", "quantization-aware-training", record.dtype]
    return ["quantization", "post-training-quantization", record.dtype]


def _header(source: SourceRun, task: Task, name: str, inputs: Sequence[str]) -> str:
    """Return the metadata as YAML, with comments at the fields to fill in."""
    record = source.record
    metric = task.metric
    kind = _KINDS.get(task.name, "other")
    if "input_ids" in inputs:
        kind = _KINDS_OF_TEXTS.get(task.name, "other")

    # The result in the form of the Hub's model index
    values = []
    value = record.value_of(metric)
    if value is not None:
        values.append({"type": metric.name, "name": metric.title, "value": round(value, DIGITS)})
    delta = record.delta(metric)
    if delta is not None:
        title = f"{metric.title} minus FP32's"
        values.append({"type": "delta", "name": title, "value": round(delta, DIGITS)})
    named = record.dataset or source.config.data.name
    dataset = {"name": named, "type": named}
    results = [{"task": {"type": kind}, "dataset": dataset, "metrics": values}]
    known: dict[str, Any] = {
        "library_name": source.backend.runtime,
        "tags": _tags(record),
        "metrics": [metric.name],
        "model-index": [{"name": name, "results": results}],
    }
    if kind != "other":
        known["pipeline_tag"] = kind

    # Only a person knows the license and the names on the Hub
    empty = "license: # to fill in, such as apache-2.0\nlicense_link: # to fill in\n"
    empty += "datasets: # to fill in: names on the Hub\n"
    return empty + _to_yaml(known)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes texts that would begin HTML or code where the metadata are shown as Markdown."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if _LIVE.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_LIVE = re.compile("[<`]")
_Dumper.add_representer(str, _represent_text)


def _to_yaml(values: Mapping[str, Any]) -> str:
    """Return values as YAML that is also harmless as Markdown."""
    text = yaml.dump(values, Dumper=_Dumper, sort_keys=False)
    return _LIVE.sub(lambda sign: f"\\x{ord(sign[0]):02x}", text)  # only quoted texts hold them


def _measured(task: Task, record: RunRecord, size: int) -> list[tuple[str, str, str]]:
    """Return the rows of the card's table: a title, the value of this model and that of FP32.

    Args:
        size: bytes of the model's file, which may be converted from the measured one.
    """
    primary = task.metric
    interval = record.interval("value")
    rows = []
    for metric in (primary, *task.beside):
        value = record.value_of(metric)
        if value is None:
            continue
        shown = metric.show(value)
        if metric is primary and interval:
            shown += f" ({' to '.join(map(metric.show, interval))})"
        baseline = record.value_of(metric, BASELINE)
        shown_baseline = "" if baseline is None else metric.show(baseline)
        rows.append((metric.title, shown, shown_baseline))

    # Add the difference from FP32
    delta = record.delta(primary)
    if delta is not None:
        ends = table.show_interval(primary, record)
        shown = primary.say_change(delta)
        if ends:
            shown += f" ({ends})"
        rows.append(("difference from FP32 (95% interval)", shown, ""))
    here = record.metrics.get(f"target/here_{primary.name}")
    if here is not None:
        rows.append((f"{primary.title} on the machine of the run", primary.show(here), ""))
    if record.p_alone is not None:
        rows.append(("p of the difference", f"{record.p_alone:.3g}", ""))

    # Add size and latencies
    for title, value, baseline, unit in (
        ("size, kB", size, record.fp32_size_bytes, 1000),
        ("latency of one sample, ms", record.latency_ms, record.fp32_latency_ms, 1),
    ):
        if value is not None:
            rows.append((title, _short(value / unit), _short((baseline or 0) / unit)))
    return rows


def _short(value: float) -> str:
    if not value:
        return ""
    return f"{value:.3f}".rstrip("0").rstrip(".")
