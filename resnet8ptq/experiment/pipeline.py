"""One run, from its config to its result: the recipe."""

import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.calibration import table
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.core.machine import PeakMemory
from resnet8ptq.data import locate
from resnet8ptq.data.draw import choose_scored, draw_calibration, draw_held_out
from resnet8ptq.evaluation import evaluate, latency
from resnet8ptq.evaluation.baseline import load_baseline
from resnet8ptq.evaluation.result import Measurement, RunResult
from resnet8ptq.experiment import outputs, preparation
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.models import model
from resnet8ptq.tasks.classification import Comparison

log = logging.getLogger(__name__)


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
    quantizer = BACKENDS[config.backend.name](config)
    resolved = quantizer.resolve()  # an unsupported combination is known before any work
    memory = PeakMemory()
    config = replace(config, data=locate.settle(config.data))
    run.log_config(config)
    dataset = locate.load(config.data.name, config.data.root)
    cache_root = cache.folder(config.cache_dir)
    fp32 = model.load(config.model, dataset, cache_root)
    run.log_params(fp32.describe())
    scored = choose_scored(dataset, config.evaluate.split, config.held_out_images)
    taken = [] if scored is dataset else [scored.test]
    held_out = None
    if preparation.chooses(config):
        held_out = draw_held_out(dataset, config.held_out_images, taken)
        taken.append(held_out)
    calibration = draw_calibration(dataset, config.calib.samples_per_class, config.seed, taken)
    run.log_datasets(scored, calibration)

    with tempfile.TemporaryDirectory() as scratch:
        prepared = preparation.prepare(
            config, fp32, scored, calibration, held_out, folder, Path(scratch), run
        )
        quantizer = BACKENDS[config.backend.name](prepared.config)
        start = time.perf_counter()
        artifact = quantizer.quantize(prepared.network, calibration.split, folder, prepared.ranges)
        quantize_s = time.perf_counter() - start
    if artifact.ranges:
        table.write(folder, artifact.ranges, prepared.provenance)

    # What is measured is what lies on the disk.
    found = evaluate.evaluate(prepared.config, artifact.path, scored.test)
    logits = evaluate.collect_logits(found.predictor, scored.test, found.batch_size)
    scores = replace(found.scores, logits=logits)
    single = None
    if config.method == "dynamic" and config.dtype.name != "fp32":
        single = evaluate.one_by_one(prepared.config, artifact.path, scored.test)
    baseline = load_baseline(config, fp32, scored, cache_root)
    peak_memory_bytes = memory.read_bytes()  # before the baseline is loaded beside the model
    timed = None
    if config.latency.enabled and resolved["execution"] != "simulated":
        timed = latency.measure(config, artifact.path, baseline.path, scored.test.images)

    measurement = Measurement(
        class_names=scored.class_names,
        comparison=Comparison(scores, baseline.scores),
        size_bytes=artifact.size_bytes,
        baseline_size_bytes=baseline.size_bytes,
        quantized_layers=artifact.quantized_layers,
        quantize_s=quantize_s,
        evaluate_s=found.seconds,
        evaluate_batch_size=found.batch_size,
        evaluate_threads=found.threads,
        peak_memory_bytes=peak_memory_bytes,
        latency=timed,
        single=single,
        preparation=prepared.metrics,
        prepare_s=prepared.seconds,
    )
    result = RunResult(
        "ok", measurement=measurement, resolved=resolved | prepared.params | artifact.details
    )
    outputs.write(folder, config, result, artifact, calibration, fp32)
    run.log_model(artifact.path, scored)
    run.log_result(result)
    return result
