"""Measures the artifact, reloaded from disk, on reported and selection samples."""

import logging
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Nodes, Resolved, describe_execution
from resnet8ptq.backends.onnx.operators import count_kernels
from resnet8ptq.config.schema import BY_BATCH, LatencyConfig, RunConfig
from resnet8ptq.core import background
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.core.machine import PeakMemory
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation import latency
from resnet8ptq.evaluation.batching import Load
from resnet8ptq.evaluation.evaluator import Compared, Evaluator, Quantized
from resnet8ptq.evaluation.inference import Evaluation
from resnet8ptq.evaluation.latency import ModelLatency
from resnet8ptq.evaluation.result import Measurement
from resnet8ptq.evaluation.sequential import StoppingPlan
from resnet8ptq.experiment.samples import has_groups
from resnet8ptq.experiment.workspace import Prepared, Workspace
from resnet8ptq.target.measure import CPU
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.distortion import KERNELS_DB
from resnet8ptq.tasks.scoring.metric import BASELINE, Metrics
from resnet8ptq.tasks.task import Task

log = logging.getLogger(__name__)

LAYERS = "counts/quantized_layers"


def measure(
    work: Workspace,
    prepared: Prepared,
    quantized: Quantized,
    memory: PeakMemory,
    plan: StoppingPlan | None,
) -> Measurement:
    """Return the measurement of the artifact, together with its FP32 baseline.

    Args:
        memory: measures the peak memory since the run began.
        plan: the plan for an early stop; None evaluates all samples.
    """
    evaluator = work.evaluator
    samples = work.samples
    config = work.config
    path = quantized.path
    reported = samples.reported
    task = evaluator.task

    # Score the artifact on the reported samples
    if plan is None:
        compared = evaluator.compare(path, reported)
    else:
        compared = evaluator.compare_until(path, reported, plan)
    comparison = compared.comparison
    evaluation = compared.evaluation
    batching = evaluation.batching
    metrics: Metrics = {
        LAYERS: quantized.artifact.quantized_layers,
        "system/quantize_s": quantized.seconds,  # a cached calibration takes no time
        "system/prepare_s": prepared.seconds,  # the time of fine-tuning, corrections and choices
        "system/evaluate_s": evaluation.seconds,
        "system/evaluate_batch_size": batching.batch_size,
        "system/evaluate_threads": batching.threads * batching.at_once,
        **prepared.metrics,
    }

    # Score the artifact on the selection samples, and one sample at a time
    choice = None
    if samples.selection is not None:
        label = "Evaluating to choose"
        chosen = evaluator.compare(path, samples.selection, label, logits=False)
        choice = chosen.comparison
        metrics["system/choose_s"] = chosen.evaluation.seconds
    by_batch = config.method in BY_BATCH and not config.dtype.is_float
    if by_batch and batching.batch_size != 1:  # the batch determines the ranges
        label = "Evaluating one by one"
        seen = reported.take(np.arange(comparison.model.total)) if plan else reported
        single = evaluator.compare(path, seen, label, batch_size=1, logits=False).comparison
        values = task.metrics(single)
        for name in (task.metric.name, task.metric.ranked_by):
            metrics[f"batch1/{name}"] = values.get(name)
    if not evaluation.cached:  # read before the baseline is loaded too
        metrics["peak_memory_bytes"] = memory.read_bytes()

    # Add the FP32 baseline, the target and the times
    baseline = evaluator.baseline(reported)
    metrics[f"{BASELINE}size_bytes"] = baseline.size_bytes
    if evaluator.target is not None:
        metrics |= compare_machines(evaluator, path, samples=reported, there=evaluation)
    silent = find_silent(evaluator, compared, reported)
    metrics["paired/p_within"] = find_p_within(config, task, comparison, samples=reported)
    resolved = work.settings.quantizer.resolve(prepared.decisions)
    if config.latency.enabled and resolved.execution != "simulated":
        metrics |= time_beside_fp32(evaluator, timing=config.latency, path=path, samples=reported)
    return Measurement(
        task=task,
        comparison=comparison,
        size_bytes=quantized.size_bytes,
        metrics=metrics,
        choice=choice,
        evaluation_cached=evaluation.cached,
        silent=silent,
        outputs_sha256=evaluation.outputs.sha256,
    )


