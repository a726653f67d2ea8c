"""Reads metrics that were logged before metrics had groups."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress

from resnet8ptq.tasks.classification import metric_names
from resnet8ptq.tasks.contract import TOTAL

_COUNTS = ("total", "correct", "expected_correct", "tied", "detections", "quantized_layers")
_PAIRED = ("p_value", "right_to_wrong", "wrong_to_right", "classes_lost", "accuracy_p_value")
_RUN = ("quantize_s", "evaluate_s", "choose_s", "prepare_s", "images_per_s")
_GROUPS = {
    **dict.fromkeys(_COUNTS, "counts/"),
    **dict.fromkeys(_PAIRED, "paired/"),
    **dict.fromkeys((*_RUN, "evaluate_batch_size", "evaluate_threads"), "system/"),
}


def rename(metrics: Mapping[str, float], tags: Mapping[str, str]) -> dict[str, float]:
    """Return the metrics by their current names; metrics with groups stay unchanged."""
    if TOTAL in metrics or "total" not in metrics:
        return dict(metrics)
    renamed = {_rename(key): value for key, value in metrics.items()}
    names: list[str] = []
    with suppress(ValueError, TypeError, RecursionError):  # `RunRecord.class_names` reports it
        names = [str(name) for name in json.loads(tags.get("class_names", "[]"))]
    for name in metric_names(names):
        if f"delta_{name}" in metrics:
            renamed[f"class/{name}/drop"] = -metrics[f"delta_{name}"]
    return renamed


def _rename(key: str) -> str:
    key = re.sub(r"^(baseline|choice|batch1)_", r"\1/", key)
    key = re.sub(r"^choice/baseline_", "choice/baseline/", key)
    key = re.sub(r"^(delta_)?ci95_(low|high)$", lambda m: f"ci95/{_of(m[1])}_{m[2]}", key)
    group, _, name = key.rpartition("/")
    return f"{group}/{_GROUPS.get(name, '')}{name}".removeprefix("/")


def _of(prefix: str | None) -> str:
    return "delta" if prefix else "value"
