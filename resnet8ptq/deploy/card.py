"""The model card, `README.md`: Markdown below metadata, as the Hugging Face Hub reads it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from resnet8ptq.core import files
from resnet8ptq.core.text import printable
from resnet8ptq.deploy import example
from resnet8ptq.deploy.interface import Interface
from resnet8ptq.deploy.source import Source
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.report import table
from resnet8ptq.tasks.contract import Metric, Task

FILE = "README.md"
_SETTINGS = (
    *("backend", "dtype", "calib", "method", "per_channel", "format", "float_output", "slim"),
    *("reduce_range", "op_types", "nodes_to_quantize", "nodes_to_exclude"),
    *("corrections.equalization", "corrections.bias_correction", "corrections.adaround"),
    "corrections.reconstruction",
)
_KINDS = {"classification": "image-classification", "detection": "object-detection"}


@dataclass(frozen=True)
class Facts:
    """What the command has found, besides what the run has logged.

    Attributes:
        reproduced: what came of running the artifact again.
        verified: what the example printed in its fresh environment; empty where it was not run.
        registered: URI in MLflow's registry; empty where it was not registered.
        microcontroller: figures of `microcontroller.write`; empty for other formats.
        change: what made another file of the artifact; empty where it is the artifact.
    """

    interface: Interface
    vectors: Vectors
    reproduced: str
    verified: str = ""
    registered: str = ""
    microcontroller: Mapping[str, str] | None = None
    change: str = ""


def render(source: Source, model: Path, facts: Facts) -> str:
    """Return the card of a model file."""
    record, vectors = source.record, facts.vectors
    task = table.task_of([record])
    environment = Environment(
        loader=PackageLoader("resnet8ptq.deploy"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown: the filter `md` escapes
    )
    environment.filters["md"] = _escape
    name = _name(source)
    settings = {key: record.params.get(key, "null") for key in _SETTINGS}
    settings["precision.plan"] = record.params.get("planned_bits", "null")
    text = environment.get_template("README.md.j2").render(
        header=_header(source, task, name),
        name=name,
        file=model.name,
        library=example.library_of(model.suffix),
        served_by=example.library_of(source.artifact.suffix),
        summary=_summary(source, task),
        cautions=source.cautions,
        verified=[printable(line) for line in facts.verified.splitlines()],
        count=len(vectors.samples),
        known=vectors.samples is not vectors.inputs,
        taken=facts.interface.taken,
        given=facts.interface.given,
        sample_shape=str(list(vectors.samples.shape[1:])),
        sample_dtype=vectors.samples.dtype.name,
        input_shape=str(list(vectors.inputs.shape[1:])),
        steps=example.steps(vectors),
        picture=example.reads_pictures(source, vectors),
        classes=table.parse_names(record.tags.get("class_names")),
        measured=_measured(task, record.metrics),
        method=f"Intervals: {task.test.intervals}. p of the difference: {task.test.name}.",
        reproduced=f"Run again before this folder was written: {facts.reproduced}.",
        data=_data(source),
        calibration=_calibration(source),
        machine=", ".join(record.tags.get(key, "not known") for key in ("cpu", "platform")),
        settings=" ".join(
            f"{key}={value}" for key, value in settings.items() if value not in ("null", "[]", "{}")
        ),
        run_id=record.run_id,
        sha256=files.sha256(model),
        change=facts.change,
        registered=facts.registered,
        answer=", ".join(f'"{printable(each.name)}": [...]' for each in facts.interface.given),
        microcontroller=facts.microcontroller,
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _name(source: Source) -> str:
    network, params = source.config.model.name, source.record.params
    return f"{network} {params.get('backend', '')} {params.get('dtype', '')}".strip()


def _summary(source: Source, task: Task) -> str:
    record = source.record
    value = record.metrics.get(task.metric.name)
    shown = "" if value is None else f"; {task.metric.title} {task.metric.show(value)}"
    use = f"; recommended for use={source.use}" if source.use else ""
    weights, activations = (
        record.params.get(f"{kind}_dtype", "float32") for kind in ("weight", "activation")
    )
    dtypes = f"{weights} weights, {activations} activations"
    return f"{source.config.model.name} quantized after training, {dtypes}{shown}{use}"


def _header(source: Source, task: Task, name: str) -> str:
    """Return the metadata as YAML; what is to be filled in is left empty, with a comment."""
    record, metric = source.record, task.metric
    kind = _KINDS.get(task.name, "other")
    values = [
        {"type": key, "name": title, "value": record.metrics[key]}
        for key, title in ((metric.name, metric.title), ("delta", f"{metric.title} minus FP32's"))
        if key in record.metrics
    ]
    dataset = {"name": source.config.data.name, "type": source.config.data.name}
    results = [{"task": {"type": kind}, "dataset": dataset, "metrics": values}]
    known: dict[str, Any] = {
        "library_name": example.library_of(source.artifact.suffix),
        "tags": ["quantization", "post-training-quantization", record.params.get("dtype", "")],
        "metrics": [metric.name],
        "model-index": [{"name": name, "results": results}],
    }
    if kind != "other":
        known["pipeline_tag"] = kind
    empty = "license: # to be filled in, such as apache-2.0\nlicense_link: # to be filled in\n"
    empty += "datasets: # to be filled in: names on the Hub\n"
    return empty + yaml.safe_dump(known, sort_keys=False)


def _measured(task: Task, metrics: Mapping[str, float]) -> list[tuple[str, str, str]]:
    metric = task.metric
    rows = []
    for each in (metric, *task.beside):
        if each.name in metrics:
            baseline = metrics.get(f"baseline_{each.name}")
            rows.append(
                (
                    each.title,
                    _with_interval(metric, each, metrics),
                    "" if baseline is None else each.show(baseline),
                )
            )
    if "delta" in metrics:
        interval = table.show_interval(metric, metrics)
        shown = metric.say_change(metrics["delta"]) + (f" ({interval})" if interval else "")
        rows.append(("difference from FP32 (95% interval)", shown, ""))
    if "p_value" in metrics:
        rows.append(("p of the difference", f"{metrics['p_value']:.3g}", ""))
    for title, name, digits in (
        ("size, kB", "size_bytes", 1000),
        ("latency of one sample, ms", "latency_p50_ms", 1),
    ):
        if name in metrics:
            baseline = metrics.get(f"baseline_{name}")
            shown_baseline = "" if baseline is None else f"{baseline / digits:.3f}".rstrip("0")
            rows.append((title, f"{metrics[name] / digits:.3f}".rstrip("0"), shown_baseline))
    return rows


def _with_interval(primary: Metric, metric: Metric, metrics: Mapping[str, float]) -> str:
    shown = metric.show(metrics[metric.name])
    ends = [metrics.get(f"ci95_{end}") for end in ("low", "high")]
    if metric is not primary or None in ends:
        return shown
    low, high = (metric.show(end) for end in ends if end is not None)
    return f"{shown} ({low} to {high})"


def _data(source: Source) -> str:
    record, config = source.record, source.config
    total, digest = record.metrics.get("total"), record.tags.get("test_digest", "")
    count = "" if total is None else f", {total:g} samples scored"
    return f"{record.params.get('dataset', config.data.name)}{count} (digest {digest[:12]})"


def _calibration(source: Source) -> str:
    record, config = source.record, source.config
    if config.dtype.name == "fp32" or config.method == "dynamic":
        return "none"
    count = record.params.get("calibration_samples", "not known")
    digest = record.tags.get("calibration_digest", "not known")
    return (
        f"{config.calib.name}, samples: {count}, seed {config.seed} (digest of their places "
        f"{digest[:12]})"
    )


def _escape(text: object) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~!&])", r"\\\1", printable(str(text)))