def find_execution(
    evaluator: Evaluator, resolved: Resolved, quantized: Quantized, samples: Split
) -> dict[str, str]:
    """Return how the layers are executed, and the nodes of each execution provider, as params.

    With the CPU's provider, there are no params for a file that is not meant for integer kernels.

    Args:
        samples: the first sample is run, if a provider or a target reports its nodes.

    Raises:
        UnsupportedError: the requested provider runs no node of the file.
    """
    quantizer = evaluator.quantizer
    path = quantized.path
    find_nodes = None
    if evaluator.target is not None or evaluator.provider != CPU:
        find_nodes = evaluator.loader(quantizer, path)(1).find_nodes
    if find_nodes is None:
        if resolved.execution != "integer":
            return {}
        kernels = quantizer.count_kernels(path)
        return {"execution": describe_execution(resolved.execution, *kernels)}

    # Run one sample to see which kernels run it
    [batch] = samples.take(np.arange(1)).batches(1)
    nodes = find_nodes(batch)
    params = _describe_providers(evaluator.provider, nodes)
    operators = sum(map(Counter, nodes.values()), Counter[str]())
    kernels = count_kernels(operators)
    if resolved.execution == "integer":
        params["execution"] = describe_execution(resolved.execution, *kernels)
        # Kernels in compiled nodes are not visible
        is_hidden = sum(kernels) < quantized.artifact.quantized_layers
        if is_hidden and evaluator.provider != CPU:
            params["execution"] = "compiled by the provider"
    return params


def _describe_providers(provider: str, nodes: Nodes) -> dict[str, str]:
    """Return a param: the number of nodes of each provider, and operators of unrequested providers.

    There is no param if the requested provider is the CPU's.

    Raises:
        UnsupportedError: the requested provider runs no node of the file.
    """
    if provider == CPU:
        return {}
    if provider not in nodes:
        raise UnsupportedError(
            f"backend.provider={provider}: it runs no node of the file; all run on "
            f"{', '.join(nodes)}"
        )
    shown = []
    for name in sorted(nodes, key=lambda name: name != provider):
        operators = ", ".join(f"{key} {count}" for key, count in sorted(nodes[name].items()))
        left = "" if name == provider else f" ({operators})"
        shown.append(f"{name} {sum(nodes[name].values())}{left}")
    return {"provider_nodes": ", ".join(shown)}


def compare_machines(
    evaluator: Evaluator, path: Path, samples: Split, there: Evaluation
) -> Metrics:
    """Return the SQNR between the outputs of the target and of this machine, and the metric here.

    The function warns if the SQNR is below `KERNELS_DB`.

    Args:
        there: the outputs of the target; the same number of samples is run here.
    """
    # Run as many samples here as there, since the target may have stopped early
    local = replace(evaluator, target=None)
    task = evaluator.task
    seen = samples.take(np.arange(len(there.outputs)))
    here = local.compare(path, seen, "Evaluating here", logits=False)

    # Rounding in other kernels explains small differences, but not larger ones
    sqnr_db = distortion.sqnr_or_infinity(_without_masks(here.evaluation), _without_masks(there))
    if sqnr_db < KERNELS_DB:
        log.warning(
            "target.command: the same file gives other outputs there (SQNR %.1f dB against this "
            "machine); %s here is %s",
            sqnr_db,
            task.metric.title,
            task.metric.show(here.comparison.model.value),
        )
    return {
        "target/sqnr_db": sqnr_db if math.isfinite(sqnr_db) else None,
        f"target/here_{task.metric.name}": here.comparison.model.value,
    }


def _without_masks(evaluation: Evaluation) -> list[NDArray[Any]]:
    """Return the outputs that are numbers, without masks, which are texts."""
    return [values for values in evaluation.outputs.values if values.dtype.kind != "S"]


def find_silent(evaluator: Evaluator, compared: Compared, samples: Split) -> str:
    """Return a sentence on a silent output, see `Scope.find_silent`; empty if there is none."""
    outputs = compared.evaluation.outputs
    names = [output.name for output in evaluator.network.contract.outputs]
    fp32 = evaluator.baseline(samples).outputs.first(len(outputs))
    return evaluator.task.scope.find_silent(names, outputs, fp32)


def find_p_within(
    config: RunConfig, task: Task, comparison: Comparison, samples: Split
) -> float | None:
    """Return the p-value of "the loss is at the limit or above", not corrected for other runs.

    The result is None for FP32. It is also None where the p-value may not be valid: if samples of a
    group are scored separately, or with `evaluate.stop=decided`.
    """
    stops = config.evaluate.stop != "all"
    if config.dtype.is_fp32 or stops or has_groups(samples, task):
        return None
    return comparison.p_within(task.metric.limit(config.report))


def time_beside_fp32(
    evaluator: Evaluator, timing: LatencyConfig, path: Path, samples: Split
) -> Metrics:
    """Return the latencies of the artifact and of its FP32 baseline, timed in turns.

    An artifact of `dtype=fp32` is timed alone.
    """
    quantizer = evaluator.quantizer
    loads: list[Load] = [evaluator.loader(quantizer, path)]
    if not quantizer.config.dtype.is_fp32:
        baseline = evaluator.baseline(samples)
        loads.append(evaluator.loader(evaluator.fp32_quantizer, baseline.path))
    background.wait_until_idle()
    return {**ModelLatency(*latency.measure(loads, samples, timing)).to_metrics()}
