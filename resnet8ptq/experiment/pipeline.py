"""The recipe of one run, from its settings to its result."""

import logging
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from resnet8ptq.backends import kernels
from resnet8ptq.backends.contract import Quantizer, Resolved, describe_execution
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.calibration import table
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import background, files, machine
from resnet8ptq.core.machine import PeakMemory
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation import latency
from resnet8ptq.evaluation.evaluator import Evaluator, Quantized, as_fp32, loader
from resnet8ptq.evaluation.latency import Latency
from resnet8ptq.evaluation.result import Measurement, RunResult
from resnet8ptq.experiment import (
    attention_report,
    file_check,
    outputs,
    preparation,
    preprocessing_check,
)
from resnet8ptq.experiment.compatibility import fit_settings, load, make_task
from resnet8ptq.experiment.ladder.properties import find_properties
from resnet8ptq.experiment.preparation import Preparation, Workspace
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import Samples, draw
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.experiment.stopping import make_plan
from resnet8ptq.graph.layers import is_grouped
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.models.summary import quantized_operators
from resnet8ptq.precision.plan import Selection, find_float_nodes
from resnet8ptq.tasks.contract import BASELINE, GROUPED, Comparison, Metrics, Task
from resnet8ptq.tasks.sequential import StoppingPlan

log = logging.getLogger(__name__)

LOW_SQNR_DB = 10.0  # the noise has a tenth of the signal's power


def run_experiment(settings: Settings, folder: Path, run: Recorder) -> RunResult:
    """Quantize, reload, evaluate, compare with the FP32 baseline, and record.

    Raises:
        UnsupportedError: the framework does not support this combination.
    """
    memory = PeakMemory()
    settings.quantizer.resolve()  # an unsupported combination is known before any work
    data, network = load(settings)
    graph = onnx.load(network.onnx_path).graph
    run.log_params(network.describe() | {"properties": ", ".join(find_properties(graph))})
    settings = fit_settings(settings, network)
    config, resolved = settings.config, settings.quantizer.resolve()
    saturates = _warn_of_saturation(resolved, graph)
    _warn_of_depthwise(config, resolved, graph)
    if config.backend.quantizes:
        attention_report.report(config, graph)
    name = f"the training samples of {data.name}"
    can_score = partial(make_task, config.task, data, network, name=name)
    samples = draw(config, data, preparation.tunes(config), can_score)
    task = make_task(config.task, data, network, samples.reported)
    described = _describe_samples(samples, task)
    run.log_params(task.describe() | described)
    run.log_datasets(samples.data, samples.calibrating, task.few_names)
    plan = make_plan(config, task, samples, GROUPED in described)
    samples = samples.as_scored(config)
    evaluator = Evaluator(network, task, settings.runtime, config.evaluate.batch_size)

    with tempfile.TemporaryDirectory() as scratch:
        work = Workspace(config, evaluator, samples, folder, Path(scratch), run)
        prepared = preparation.prepare(work)
        quantized = preparation.quantize(work, prepared, folder)
        quantizer = make_quantizer(prepared.config, settings.runtime)
        resolved = quantizer.resolve()
        params = {**resolved.to_params(), **_float_operators(prepared), **prepared.params}
        calibrating = samples.calibrating.split
        params |= quantizer.verify(quantized.artifact, prepared.network, calibrating)
        if quantized.artifact.ranges:
            made_from = preparation.provenance(work, prepared)
            table.write(folder, quantized.artifact.ranges, made_from)

    measurement = _measure(evaluator, samples, prepared, quantized, memory, plan)
    fp32 = evaluator.reference(config, samples.reported)
    doubt = preprocessing_check.check(config, evaluator, samples.data, fp32)
    if doubt is not None:
        run.log_params({"doubt": doubt})
    if config.backend.quantizes:
        _warn_of_noise(config, measurement.comparison.sqnr_db, saturates)
    elif doubt is None:
        compared = measurement.comparison
        params |= file_check.check(config, evaluator, samples.data, quantized.path, compared)
    params |= _describe_artifact(quantizer, quantized)
    params |= _describe_timing(config, samples, measurement)
    if measurement.evaluation_cached:
        log.info("the same file ran on these samples before: its outputs are from the cache")
        params["evaluation"] = "cached"
    if cut_short := settings.runtime.deadline.cut_short:
        params["cut_short"] = "; ".join(cut_short)
    result = RunResult("ok", measurement=measurement, resolved=params)
    outputs.write(folder, config, result, quantized.artifact, samples, network)
    if config.backend.quantizes:  # the inputs of others' files are their own
        run.log_model(quantized.path, _shapes(network), resolved.engine)
    return result


