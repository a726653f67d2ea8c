"""`+analysis=profile`: what each operator takes, FP32 beside 8 bits."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache
from resnet8ptq.core.console import track
from resnet8ptq.data import locate
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.evaluation import latency, operators
from resnet8ptq.evaluation.latency import Latency
from resnet8ptq.evaluation.trial import Bench, as_fp32
from resnet8ptq.experiment.compatibility import fit_settings, load
from resnet8ptq.experiment.profiling import profile_table
from resnet8ptq.experiment.profiling.breakdown import Breakdown, ProfileResult
from resnet8ptq.experiment.recorder import Recorder


def analyse(config: RunConfig, folder: Path, run: Recorder) -> ProfileResult:
    """Quantize, reload, time whole runs and then every node beside FP32.

    Args:
        config: what to run; `latency` says how often, and on how many threads.
        folder: the run's own folder, existing; all its files land there.
        run: the open MLflow run that records it.

    Raises:
        UnsupportedError: the framework cannot tell the times.
        PtqError: anything that went wrong, in one line.
    """
    runtime = cache.runtime(config.cache_dir, config.threads)
    quantizer, settings = make_quantizer(config, runtime), config.latency
    quantizer.resolve()
    quantizer.profile(folder, settings.threads)  # unsupported before any work; loads nothing yet
    config = replace(config, data=locate.settle(config.data))
    run.log_config(config)
    dataset, fp32 = load(config, runtime.cache_root)
    config = fit_settings(config, runtime, fp32)
    resolved = make_quantizer(config, runtime).resolve()
    calibration = draw_calibration(dataset, config.calib.samples_per_class, config.seed, [])
    with tempfile.TemporaryDirectory() as scratch:
        batch_size = latency.find_batch_size(settings, dataset.test)
        bench = Bench(fp32.sha256, runtime, batch_size, fp32.final)
        timed = dataset.test.take(np.arange(min(batch_size, len(dataset.test))))

        loads, profiles = [], []
        for variant, place in ((config, folder), (as_fp32(config), Path(scratch))):
            path = bench.run(variant, fp32, calibration.split, timed, place).artifact.path
            loads.append(bench.loader(variant, path))
            profiles.append(partial(make_quantizer(variant, runtime).profile, path))
        times = latency.measure(loads, timed, settings)
        sizes = [1] if timed.at_once is not None else [1, batch_size]
        nodes = [
            operators.measure(
                [profile(settings.threads) for profile in profiles], timed, size, settings
            )
            for size in track(sizes, "Profiling", "batch sizes")
        ]
    breakdowns = tuple(
        Breakdown(size, *both, *medians)
        for size, both, *medians in zip(
            sizes, nodes, *(each.medians() for each in times), strict=True
        )
    )
    params = {**resolved.to_params(), "calibration_digest": calibration.digest}
    result = ProfileResult("ok", "", None, params, breakdowns, Latency(*times))

    profile_table.write(folder, config, result)
    profile_table.print_tables(result, profile_table.describe(config))
    return result
