"""`+analysis=profile`: the time of each operator, of FP32 and of the quantized model."""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from resnet8ptq.core.console import track
from resnet8ptq.evaluation import latency
from resnet8ptq.evaluation.evaluator import baseline_config
from resnet8ptq.evaluation.latency import ModelLatency
from resnet8ptq.experiment.network_and_data import fit_settings, load_data_and_network
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import draw_to_calibrate
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.exploration.profiling import profile_table
from resnet8ptq.exploration.profiling.breakdown import Breakdown, ProfileResult


def analyse(settings: Settings, folder: Path, run: Recorder) -> ProfileResult:
    """Quantize and reload a model; time whole runs, then every node, of the model and of FP32.

    Write and print the result.

    Args:
        settings: the run's settings; `latency` sets repeats, threads and batch size.

    Raises:
        UnsupportedError: the framework does not report times, or cannot take the settings or the
            network.
        PtqError: network or samples cannot be read, or do not fit each other or the settings; or
            quantization fails.
    """
    timing = settings.config.latency
    settings.quantizer.resolve()
    # This raises `UnsupportedError` before any work, and loads nothing yet.
    settings.quantizer.profile(folder, timing.threads)

    # Draw the calibration samples; fitting may change the settings
    data, fp32 = load_data_and_network(settings)
    settings = fit_settings(settings, fp32)
    config = settings.config
    resolved = settings.quantizer.resolve()
    calibration = draw_to_calibrate(config, data)

    # Quantize and reload the model, and load FP32 in the same framework
    with tempfile.TemporaryDirectory() as scratch:
        batch_size = latency.find_batch_size(timing, data.test)
        timed = data.test.take(np.arange(min(batch_size, len(data.test))))
        loads = []
        profiles = []
        plain = settings.vary(baseline_config(config))
        for variant, home in ((settings, folder), (plain, Path(scratch))):
            framework = variant.quantizer
            path = framework.quantize(fp32, framework.asked, calibration.split, home).path
            loads.append(partial(framework.load, path))
            profiles.append(partial(framework.profile, path))

        # Time whole runs first, because the profiler slows them, then every node
        times = latency.measure(loads, timed, timing)
        sizes = [1] if timed.at_once is not None else [1, batch_size]
        nodes = []
        for size in track(sizes, "Profiling", "batch sizes"):
            opened = [profile(timing.threads) for profile in profiles]
            both = latency.measure_operators(opened, timed, batch_size=size, timing=timing)
            nodes.append(both)

    # Join the times of each batch size
    model_times, fp32_times = times
    medians = zip(model_times.medians(), fp32_times.medians(), strict=True)
    breakdowns = []
    for size, (model, baseline), (ms, fp32_ms) in zip(sizes, nodes, medians, strict=True):
        breakdowns.append(Breakdown(size, model, baseline, ms=ms, fp32_ms=fp32_ms))
    params = {**resolved.to_params(), "calibration_digest": calibration.digest}
    result = ProfileResult(
        "ok", resolved=params, breakdowns=tuple(breakdowns), latency=ModelLatency(*times)
    )

    profile_table.write_profile(folder, config, result)
    profile_table.print_tables(result, profile_table.describe(config))
    return result