def _measure(
    evaluator: Evaluator,
    samples: Samples,
    prepared: Preparation,
    quantized: Quantized,
    memory: PeakMemory,
    plan: StoppingPlan | None,
) -> Measurement:
    """Reload the artifact from disk, and measure it on every role of samples."""
    config, path, reported, task = prepared.config, quantized.path, samples.reported, evaluator.task
    if plan is None:
        compared = evaluator.compare(config, path, reported)
    else:
        compared = evaluator.compare_until(config, path, reported, plan)
    comparison, evaluation, choice = compared.comparison, compared.evaluation, None
    metrics: Metrics = {
        "counts/quantized_layers": quantized.artifact.quantized_layers,
        "system/quantize_s": quantized.seconds,  # without calibration that the cache had
        "system/prepare_s": prepared.seconds,  # fine-tuning, corrections and choices
        "system/evaluate_s": evaluation.seconds,
        "system/evaluate_batch_size": evaluation.batching.batch_size,
        "system/evaluate_threads": evaluation.batching.threads * evaluation.batching.at_once,
        **prepared.metrics,
    }
    if samples.selection is not None:
        label = "Evaluating to choose"
        chosen = evaluator.compare(config, path, samples.selection, label, logits=False)
        choice, metrics["system/choose_s"] = chosen.comparison, chosen.evaluation.seconds
    if config.method == "dynamic" and config.dtype.name != "fp32":  # the batch sets its ranges
        label = "Evaluating one by one"
        seen = reported.take(np.arange(comparison.model.total)) if plan else reported
        single = evaluator.compare(config, path, seen, label, 1, logits=False).comparison
        values, names = task.metrics(single), (task.metric.name, task.metric.ranked_by)
        metrics |= {f"batch1/{name}": values.get(name) for name in names}
    if not evaluation.cached:  # before the baseline is loaded beside the model
        metrics["peak_memory_bytes"] = memory.read_bytes()
    metrics[f"{BASELINE}size_bytes"] = evaluator.baseline(config, reported).size_bytes
    metrics["paired/p_within"] = _test_limit(config, task, comparison, reported)
    metrics |= _time(evaluator, config, quantized, reported)
    size_bytes, cached = quantized.size_bytes, evaluation.cached
    return Measurement(task, comparison, size_bytes, metrics, choice, cached)


def _test_limit(
    config: RunConfig, task: Task, comparison: Comparison, samples: Split
) -> float | None:
    """Return the p-value of "the loss is at the limit or above", not corrected for other runs.

    None if it would not be valid: samples of a group count one by one, or their number was not
    fixed in advance.
    """
    stops = config.evaluate.stop != "all"
    if config.dtype.name == "fp32" or stops or _is_grouped(samples, task):
        return None
    return comparison.p_within(task.metric.limit(config.report))


def _is_grouped(samples: Split, task: Task) -> bool:
    groups = samples.groups
    return groups is not None and not task.joins_groups and len(np.unique(groups)) < len(groups)


def _time(evaluator: Evaluator, config: RunConfig, quantized: Quantized, samples: Split) -> Metrics:
    """Time the artifact and its FP32 baseline in turns; empty if disabled or not meaningful."""
    runtime = evaluator.runtime
    if (
        not config.latency.enabled
        or make_quantizer(config, runtime).resolve().execution == "simulated"
    ):
        return {}
    loads = [loader(config, runtime, quantized.path)]
    if config.dtype.name != "fp32":
        baseline = evaluator.baseline(config, samples)
        loads.append(loader(as_fp32(config), runtime, baseline.path))
    background.rest()
    return {**Latency(*latency.measure(loads, samples, config.latency)).to_metrics()}


