"""The params of a run in MLflow: its main settings, and those that differ from their defaults.

A run has a hundred settings, and the user chose only a few. The config artifact and the run's
folder have all of them; `complete` adds the defaults when a run is read.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from resnet8ptq.config.loading import type_config
from resnet8ptq.core.text import redact
from resnet8ptq.tracking.journal import Journal

GROUPS = ("backend", "dtype", "calib", "model", "data", "preprocess")  # params of their own
MAIN = {*GROUPS, "method", "per_channel", "seed", "threads", "task.name", "evaluate.split"}


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of a config by their dotted keys, with values as JSON or plain text."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" == "tracking.uri" and value:
            yield f"{prefix}{key}", redact(value)
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def select(journal: Journal) -> dict[str, str]:
    """Return the params that MLflow shows, including those that the sweep sets for this job."""
    try:
        words = shlex.split(journal.tags.get("job_overrides", ""))
    except ValueError:  # an open quote: not what a sweep writes
        words = []
    shown = MAIN | {word.lstrip("+").partition("=")[0] for word in words}
    implied = _implied(journal.params)
    if journal.params.get("analysis.name", "null") != "null":
        shown |= {key for key in journal.params if key.startswith("analysis.")}
    return {
        key: value
        for key, value in journal.params.items()
        if key in shown or implied.get(key) != value
    }


def complete(params: Mapping[str, str]) -> dict[str, str]:
    """Return the params of a run with the settings that `select` left out.

    A run without settings, such as a sweep's parent run, stays unchanged.
    """
    return _implied(params) | dict(params) if "backend" in params else dict(params)


def _implied(params: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a run that follow from its groups."""
    names = {f"{group}.name": params[group] for group in GROUPS if group in params}
    chosen = {"backend": params.get("backend"), "data": params.get("data")}
    return _defaults(**chosen, task=params.get("task.name")) | names


@cache
def _defaults(**names: str | None) -> dict[str, str]:
    try:
        config: Any = OmegaConf.to_container(type_config(names))
    except OmegaConfBaseException:  # a store may name anything
        return {}
    return {key: value for key, value in flatten(config) if value != MISSING}
