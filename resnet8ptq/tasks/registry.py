"""The tasks by name. A task is imported only when a run or a report needs it."""

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from pkgutil import resolve_name
from typing import Any

import numpy as np

from resnet8ptq.config.limits import check
from resnet8ptq.config.schema import TaskConfig
from resnet8ptq.core.console import log_once
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.registry import look_up
from resnet8ptq.tasks import joining
from resnet8ptq.tasks.scoring.outputs import PROBABILITIES, TaskContext, has_prototypes
from resnet8ptq.tasks.task import Task, TaskType

log = logging.getLogger(__name__)

AUTO = "auto"
_PREFIX = "task."  # prefix of the settings in MLflow params
EMBEDDING = 32  # shorter vectors count as classes, unless there are more texts than values
TASKS = {
    "classification": "resnet8ptq.tasks.classification:CLASSIFICATION",
    "top5": "resnet8ptq.tasks.top5:TOP5",
    "binary": "resnet8ptq.tasks.binary:BINARY",
    "multilabel": "resnet8ptq.tasks.multilabel:MULTILABEL",
    "anomaly": "resnet8ptq.tasks.anomaly:ANOMALY",
    "detection": "resnet8ptq.tasks.detection.task:DETECTION",
    "keypoints": "resnet8ptq.tasks.detection.task:KEYPOINTS",
    "instance_segmentation": "resnet8ptq.tasks.detection.task:INSTANCE_SEGMENTATION",
    "segmentation": "resnet8ptq.tasks.segmentation:SEGMENTATION",
    "dense": "resnet8ptq.tasks.dense:DENSE",
    "regression": "resnet8ptq.tasks.regression:REGRESSION",
    "similarity": "resnet8ptq.tasks.similarity:SIMILARITY",
    "ctc": "resnet8ptq.tasks.ctc:CTC",
    "tokens": "resnet8ptq.tasks.tokens:TOKENS",
    "perplexity": "resnet8ptq.tasks.perplexity:PERPLEXITY",
    "verification": "resnet8ptq.tasks.verification:VERIFICATION",
    "agreement": "resnet8ptq.tasks.agreement:AGREEMENT",
    "deviation": "resnet8ptq.tasks.deviation:DEVIATION",
    "custom": "resnet8ptq.tasks.custom:CUSTOM",
}

BECAUSE = {
    "detection": "the labels are boxes; task=custom scores them by a metric of your own",
    "keypoints": "the labels and the outputs have boxes with keypoints",
    "instance_segmentation": "the labels and the outputs have boxes with masks",
    "segmentation": "the labels are masks, with a class for each pixel",
    "dense": "the labels are pictures",
    "regression": "the labels are floats; if they are classes, store them as integers from 0",
    "multilabel": "a sample has several labels",
    "ctc": "the labels are texts, and the network returns classes by frame",
    "tokens": "each token has a label",
    "verification": "the labels are texts, and the network returns one vector: an embedding",
    "classification": "the labels are integers; if they are values, task=regression",
    "binary": "the labels are 0 and 1, and the network returns one value",
    "agreement": (
        "no labels, and the network returns probabilities of classes; to compare values instead, "
        "task=deviation"
    ),
    "deviation": (
        "no labels, and the network does not return probabilities of classes; if it returns "
        "logits of classes, task=agreement"
    ),
}


def make(config: TaskConfig, context: TaskContext) -> Task:
    """Return the task that the settings name, or with `task=auto` the one that fits, see `choose`.

    Raises:
        ConfigError: the name is unknown or stands alone without the task's settings, or
            settings or data do not fit.
        ModelError: the outputs of the network do not fit.
    """
    if config.name == AUTO:
        name = choose(context)
        log_once(log, "task=auto chose %s: %s", name, BECAUSE[name])
        config = _find(name).schema(name, join=config.join)
    kind = _find(config.name)
    if not isinstance(config, kind.schema):
        raise ConfigError(f"task.name: got {config.name!r} alone; try task={config.name}")
    task = kind.make(config, context)
    if config.join is None:
        return task

    # A task's own default of `join` is accepted without groups
    _check_join(task, config.join)
    if not context.grouped and config.join != kind.schema.join:
        raise ConfigError(
            f"task.join: got {config.join}, expected null: {context.data} has no groups of samples "
            "(data.groups)"
        )
    return joining.join(task, config.join)


