"""The steps of one run in their order, from its settings to its result."""

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx

from resnet8ptq.calibration import table
from resnet8ptq.calibration.outliers import Outliers
from resnet8ptq.config.schema import BY_BATCH, LatencyConfig, RunConfig
from resnet8ptq.core import files
from resnet8ptq.core.machine import PeakMemory
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.evaluation import latency
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.evaluation.result import Measurement, RunResult
from resnet8ptq.experiment import (
    attention_report,
    outputs,
    preparation,
    preprocessing_check,
    run_warnings,
    sample_check,
)
from resnet8ptq.experiment.measurement import find_execution, measure
from resnet8ptq.experiment.network_and_data import fit_settings, load_data_and_network, make_task
from resnet8ptq.experiment.network_properties import find_properties
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import SamplesByRole, draw, has_groups
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.experiment.stopping import make_stopping_plan
from resnet8ptq.experiment.workspace import Prepared, Workspace
from resnet8ptq.graph.layers import find_tail
from resnet8ptq.models.batch_axis import static_tensors
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.plan import find_float_nodes, find_quantized_layers, keeps_tail
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.metric import BASELINE, GROUPED, SAME_SAMPLES
from resnet8ptq.tasks.task import Task

log = logging.getLogger(__name__)

FileCheck = Callable[[Evaluator, Dataset, Path, Comparison], dict[str, str]]


def run_experiment(
    settings: Settings, folder: Path, run: Recorder, check_file: FileCheck | None = None
) -> RunResult:
    """Quantize, reload, evaluate, and compare with the FP32 baseline; return the result.

    The function logs params that are known early, and the model if it can be served. The caller
    logs the result.

    Args:
        settings: the run's settings, with all files located.
        folder: the run's existing folder.
        check_file: looks for the cause of the loss of a file that another program quantized, and
            returns params; None for other files.

    Raises:
        UnsupportedError: the framework or the target does not support the settings, or not for
            this network.
        PtqError: settings, data or network are wrong, quantization fails, or the connection to the
            target is lost.
    """
    memory = PeakMemory()
    # `Quantizer.resolve` refuses an unsupported combination here, before any work. It is called
    # again once the network and the decisions are known.
    settings.quantizer.resolve()
    if settings.target is not None:
        settings.target.describe()  # raises an error if the machine does not answer

    # Load data and network, and fix the settings that depend on them
    data, network = load_data_and_network(settings)
    graph = onnx.load(network.onnx_path).graph
    run.log_params(network.describe() | {"properties": ", ".join(find_properties(graph))})
    settings = fit_settings(settings, network)
    config = settings.config
    saturates = run_warnings.warn_before(config, settings.quantizer.resolve(), graph)
    if config.backend.quantizes:
        attention_report.log_attention(config, graph)

    # Draw the samples of each role
    samples, task = _draw_samples(config, data, network, run)
    grouped = has_groups(samples.reported, task)
    stopping = make_stopping_plan(config, task, samples, grouped=grouped)
    samples = samples.as_scored(config.evaluate)
    calibrating = samples.calibrating.split
    calib = config.calib
    calibrates = sample_check.calibrates(config)
    outliers = sample_check.check_inputs(calib, graph, calibrating) if calibrates else []
    evaluator = Evaluator(settings.quantizer, network, task, config.evaluate.batch_size)

    # Prepare the network, and quantize it
    with tempfile.TemporaryDirectory() as scratch:
        work = Workspace(
            settings, evaluator, samples, folder=folder, scratch=Path(scratch), run=run
        )
        prepared = preparation.prepare(work)
        if config.method in BY_BATCH and not config.dtype.is_float:
            _check_dynamic(work, prepared)
        quantized = work.quantize(prepared, folder)
        artifact = quantized.artifact
        resolved = settings.quantizer.resolve(prepared.decisions)
        params = resolved.to_params() | _float_operators(work, prepared) | prepared.params
        params |= settings.quantizer.verify(artifact, prepared.network, calibrating)
        if calibrates and not outliers:  # a sample may stand out inside the network only
            outliers = sample_check.find_inside(
                calib,
                network=prepared.network.onnx_path,
                samples=calibrating,
                runtime=settings.runtime,
            )
        if artifact.ranges:
            table.write_tables(folder, artifact.ranges, work.provenance(prepared.network))

    # From here on, the evaluator of `work` runs files on the target, if there is one. `evaluator`
    # stays on this machine, where `check_file` looks for the cause of a loss.
    if settings.target is not None:
        runtime_name = config.backend.descriptor.runtime
        params["measured_on"] = settings.target.say(runtime_name)
        work = replace(work, evaluator=replace(evaluator, target=settings.target))

    # Reload the artifact, and measure it
    params |= find_execution(work.evaluator, resolved, quantized, calibrating)
    measurement = measure(work, prepared, quantized, memory=memory, plan=stopping)

    # Describe and check the result, and write the files of the run
    params |= artifact.details | {"artifact_sha256": files.sha256(quantized.path)}
    params |= _describe_measurement(config.latency, samples, measurement)
    if outliers:
        params["calibration_outliers"] = outliers[0].describe(calibrating)
    params |= _check_result(work, measurement, saturates, outliers)
    if check_file is not None and "doubt" not in params:
        params |= check_file(evaluator, samples.data, quantized.path, measurement.comparison)
    if cut_short := settings.runtime.deadline.cut_short:
        params["cut_short"] = "; ".join(cut_short)
    result = RunResult("ok", measurement=measurement, resolved=params)
    outputs.write(folder, config, result, artifact=artifact, samples=samples, fp32=network)
    if config.backend.descriptor.serving:
        run.log_model(quantized.path, _shapes(network), resolved.engine)
    return result


