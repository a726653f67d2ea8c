"""One run, from its config to its result: the recipe."""

import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from resnet8ptq import cache, corrections, data, evaluate, latency, model, outputs
from resnet8ptq.backends import BACKENDS
from resnet8ptq.config import RunConfig
from resnet8ptq.environment import PeakMemory
from resnet8ptq.errors import UnsupportedError
from resnet8ptq.metrics import Comparison
from resnet8ptq.results import Measurement, RunResult
from resnet8ptq.tracking import Run

log = logging.getLogger(__name__)


def run_experiment(config: RunConfig, folder: Path, run: Run) -> RunResult:
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
    quantizer = BACKENDS[config.backend.name](config)
    try:
        resolved = quantizer.resolve()
    except UnsupportedError as reason:
        result = RunResult("unsupported", str(reason))
        run.log_config(config)
        run.log_result(result)
        return result

    memory = PeakMemory()
    config = replace(config, data=data.settle(config.data))
    run.log_config(config)
    dataset = data.load(config.data.name, config.data.root)
    cache_root = cache.folder(config.cache_dir)
    fp32 = model.load(config.model, dataset, cache_root)
    calibration = data.draw_calibration(dataset, config.calib.samples_per_class, config.seed)
    if config.evaluate.split == "held_out":
        held_out = data.draw_held_out(dataset, calibration, config.held_out_images, config.seed)
        dataset = replace(dataset, test=held_out)
    run.log_datasets(dataset, calibration)

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        network = corrections.correct(config, fp32, calibration.split, Path(scratch))
        artifact = quantizer.quantize(network, calibration.split, folder)
    quantize_s = time.perf_counter() - start

    predictor = quantizer.load(artifact.path)  # what is measured is what lies on the disk
    scores, evaluate_s = evaluate.evaluate(predictor, dataset.test, config.evaluate.batch_size)
    logits = evaluate.collect_logits(predictor, dataset.test, config.evaluate.batch_size)
    scores = replace(scores, logits=logits)
    baseline = evaluate.load_baseline(config, fp32, dataset, cache_root)
    peak_memory_bytes = memory.read_bytes()  # before the baseline is loaded beside the model
    timed = None
    if config.latency.enabled and resolved["execution"] != "simulated":
        timed = latency.measure(config, artifact.path, baseline.path, dataset.test.images)

    measurement = Measurement(
        class_names=dataset.class_names,
        comparison=Comparison(scores, baseline.scores),
        size_bytes=artifact.size_bytes,
        baseline_size_bytes=baseline.size_bytes,
        quantized_layers=artifact.quantized_layers,
        quantize_s=quantize_s,
        evaluate_s=evaluate_s,
        peak_memory_bytes=peak_memory_bytes,
        latency=timed,
    )
    result = RunResult("ok", measurement=measurement, resolved=resolved)
    outputs.write(folder, config, result, artifact, calibration, fp32)
    run.log_model(artifact.path, dataset)
    run.log_result(result)
    return result
