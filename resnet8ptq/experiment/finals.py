"""The race of a sweep's best models and of FP32, after its last run."""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.loading import CONFIG_FILE, load_config
from resnet8ptq.core import cache
from resnet8ptq.data import locate
from resnet8ptq.evaluation import race
from resnet8ptq.evaluation.pace import Load
from resnet8ptq.evaluation.race import Race
from resnet8ptq.evaluation.trial import Bench, as_fp32
from resnet8ptq.experiment.compatibility import load


def run(models: Mapping[str, Path], baselines: Mapping[str, Path]) -> Race:
    """Load models again from the folders of their runs, and time them in turns.

    Args:
        models: the folders by name; of the same network and data.
        baselines: the folder of a run of each framework whose FP32 network takes part, by name.

    Raises:
        PtqError: a file of a run is gone or damaged.
    """
    folders = {*models.values(), *baselines.values()}
    configs = {folder: load_config(folder / CONFIG_FILE) for folder in folders}
    first = configs[next(iter(models.values()))]
    runtime = cache.runtime(first.cache_dir, first.threads)
    settled = replace(first, data=locate.settle(first.data))
    data, fp32 = load(settled, runtime.cache_root)
    bench = Bench(fp32.sha256, runtime)
    loads: dict[str, Load] = {}
    with ExitStack() as stack:
        for name, folder in models.items():
            [path] = [each for each in folder.glob("model.*") if each.suffix != ".json"]
            loads[name] = bench.loader(configs[folder], path)
        for name, folder in baselines.items():
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            plain = as_fp32(configs[folder])
            made = make_quantizer(plain, runtime).quantize(fp32, data.test, scratch)
            loads[name] = bench.loader(plain, made.path)
        return race.run(loads, data.test, first.latency)