def _draw_samples(
    config: RunConfig, data: Dataset, network: Fp32Model, run: Recorder
) -> tuple[SamplesByRole, Task]:
    """Return the samples by role, and the task; log both."""
    name = f"the training samples of {data.name}"
    can_score = partial(make_task, config.task, data, network, name=name)
    samples = draw(config, data, tunes=preparation.tunes(config), check=can_score)
    task = make_task(config.task, dataset=data, fp32=network, scored=samples.reported)
    params = task.describe()
    if has_groups(samples.reported, task):
        params[GROUPED] = "true"
    if samples.selection is not None:
        params["chosen_by"] = f"{len(samples.selection):,} {samples.selected_from}"
    if config.evaluate.split == "choice" and samples.reported is data.test:
        params[SAME_SAMPLES] = "true"
    run.log_params(params)
    run.log_datasets(samples.data, samples.calibrating, task.few_names)
    return samples, task


def _check_dynamic(work: Workspace, prepared: Prepared) -> None:
    """Check the inputs of the quantized layers, see `sample_check.check_dynamic`."""
    proto = onnx.load(prepared.network.onnx_path)
    selection = work.settings.quantizer.select(prepared.decisions)
    layers = find_quantized_layers(proto.graph, selection).values()
    samples = work.samples.calibrating.split
    sample_check.check_dynamic(proto, layers, samples, threads=work.settings.runtime.threads)


def _check_result(
    work: Workspace,
    measurement: Measurement,
    saturates: bool,
    outliers: Sequence[Outliers],
) -> dict[str, str]:
    """Warn about a doubtful baseline or result; return the doubt about the baseline, as params."""
    config = work.config
    evaluator = work.evaluator
    samples = work.samples
    if config.backend.quantizes:
        sqnr_db = measurement.comparison.sqnr_db
        calibrating = samples.calibrating.split
        run_warnings.warn_of_noise(
            config, sqnr_db, saturates, outliers=outliers, samples=calibrating
        )
        graph = onnx.load(evaluator.network.onnx_path).graph
        baseline_bytes = measurement.metrics[f"{BASELINE}size_bytes"] or 0
        size_bytes = measurement.size_bytes
        run_warnings.warn_of_size(
            graph, size_bytes, fp32_bytes=baseline_bytes, settings=work.settings
        )

    # Doubt an implausible FP32 network
    expected = config.report.expected_accuracy
    doubt = preprocessing_check.check(
        config.preprocess,
        evaluator,
        dataset=samples.data,
        baseline=evaluator.baseline_scores(samples.reported),
        expected=expected,
    )
    return {} if doubt is None else {"doubt": doubt}