def _describe_samples(samples: Samples, task: Task) -> dict[str, str]:
    """Return the params of grouped samples and of the selection samples."""
    params = {}
    if _is_grouped(samples.reported, task):
        params[GROUPED] = "true"
    if samples.selection is not None:
        params["chosen_by"] = f"{len(samples.selection):,} {samples.selected_from}"
    return params


def _describe_artifact(quantizer: Quantizer, quantized: Quantized) -> dict[str, str]:
    """Return the params of the file, and whether all its layers run on integer kernels."""
    params = quantized.artifact.details | {"artifact_sha256": files.sha256(quantized.path)}
    execution = quantizer.resolve().execution
    if execution == "integer":
        kernels = quantizer.count_kernels(quantized.path)
        params["execution"] = describe_execution(execution, *kernels)
    return params


def _describe_timing(
    config: RunConfig, samples: Samples, measurement: Measurement
) -> dict[str, str]:
    """Return the timed batch size as a param."""
    if "latency_batch_p50_ms" not in measurement.metrics:
        return {}
    size = latency.find_batch_size(config.latency, samples.reported)
    return {"latency_batch_size": str(size)}


def _shapes(network: Fp32Model) -> dict[str, list[int]]:
    """Return the shape of each output of a network; a free size is -1."""
    return {
        output.name: [-1 if size is None else size for size in output.shape]
        for output in network.contract.outputs
    }


def _float_operators(prepared: Preparation) -> dict[str, str]:
    """Return the network's operators that stay in float, with counts, as a param.

    They stay in float by the settings, or because the framework has no 8-bit kernel. Only reported
    with `float_tail`.
    """
    config = prepared.config
    without = config.dtype.name == "fp32" or config.method in ("dynamic", "weight_only")
    if not config.float_tail or without or not config.backend.quantizes:
        return {}
    graph = onnx.load(prepared.network.onnx_path).graph
    left = {*find_float_nodes(graph, Selection.of(config))}
    known = quantized_operators(config.backend.name)
    count = Counter(n.op_type for n in graph.node if n.name in left or n.op_type not in known)
    listed = ", ".join(f"{name} {number}" for name, number in sorted(count.items()))
    return {"float_operators": listed}


def _warn_of_saturation(resolved: Resolved, graph: onnx.GraphProto) -> bool:
    """Warn if sums may saturate in this CPU's kernels; return whether they may."""
    operators = {node.op_type for node in graph.node}
    saturates = kernels.saturates(resolved, operators, machine.cpu()[1])
    if saturates:
        log.warning(
            "this CPU has no VNNI: 16-bit sums of %s activations and %s weights may saturate, and "
            "make the outputs wrong; %s avoids it",
            *(resolved.activation_dtype, resolved.weight_dtype),
            kernels.avoid_saturation(resolved),
        )
    return saturates


def _warn_of_depthwise(config: RunConfig, resolved: Resolved, graph: onnx.GraphProto) -> None:
    """Warn if few bits shift the outputs of depthwise convolutions without a correction.

    A depthwise channel sums few products, mostly nine, so rounding errors do not average out and
    shift its mean output. In other layers they average out.
    """
    changes = config.corrections
    corrected = changes.bias_correction or changes.adaround or changes.reconstruction
    elsewhere = config.method in ("qat", "weight_only")  # trained, or in float
    if corrected or elsewhere or (resolved.weight_bits or 8) >= 8:
        return
    grouped = sum(map(is_grouped, graph.node))
    if grouped:
        log.warning(
            "%d-bit weights in %d depthwise convolutions: rounding shifts the mean of their "
            "channels, and much accuracy may be lost; corrections.bias_correction=true takes "
            "seconds, experiment=flagship learns the rounding",
            *(resolved.weight_bits, grouped),
        )


def _warn_of_noise(config: RunConfig, sqnr_db: float | None, saturates: bool) -> None:
    """Warn if the quantized network's outputs are far from FP32's."""
    if sqnr_db is not None and sqnr_db < LOW_SQNR_DB:
        finest = config.per_channel or config.method == "weight_only"
        finer = "nodes_to_exclude=auto" if finest else "per_channel=true"
        settings = "reduce_range=true" if saturates else finer
        log.warning("SQNR %.1f dB: far from FP32's outputs; %s may help", sqnr_db, settings)