def _check_join(task: Task, how: str) -> None:
    if task.joining is None:
        raise ConfigError(f"task.join: got {how}, expected null with task={task.name}")
    if how == joining.VOTE and task.joining.votes is None:
        raise ConfigError(f"task.join: got vote, expected null, mean or max with task={task.name}")


def fingerprint(config: TaskConfig) -> str:
    """Return a hash of the user's code or file that scoring uses; empty if there is none.

    Raises:
        ConfigError: the task is unknown, or the code cannot be loaded.
    """
    if config.name == AUTO:
        return ""
    return _find(config.name).fingerprint(config)


def choose(context: TaskContext) -> str:
    """Return the name of the task that fits the labels and the outputs.

    Without labels, outputs that are not probabilities may be logits or other values. The deviation
    from FP32 is meaningful for both, but the top-1 class only for logits.
    """
    if context.labels is None:
        if context.final == PROBABILITIES and (context.classes or 0) > 1:
            return "agreement"
        return "deviation"

    # The dtype shows the kind of the labels
    if context.of_tokens:
        return "tokens"
    match context.labels.dtype.kind:
        case "U":
            return _choose_by_text(context)
        case "V":
            return _choose_by_boxes(context)
        case "f":
            return "regression"
        case "u":
            return "segmentation" if context.labels.ndim == 3 else "dense"
        case "b":
            return "multilabel"

    # The labels are classes
    if (context.classes, len(context.class_names)) == (1, 2):
        return "binary"
    return "classification"


def _choose_by_boxes(context: TaskContext) -> str:
    """Return the task for labels that are boxes, by the shapes of the outputs.

    Keypoints or masks of the labels count only if the outputs may have them, too.
    """
    points = 3 * context.keypoints
    classes = len(context.class_names)
    sizes = set(chain.from_iterable(context.outputs.values()))
    # A box has label and score, or scores of all classes with or without an objectness
    if points and not sizes.isdisjoint({6 + points, 4 + classes + points, 5 + classes + points}):
        return "keypoints"
    if context.has_masks and has_prototypes(context.outputs):
        return "instance_segmentation"
    return "detection"


def _choose_by_text(context: TaskContext) -> str:
    """Return the task for labels that are texts, or `classification`, which refuses them."""
    shapes = list(context.outputs.values())
    if any(len(shape) == 2 for shape in shapes):
        return "ctc"

    # A long vector, or one shorter than the number of texts, is no vector of class scores
    different = len(set(np.asarray(context.labels).tolist()))
    length = 0
    if len(shapes) == 1 and len(shapes[0]) == 1:
        length = shapes[0][0] or 0
    embeds = length >= EMBEDDING or different > length > 1
    if embeds and length != different:
        return "verification"
    return "classification"


def recall(params: Mapping[str, str], class_names: tuple[str, ...] = ()) -> Task:
    """Return the task that scored a run, from its MLflow params.

    A run that ended before its task was made has no task in its params; it counts as a
    classification.

    Raises:
        TrackingError: the params are not valid for a run.
    """
    try:
        scored_as = params.get("scored_as", "classification")
        kind = _find(scored_as)

        # Read the settings back, as far as the schema has them
        settings: dict[str, Any] = {"name": scored_as}
        for field in fields(kind.schema):
            if field.name != "name" and f"task.{field.name}" in params:
                settings[field.name] = _parse(params[f"task.{field.name}"])
        target = params.get("task.metric._target_")
        if target:
            settings["metric"] = {"_target_": target}
        config = kind.schema(**settings)
        check(config, prefix="task.")
        return kind.recall(config, class_names)
    except Exception as error:  # anyone who writes to the store may have changed the params
        raise TrackingError(f"scored_as: {error}") from None


def find_changed(params: Mapping[str, str]) -> tuple[str, ...]:
    """Return the task's settings that differ from the defaults, as overrides, from MLflow params.

    With other settings, the same outputs may have other scores, those of FP32 included. The name
    does not count, because `auto` may choose the same task.
    """
    scored_as = params.get("scored_as", "classification")
    defaults: dict[str, Any] = {}
    if scored_as in TASKS:  # anyone may write to the store
        defaults = vars(_find(scored_as).schema())
    changed = []
    for key in sorted(params):
        if key.startswith(_PREFIX) and key != f"{_PREFIX}name":
            default = defaults.get(key.removeprefix(_PREFIX))
            if _parse(params[key]) != default:
                changed.append(f"{key}={params[key]}")
    return tuple(changed)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # strings are logged without quotes


def _find(name: str) -> TaskType:
    kind: TaskType = resolve_name(look_up("task.name", name, TASKS))
    return kind
