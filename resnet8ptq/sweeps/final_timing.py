"""Times a sweep's best models against each other and FP32, after its last run."""

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.loading import CONFIG_FILE, load_config
from resnet8ptq.core import files, machine
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.text import one_line
from resnet8ptq.evaluation import paired_latency
from resnet8ptq.evaluation.batching import Load
from resnet8ptq.evaluation.evaluator import baseline_config, loader
from resnet8ptq.evaluation.paired_latency import PairedLatency
from resnet8ptq.experiment.network_and_data import load_data_and_network
from resnet8ptq.experiment.settings import find_target, resolve
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.report.families import Cell, records_of
from resnet8ptq.report.recommend import ModelSelection, finalists
from resnet8ptq.report.timing import fp32_name
from resnet8ptq.tracking import origin

log = logging.getLogger(__name__)


def time_finalists(chosen: Sequence[ModelSelection], folder: Path) -> list[PairedLatency | None]:
    """Time the finalists of each family, and write the latencies to `folder`.

    Returns:
        The timing of each family; None if it has no finalists or no timed run, if these runs are
        of several machines or of one out of reach, or if the timing failed.
    """
    timings = [_time(selected, folder) for selected in chosen]
    if any(timings):
        kept: list[dict[str, Any] | None] = []
        for timed in timings:
            if timed is None:
                kept.append(None)
            else:
                kept.append(asdict(timed))
        files.write_text(folder / paired_latency.FILE, json.dumps(kept, indent=2))
    return timings


def _time(selected: ModelSelection, folder: Path) -> PairedLatency | None:
    models = finalists(selected)
    timed = [cell for cell in selected.family.measured if cell.record.speedup is not None]
    if not models or not timed:
        return None

    # Time only on the machine that timed the runs
    records = records_of([*models, *timed])
    cpus = {record.cpu for record in records}
    is_reached = all(record.measured_on for record in records)
    if not is_reached:
        own_cpu, _ = machine.cpu()
        is_reached = cpus == {own_cpu}
    if len(cpus) > 1 or not is_reached:
        log.warning("the best models ran on other machines, and are not timed against each other")
        return None
    try:
        baselines = {}
        for cell in timed:  # of each framework, the last run
            baselines[fp32_name(cell.record)] = _folder(cell, folder)
        quantized = {}
        for cell in models:
            quantized[cell.record.run_id] = _folder(cell, folder)
        return _run(quantized, baselines)
    except Exception as error:  # the runs are complete without this timing
        log.warning("the best models could not be timed against each other: %s", one_line(error))
        return None


def _folder(cell: Cell, sweep: Path) -> Path:
    """Return the folder of a run below `sweep` or `origin.RUNS`.

    Raises:
        TrackingError: the run is not there; loading files of others could run their code.
    """
    own = origin.own_folder(cell.record, sweep) or origin.own_folder(cell.record)
    if own is None:
        raise TrackingError(
            f"run {cell.record.run_id} was not made below {sweep} or {origin.RUNS.absolute()}"
        )
    return own


def _find_model(folder: Path) -> Path:
    """Return the quantized file of a run; raise ValueError unless there is exactly one."""
    [path] = [path for path in folder.glob("model.*") if path.suffix != ".json"]
    return path


def _run(models: Mapping[str, Path], baselines: Mapping[str, Path]) -> PairedLatency:
    """Time the models of runs and the FP32 network of each framework in turns.

    Args:
        models: the folders of runs by name, all with the same network and data.
        baselines: the folder of one run for each framework, by name; FP32 is converted with the
            settings of that run.
    """
    folders = {*models.values(), *baselines.values()}
    configs = {folder: load_config(folder / CONFIG_FILE) for folder in folders}
    first = next(iter(models.values()))  # all have the same network and data
    settings = resolve(configs[first])
    runtime = settings.runtime
    data, fp32 = load_data_and_network(settings)

    # Convert FP32 for each framework; its files exist as long as the timing
    loads: dict[str, Load] = {}
    with ExitStack() as stack:
        for name, folder in models.items():
            path = _find_model(folder)
            quantizer = make_quantizer(configs[folder], runtime)
            loads[name] = loader(quantizer, path, find_target(configs[folder]))
        for name, folder in baselines.items():
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            quantizer = make_quantizer(baseline_config(configs[folder]), runtime)
            made = quantizer.quantize(fp32, Decisions(), data.test, scratch)
            loads[name] = loader(quantizer, made.path, find_target(configs[folder]))
        return paired_latency.time_in_blocks(loads, data.test, settings.config.latency)
