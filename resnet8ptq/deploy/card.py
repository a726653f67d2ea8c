"""Writes the model card, `README.md`: metadata for the Hugging Face Hub, then Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from resnet8ptq.core import files, templates
from resnet8ptq.core.records import names_of
from resnet8ptq.core.text import printable
from resnet8ptq.deploy import example
from resnet8ptq.deploy.interface import Interface
from resnet8ptq.deploy.source import Source
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.report import table
from resnet8ptq.tasks.contract import BASELINE, Task
from resnet8ptq.tracking.record import RunRecord

FILE = "README.md"
_SETTINGS = (
    *("backend", "dtype", "calib", "method", "per_channel", "format", "float_output", "slim"),
    *("reduce_range", "op_types", "nodes_to_quantize", "nodes_to_exclude"),
    *(f"corrections.{name}" for name in ("smooth_quant", "equalization", "bias_correction")),
    *("corrections.adaround", "corrections.reconstruction"),
)
_IN_BLOCKS = (
    *(f"weight_only.{name}" for name in ("block_size", "algorithm", "int8_products")),
    "symmetric.weights",
)
_KINDS = {"classification": "image-classification", "detection": "object-detection"}


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


def render(source: Source, model: Path, facts: Facts) -> str:
    """Return the card of a model file."""
    record, vectors = source.record, facts.vectors
    task = record.task
    name = _name(source)
    keys = _SETTINGS + (_IN_BLOCKS if record.combination.method == "weight_only" else ())
    settings = dict(zip(keys, record.settings(*keys), strict=True))
    settings["precision.plan"] = record.planned_bits
    text = templates.load("resnet8ptq.deploy", "README.md.j2").render(
        header=_header(source, task, name, names_of(vectors.inputs.dtype)),
        name=name,
        file=model.name,
        library=source.backend.runtime,
        summary=_summary(source, task),
        cautions=source.cautions,
        verified=[printable(line) for line in facts.verified.splitlines()],
        vectors=vectors,
        steps=example.steps(vectors),
        pictures=example.reads_pictures(source, vectors),
        texts=example.reads_texts(source),
        measured=_measured(task, record),
        test=task.test,
        record=record,
        config=source.config,
        settings=" ".join(
            f"{k}={v}" for k, v in settings.items() if v not in (None, "", "null", "[]", "{}")
        ),
        sha256=files.sha256(model),
        names=names_of(vectors.inputs.dtype),
        request=_request(vectors),
        answer=", ".join(f'"{printable(o.name)}": [...]' for o in facts.interface.outputs),
        facts=facts,
    )
    return templates.tidy(text)


def _request(vectors: Vectors) -> str:
    """Return the inputs of a request as JSON, with dots in place of the values."""
    names = names_of(vectors.inputs.dtype)
    if not names:
        return f"[ ...{list(vectors.inputs.shape[1:])}... ]"
    listed = (f'"{printable(n)}": [ ...{list(vectors.inputs.dtype[n].shape)}... ]' for n in names)
    return f"{{{', '.join(listed)}}}"


def _name(source: Source) -> str:
    return f"{source.config.model.name} {source.record.backend} {source.record.dtype}".strip()


def _summary(source: Source, task: Task) -> str:
    record = source.record
    value = record.value(task.metric)
    shown = "" if value is None else f"; {task.metric.title} {task.metric.show(value)}"
    use = f"; recommended for use={source.use}" if source.use else ""
    weights, activations = record.settings("weight_dtype", "activation_dtype")
    dtypes = f"{weights or 'float32'} weights, {activations or 'float32'} activations"
    return f"{source.config.model.name} quantized after training, {dtypes}{shown}{use}"


def _header(source: Source, task: Task, name: str, inputs: Sequence[str]) -> str:
    """Return the metadata as YAML, with comments at the fields to fill in."""
    record, metric = source.record, task.metric
    kind = _KINDS.get(task.name, "other")
    if "input_ids" in inputs:
        kind = "text-classification" if task.name == "classification" else "other"
    values = [
        {"type": key, "name": title, "value": value}
        for key, title, value in (
            (metric.name, metric.title, record.value(metric)),
            ("delta", f"{metric.title} minus FP32's", record.delta(metric)),
        )
        if value is not None
    ]
    dataset = {"name": source.config.data.name, "type": source.config.data.name}
    results = [{"task": {"type": kind}, "dataset": dataset, "metrics": values}]
    known: dict[str, Any] = {
        "library_name": source.backend.runtime,
        "tags": ["quantization", "post-training-quantization", record.dtype],
        "metrics": [metric.name],
        "model-index": [{"name": name, "results": results}],
    }
    if kind != "other":
        known["pipeline_tag"] = kind
    empty = "license: # to fill in, such as apache-2.0\nlicense_link: # to fill in\n"
    empty += "datasets: # to fill in: names on the Hub\n"
    return empty + yaml.safe_dump(known, sort_keys=False)


def _measured(task: Task, record: RunRecord) -> list[tuple[str, str, str]]:
    primary, rows = task.metric, []
    for metric in (primary, *task.beside):
        value, baseline = record.value(metric), record.value(metric, BASELINE)
        if value is not None:
            shown = metric.show(value)
            if metric is primary and (interval := record.interval("value")):
                shown += f" ({' to '.join(map(metric.show, interval))})"
            rows.append((metric.title, shown, "" if baseline is None else metric.show(baseline)))
    if (delta := record.delta(primary)) is not None:
        ends = table.show_interval(primary, record)
        shown = primary.say_change(delta) + (f" ({ends})" if ends else "")
        rows.append(("difference from FP32 (95% interval)", shown, ""))
    if record.p_value is not None:
        rows.append(("p of the difference", f"{record.p_value:.3g}", ""))
    for title, value, baseline, unit in (
        ("size, kB", record.size_bytes, record.baseline_size_bytes, 1000),
        ("latency of one sample, ms", record.latency_ms, record.baseline_latency_ms, 1),
    ):
        if value is not None:
            rows.append((title, _short(value / unit), _short((baseline or 0) / unit)))
    return rows


def _short(value: float) -> str:
    return f"{value:.3f}".rstrip("0") if value else ""
