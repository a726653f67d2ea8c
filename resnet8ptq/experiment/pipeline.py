"""One run, from its config to its result: the recipe."""

import logging
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from resnet8ptq.backends import kernels
from resnet8ptq.backends.contract import Resolved
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.calibration import table
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import background, cache, files, machine
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.core.machine import PeakMemory
from resnet8ptq.data import locate
from resnet8ptq.data.sampling import choose_scored, draw_calibration, draw_held_out
from resnet8ptq.evaluation import latency
from resnet8ptq.evaluation.baseline import load_baseline
from resnet8ptq.evaluation.evaluate import targets_of, with_logits
from resnet8ptq.evaluation.latency import Latency
from resnet8ptq.evaluation.result import Measurement, RunResult
from resnet8ptq.evaluation.trial import Bench, as_fp32
from resnet8ptq.experiment import choice, mlperf_tiny, outputs, preparation, preprocessing_check
from resnet8ptq.experiment.compatibility import fit_settings, load, settle_task
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.graph.layers import attribute
from resnet8ptq.models.inspection import quantized_operators
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.selection import Selection, find_float_nodes
from resnet8ptq.tasks.contract import GROUPED

log = logging.getLogger(__name__)

LOW_SQNR_DB = 10.0  # the noise has a tenth of the signal's power


def run_experiment(config: RunConfig, folder: Path, run: Recorder) -> RunResult:
    """Quantize, reload, evaluate, compare with the FP32 baseline, and record.

    Args:
        config: what to run.
        folder: the run's own folder, existing; all its files land there.
        run: the open MLflow run that records it.

    Returns:
        The result; a combination the framework cannot do comes back as `unsupported`.

    Raises:
        PtqError: anything that went wrong, in one line.
    """
    try:
        return _run_experiment(config, folder, run)
    except UnsupportedError as reason:
        result = RunResult("unsupported", str(reason))
        run.log_config(config)
        run.log_result(result)
        return result


def _run_experiment(config: RunConfig, folder: Path, run: Recorder) -> RunResult:
    config = mlperf_tiny.settle(config)
    runtime = cache.runtime(config.cache_dir, config.threads)
    # An unsupported combination is known before any work.
    make_quantizer(config, runtime).resolve()
    memory = PeakMemory()
    config = replace(config, data=locate.settle(config.data))
    run.log_config(config)
    dataset, fp32 = load(config, runtime.cache_root)
    run.log_params(fp32.describe())
    config = fit_settings(config, runtime, fp32)
    resolved = make_quantizer(config, runtime).resolve()
    _warn_of_saturation(resolved, fp32)
    _warn_of_depthwise(config, resolved, fp32)
    scored = choose_scored(dataset, config.evaluate.split, config.held_out_images)
    task = settle_task(config.task, dataset, scored.test, fp32)
    run.log_params(task.describe())
    taken = [] if scored is dataset else [scored.test]
    held_out = None
    if preparation.chooses(config):
        held_out = draw_held_out(dataset, config.held_out_images, taken)
        taken.append(held_out)
    calibration = draw_calibration(dataset, config.calib.samples_per_class, config.seed, taken)
    scored, chosen_by = choice.part(config, scored, calibration.split, held_out, fp32)
    run.log_datasets(scored, calibration, task.few_names)
    groups = scored.test.groups
    if groups is not None and not task.joins_groups and len(np.unique(groups)) < len(groups):
        run.log_params({GROUPED: "true"})
    if chosen_by is not None:
        kind = "of the test samples" if scored.test is not dataset.test else "training samples"
        run.log_params({"chosen_by": f"{len(chosen_by)} {kind}"})
    bench = Bench(fp32.sha256, runtime, config.evaluate.batch_size, fp32.final, task.reduction)

    with tempfile.TemporaryDirectory() as scratch:
        prepared = preparation.prepare(
            config, bench, fp32, scored, calibration, held_out, folder, Path(scratch), run
        )
        resolved = make_quantizer(prepared.config, runtime).resolve()  # its choices are made
        # What is measured is what lies on the disk.
        trial = bench.run(
            prepared.config,
            prepared.network,
            calibration.split,
            scored.test,
            folder,
            prepared.ranges,
        )
    artifact, evaluation = trial.artifact, trial.evaluation
    if artifact.ranges:
        table.write(folder, artifact.ranges, prepared.provenance)
    pace = evaluation.pace
    targets = targets_of(scored.test)
    scores = task.score(with_logits(evaluation, scored.test), targets)
    baseline = load_baseline(bench, config, fp32, scored.test)
    reference = task.score(baseline.outputs, targets)
    apart, choose_s = None, None
    if chosen_by is not None:
        found = bench.evaluate(prepared.config, artifact.path, chosen_by, "Evaluating to choose")
        yardstick = load_baseline(bench, config, fp32, chosen_by).outputs
        known = targets_of(chosen_by)
        apart = task.compare(task.score(found.outputs, known), task.score(yardstick, known))
        choose_s = found.seconds
    single = None
    if config.method == "dynamic" and config.dtype.name != "fp32":
        label = "Evaluating one by one"
        alone = bench.evaluate(prepared.config, artifact.path, scored.test, label, 1).outputs
        single = task.compare(task.score(alone, targets), reference)
    peak_memory_bytes = memory.read_bytes()  # before the baseline is loaded beside the model
    doubt = preprocessing_check.check(config, task, scored, fp32, reference, runtime.threads)
    if doubt is not None:
        run.log_params({"doubt": doubt})
    timed = None
    if config.latency.enabled and resolved.execution != "simulated":
        loads = [bench.loader(config, artifact.path)]
        if config.dtype.name != "fp32":
            loads.append(bench.loader(as_fp32(config), baseline.path))
        background.rest()
        timed = Latency(*latency.measure(loads, scored.test, config.latency))

    measurement = Measurement(
        task=task,
        comparison=task.compare(scores, reference),
        images=len(scored.test),
        size_bytes=artifact.size_bytes,
        baseline_size_bytes=baseline.size_bytes,
        quantized_layers=artifact.quantized_layers,
        quantize_s=trial.quantize_s,
        evaluate_s=evaluation.seconds,
        evaluate_batch_size=pace.batch_size,
        evaluate_threads=pace.threads * pace.at_once,
        peak_memory_bytes=peak_memory_bytes,
        latency=timed,
        single=single,
        choice=apart,
        choose_s=choose_s,
        preparation=prepared.metrics,
        prepare_s=prepared.seconds,
    )
    params = resolved.to_params() | prepared.params | artifact.details
    params["artifact_sha256"] = files.sha256(artifact.path)
    if timed is not None and timed.model.batch_ms is not None:
        params["latency_batch_size"] = str(latency.find_batch_size(config.latency, scored.test))
    if config.float_tail and config.dtype.name != "fp32" and config.method != "dynamic":
        params["float_operators"] = _float_operators(prepared)
    result = RunResult("ok", measurement=measurement, resolved=params)
    _warn_of_noise(config, measurement.comparison.sqnr_db)
    example = scored.test.inputs(slice(1))
    outputs.write(folder, config, result, artifact, calibration, fp32, example)
    run.log_model(artifact.path, _shapes(fp32), resolved.engine)
    run.log_result(result)
    return result