def _describe_measurement(
    timing: LatencyConfig, samples: SamplesByRole, measurement: Measurement
) -> dict[str, str]:
    """Return params: the hash of the outputs, and notes on the measurement.

    Notes name the size of timed batches, a silent output, and an evaluation from the cache, each
    only if there is one.
    """
    params = {"outputs_sha256": measurement.outputs_sha256}
    if "latency_batch_p50_ms" in measurement.metrics:
        size = latency.find_batch_size(timing, samples.reported)
        params["latency_batch_size"] = str(size)
    if measurement.silent:
        log.warning("%s, and FP32's is not: this model fails", measurement.silent)
        params["silent"] = measurement.silent
    if measurement.evaluation_cached:
        log.info("the same file ran on these samples before: its outputs are from the cache")
        params["evaluation"] = "cached"
    return params


def _shapes(network: Fp32Model) -> dict[str, list[int]]:
    """Return the shape of each output without the batch axis; a free size is -1."""
    shapes = {}
    for output in network.contract.outputs:
        sizes = []
        for size in output.shape:
            known = -1 if size is None else size
            sizes.append(known)
        shapes[output.name] = sizes
    return shapes


def _float_operators(work: Workspace, prepared: Prepared) -> dict[str, str]:
    """Return a param: the operators that the settings or the backend leave in float, with counts.

    There is none with a float dtype, for `method=dynamic` and `weight_only`, and if the framework
    chooses the operators. There is also none if the nodes after the last layers may be quantized,
    see `keeps_tail`.
    """
    config = work.config
    without = config.dtype.is_float or config.method in ("dynamic", "weight_only")
    if without or not config.backend.descriptor.operators:
        return {}
    graph = onnx.load(prepared.network.onnx_path).graph
    known = config.backend.descriptor.find_operators()
    if config.method == "mixed":
        known |= config.backend.descriptor.dynamic_operators
    _say_unknown(graph, config.backend.name, known)
    if not keeps_tail(graph, config.float_tail):
        return {}

    # Count the operators by type
    left = {*find_float_nodes(graph, work.settings.quantizer.select(prepared.decisions))}
    count: Counter[str] = Counter()
    for node in graph.node:
        if node.name in left or node.op_type not in known:
            count[node.op_type] += 1
    if config.float_tail is None:
        _, tail = find_tail(graph)
        in_tail = Counter(node.op_type for node in tail)
        log.info(
            "float_tail=null: the nodes after the last layers join values of different operators, "
            "and stay in float: %s",
            _list_counts(in_tail),
        )
    return {"float_operators": _list_counts(count)}


def _say_unknown(graph: onnx.GraphProto, backend: str, known: Collection[str]) -> None:
    """Log the operators that a backend never quantizes, with their counts.

    Nodes after the last layers do not count, and neither do those of shapes and constants.
    """
    static = static_tensors(graph)
    _, tail = find_tail(graph)
    in_tail = {node.name for node in tail}
    count: Counter[str] = Counter()
    for node in graph.node:
        computes = node.name not in in_tail and not static.issuperset(node.output)
        if computes and node.op_type not in known:
            count[node.op_type] += 1
    if count:
        log.info("in float, as backend=%s does not quantize them: %s", backend, _list_counts(count))


def _list_counts(operators: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(operators.items()))
