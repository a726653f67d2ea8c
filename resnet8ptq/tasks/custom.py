"""`task=custom`: the user's metric, the callable in `task.metric._target_`."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from numpy.typing import NDArray
from omegaconf.errors import OmegaConfBaseException

from resnet8ptq.config.schema import CustomConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import one_line
from resnet8ptq.tasks.classification import metric_names
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP, BootstrapScores, mean_of
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Outputs, Targets
from resnet8ptq.tasks.task import Joining, Task, TaskType

EXPECTED = "expected a callable (outputs, targets) -> a number, or one for each sample"

UserMetric = Callable[[Any, Any], Any]


def build(config: CustomConfig, call: UserMetric | None, outputs: Sequence[str] = ()) -> Task:
    """Return the task with the user's metric.

    Args:
        call: the metric; None for a finished run, because the name in a store may be anyone's code.
        outputs: the names of the network's outputs.
    """
    settings = config.metric or {}
    target = str(settings.get("_target_", "metric"))
    title = target.rpartition(".")[2]
    percent = config.percent
    metric = Metric(
        "custom_metric", title, config.direction == "maximize", percent, bounded=percent
    )
    score = partial(_score, call, title, config.resamples)
    distance = partial(_pair_metrics, outputs)
    return Task("custom", metric, score, BOOTSTRAP, pair_metrics=distance, joining=Joining())


def _pair_metrics(names: Sequence[str], comparison: Comparison) -> Metrics:
    """Return the SQNR of the worst output and, if several outputs have names, of each."""
    fp32 = comparison.baseline.outputs.returned
    quantized = comparison.model.outputs.returned
    of_outputs = distortion.sqnr_of_each(metric_names(names), fp32, quantized)
    return {"sqnr_db": comparison.sqnr_db, **of_outputs}


def _score(
    call: UserMetric | None, title: str, resamples: int, outputs: Outputs, targets: Targets
) -> BootstrapScores:
    """Call the metric on all samples.

    If the metric returns a single number, the result calls it again for each bootstrap sample.

    Raises:
        ConfigError: the metric fails, returns neither a number nor one for each sample, or returns
            a number that is not finite.
    """
    labels = targets.labels
    if labels is not None and labels.dtype.kind == "b":  # several labels for each sample
        labels = labels.astype(np.float32)

    def measure(call: UserMetric, chosen: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        values: Any = [array[chosen] for array in outputs.values]
        if len(values) == 1:
            [values] = values
        exact = None if labels is None else labels[chosen]
        return np.asarray(call(values, exact), np.float64)

    # Code of the user may fail in any way, or return anything
    assert call is not None  # only finished runs have none
    try:
        result = measure(call, slice(None))
    except Exception as error:
        raise ConfigError(f"task.metric: {title} failed ({one_line(error)})") from error
    if result.shape not in ((), (len(outputs),)) or not np.isfinite(result).all():
        raise ConfigError(
            f"task.metric: {title} returns {result.shape or result}; {EXPECTED}, all finite"
        )

    # Values of samples are averaged; a single number is computed again for each bootstrap sample
    if result.shape:
        return BootstrapScores(outputs, mean_of(result), resamples, result)
    unchecked = _without_check(call)
    return BootstrapScores(outputs, lambda chosen: float(measure(unchecked, chosen)), resamples)


def _without_check(call: UserMetric) -> UserMetric:
    """Return the metric without Hydra's check of each call, which is slower than most metrics.

    One checked call is enough, because the target and its arguments stay the same.
    """
    if isinstance(call, partial):
        return partial(call.func, *call.args, **call.keywords)
    return call


def _load(settings: Any) -> UserMetric:
    """Import the function that `_target_` names, or make an instance of the class.

    Raises:
        ConfigError: there is no `_target_`, or it cannot be loaded or called.
    """
    target = (settings or {}).get("_target_")
    if not target:
        raise ConfigError(f"task.metric._target_: got null, {EXPECTED}")
    if not isinstance(target, str):
        raise ConfigError(f"task.metric._target_: got {target}, {EXPECTED}")

    # The name and the arguments are the user's, so loading may fail
    try:
        settings = dict(settings)
        if not isinstance(get_object(target), type):
            settings["_partial_"] = True  # load the function itself, not its result
        call = instantiate(settings)
    except (HydraException, OmegaConfBaseException, ImportError, ValueError) as error:
        raise ConfigError(
            f"task.metric._target_: got {target} ({one_line(error)}), {EXPECTED}"
        ) from error
    if not callable(call):
        raise ConfigError(f"task.metric._target_: got {target}, {EXPECTED}")
    return call


def _fingerprint(config: CustomConfig) -> str:
    """Return the hash of the metric's source file; empty if it has none."""
    call = _load(config.metric)
    try:
        path = inspect.getsourcefile(getattr(call, "func", type(call)))
    except TypeError:  # a built-in
        path = None
    return files.sha256(Path(path)) if path else ""


CUSTOM = TaskType(
    make=lambda config, context: build(config, _load(config.metric), tuple(context.outputs)),
    recall=lambda config, class_names: build(config, None),
    schema=CustomConfig,
    fingerprint=_fingerprint,
)