def _shapes(fp32: Fp32Model) -> dict[str, list[int]]:
    """Return the shape of each of a network's outputs; -1 where a size is free."""
    return {
        output.name: [-1 if size is None else size for size in output.shape]
        for output in fp32.contract.outputs
    }


def _float_operators(prepared: preparation.Preparation) -> str:
    """Return the operators of the network that stay in float, with their number.

    By the settings, or because the framework has no 8-bit kernel for them.
    """
    config, graph = prepared.config, onnx.load(prepared.network.onnx_path).graph
    left = {*find_float_nodes(graph, Selection.of(config))}
    known = quantized_operators(config.backend.name)
    count = Counter(n.op_type for n in graph.node if n.name in left or n.op_type not in known)
    return ", ".join(f"{name} {number}" for name, number in sorted(count.items()))


def _warn_of_saturation(resolved: Resolved, fp32: Fp32Model) -> None:
    """Warn where this CPU's kernels may compute something else than the quantized network says."""
    operators = {node.op_type for node in onnx.load(fp32.onnx_path).graph.node}
    if kernels.saturates(resolved, operators, machine.cpu()[1]):
        log.warning(
            "this CPU has no VNNI: 16-bit sums of %s activations and %s weights may saturate, and "
            "make the outputs wrong; %s avoids it",
            *(resolved.activation_dtype, resolved.weight_dtype),
            kernels.avoid_saturation(resolved),
        )


def _warn_of_depthwise(config: RunConfig, resolved: Resolved, fp32: Fp32Model) -> None:
    """Warn where few bits shift the outputs of depthwise convolutions, and nothing corrects them.

    A channel sums few products there, nine mostly, so that rounding errors do not average out: its
    mean output moves. In wider layers they do.
    """
    changes = config.corrections
    corrected = changes.bias_correction or changes.adaround or changes.reconstruction
    if corrected or config.method == "qat" or (resolved.weight_bits or 8) >= 8:
        return
    nodes = onnx.load(fp32.onnx_path).graph.node
    grouped = sum(node.op_type == "Conv" and attribute(node, "group", 1) > 1 for node in nodes)
    if grouped:
        log.warning(
            "%d-bit weights in %d depthwise convolutions: rounding shifts the mean of their "
            "channels, and much accuracy may be lost; corrections.bias_correction=true takes "
            "seconds, experiment=flagship learns the rounding",
            *(resolved.weight_bits, grouped),
        )


def _warn_of_noise(config: RunConfig, sqnr_db: float | None) -> None:
    """Warn where the quantized network's outputs are far from FP32's, whatever it is scored by."""
    if sqnr_db is not None and sqnr_db < LOW_SQNR_DB:
        settings = "nodes_to_exclude=auto" if config.per_channel else "per_channel=true"
        log.warning("SQNR %.1f dB: far from FP32's outputs; %s may help", sqnr_db, settings)
