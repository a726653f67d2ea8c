"""The tasks, by name. A task is imported when a run or a report asks for it, not before."""

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from pkgutil import resolve_name
from typing import Any

from resnet8ptq.config.limits import check
from resnet8ptq.config.schema import TaskConfig
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.registry import look_up
from resnet8ptq.tasks.contract import PROBABILITIES, Setting, Task

log = logging.getLogger(__name__)

AUTO = "auto"
TASKS = {
    "classification": "resnet8ptq.tasks.classification:Classification",
    "binary": "resnet8ptq.tasks.binary:Binary",
    "anomaly": "resnet8ptq.tasks.anomaly:Anomaly",
    "detection": "resnet8ptq.tasks.detection.task:Detection",
    "regression": "resnet8ptq.tasks.regression:Regression",
    "agreement": "resnet8ptq.tasks.agreement:Agreement",
    "deviation": "resnet8ptq.tasks.agreement:Deviation",
    "custom": "resnet8ptq.tasks.custom:Custom",
}

BECAUSE = {
    "detection": "the labels are boxes; task=custom scores them by a metric of your own",
    "regression": "the labels are floats; if they are classes, store them as integers from 0",
    "classification": "the labels are integers; if they are values, task=regression",
    "agreement": (
        "no labels, and the network returns probabilities of classes; to compare values instead, "
        "task=deviation"
    ),
    "deviation": (
        "no labels, and the network does not return probabilities of classes; if it returns "
        "logits of classes, task=agreement"
    ),
}


def make(config: TaskConfig, setting: Setting) -> Task:
    """Return the task that `task` names, or that fits the data, set up for them.

    Raises:
        ConfigError: there is none of that name, or the data lack what it needs.
        ModelError: the network returns something else than it takes.
    """
    name = choose(setting) if config.name == AUTO else config.name
    task = _find(name)
    if config.name == AUTO:
        _say(name)
        config = task.schema(task.name)
    elif not isinstance(config, task.schema):
        raise ConfigError(f"task.name: got {config.name!r} by itself; takes task={config.name}")
    return task.make(config, setting)


def fingerprint(config: TaskConfig) -> str:
    """Return a hash of the user's own code that scores; empty without any.

    Raises:
        ConfigError: there is no such task, or its code cannot be found.
    """
    return "" if config.name == AUTO else _find(config.name).fingerprint(config)


@functools.cache  # once a process, not once for each job of a sweep
def _say(name: str) -> None:
    log.info("task=auto took %s: %s", name, BECAUSE[name])


def choose(setting: Setting) -> str:
    """Return the task that fits the labels; without any, what the network returns.

    Numbers that are not known to be probabilities may be logits of classes, or values: the largest
    of several values means nothing, but how far values are from FP32's holds for logits too.
    """
    if setting.labels is not None and setting.labels.dtype.kind == "V":
        return "detection"
    if setting.labels is not None:
        return "regression" if setting.labels.dtype.kind == "f" else "classification"
    several = (setting.classes or 0) > 1
    return "agreement" if several and setting.final == PROBABILITIES else "deviation"


def recall(params: Mapping[str, str], class_names: tuple[str, ...] = ()) -> Task:
    """Return the task that a run was scored by, from its MLflow params.

    Runs from before there were tasks are classifications.

    Raises:
        TrackingError: the params are not those of a run.
    """
    try:
        task = _find(params.get("scored_as", "classification"))
        given: dict[str, Any] = {"name": task.name}
        for name in (field.name for field in fields(task.schema)):
            if name != "name" and f"task.{name}" in params:
                given[name] = _parse(params[f"task.{name}"])
        if target := params.get("task.metric._target_"):
            given["metric"] = {"_target_": target}
        config = task.schema(**given)
        check(config, "task.")
        return task.recall(config, class_names)
    except Exception as error:  # whoever writes to the store may have changed them
        raise TrackingError(f"scored_as: {error}") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # a string, which is logged as it is


def _find(name: str) -> type[Task]:
    found: type[Task] = resolve_name(look_up("task.name", name, TASKS))
    return found
