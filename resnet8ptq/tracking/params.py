"""The params of a run in MLflow: the settings that matter, and the main resolved values.

A run has a hundred settings, but the user chose only a few. `result.json` has all of them; see
`details`. `complete` adds the defaults of the settings that MLflow does not show.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field
from functools import cache
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from resnet8ptq.config.loading import type_config
from resnet8ptq.config.schema import CalibConfig, ModelConfig, find_fields
from resnet8ptq.config.words import key_of
from resnet8ptq.core.text import redact
from resnet8ptq.tracking.journal import Journal

MOST = 25  # most params that MLflow shows of a run
PROVIDER = "backend.provider"
# Config groups, of which the chosen option is a param.
GROUPS = ("backend", "dtype", "calib", "model", "data", "preprocess")
MAIN = (
    *GROUPS,
    "calib.percentile",
    "method",
    "per_channel",
    "seed",
    "threads",
    "task.name",
    "benchmark.name",
)
# Settings of the program around a run.
_OUTSIDE = ("report.columns", "sweep.", "tracking.", "cache_dir", "per_backend.")
# Values that the run resolved, and that MLflow shows.
RESOLVED = (
    "dataset",
    "scored_as",
    "weight_dtype",
    "activation_dtype",
    "execution",
    "engine",
    "excluded_nodes",
    "planned_bits",
    "cut_short",
)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of a config as (dotted key, text); values other than texts become JSON.

    The secrets in `tracking.uri` are left out, see `core.text.redact`.

    >>> dict(flatten({"calib": {"name": "mse", "images": None}}))
    {'calib.name': 'mse', 'calib.images': 'null'}
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" == "tracking.uri" and value:
            yield f"{prefix}{key}", redact(value)
        elif isinstance(value, str):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", json.dumps(value)


_UNSET = ("null", "[]", "{}")


def select(journal: Journal) -> dict[str, str]:
    """Return the params that MLflow shows, at most `MOST`.

    A setting is shown if it had an effect, and is a main setting, set by the sweep for this job, or
    not the default. An analysis also shows its own settings. If there are too many, the first are
    shown; settings with a value come before unset settings. Resolved values, which a run logs
    later, have reserved places, so that they remove no setting.
    """
    # Order the settings: main ones, then swept ones, then those changed otherwise
    params = journal.params
    implied = _implied(params)
    ordered = dict.fromkeys((*MAIN, *_find_swept(journal)))
    analysis = params.get("analysis.name", "null") != "null"
    for key in params:
        is_changed = implied.get(key) != params[key] and find_fields(key)
        is_of_analysis = analysis and key.startswith("analysis.")
        if is_changed or is_of_analysis:
            ordered[key] = None

    # Unset settings come last, because they may have to leave room for resolved values
    chosen = [key for key in ordered if _has_effect(key, params, implied)]
    chosen.sort(key=lambda key: params.get(key) in _UNSET)
    shown = [*chosen[: MOST - len(RESOLVED)], *RESOLVED]
    return {key: params[key] for key in shown if key in params}


def find_changed(params: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a run that differ from their defaults and had an effect."""
    implied = _implied(params)
    changed = {}
    for key, value in params.items():
        if implied.get(key) != value and find_fields(key) and _has_effect(key, params, implied):
            changed[key] = value
    return changed


def _find_swept(journal: Journal) -> list[str]:
    """Return the keys that the sweep sets for this job."""
    try:
        overrides = shlex.split(journal.tags.get("job_overrides", ""))
    except ValueError:  # no sweep writes an open quote
        overrides = []
    return [key_of(word) for word in overrides]


def _has_effect(key: str, params: Mapping[str, str], implied: Mapping[str, str]) -> bool:
    """Return whether a setting had an effect on a run, and a value in the run or by default.

    Settings that another param shows, or that concern the program around a run, do not count.
    """
    group, _, name = key.rpartition(".")
    value = params.get(key, "null")
    is_unset = value in _UNSET and implied.get(key, value) in _UNSET
    if is_unset or (name == "name" and group in GROUPS):
        return False
    if (key, value) == ("task.name", "auto"):  # `scored_as` names the task
        return False
    if key.startswith(_OUTSIDE):
        return False
    return applies(key, params)


def applies(key: str, params: Mapping[str, str]) -> bool:
    """Return whether a setting has an effect with the other settings of a run.

    A key that this version does not know has no conditions, and counts.

    >>> [applies("calib.samples_per_class", {"method": way}) for way in ("static", "weight_only")]
    [True, False]
    """
    ways = find_fields(key)
    if not ways:  # unknown to the schema of this version, so without conditions
        return True
    return any(_is_met(way, params) for way in ways)


def _is_met(way: Sequence[Field[Any]], params: Mapping[str, str]) -> bool:
    """Return whether the settings of a run fulfil the conditions of all fields that lead to a key.

    Conditions on settings that the run lacks do not count.
    """
    for item in way:
        for other, limit in item.metadata.get("only", {}).items():
            if other in params and not limit.holds(_parse(params[other])):
                return False
    return True


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # plain text
        return text


def complete(params: Mapping[str, str]) -> dict[str, str]:
    """Return the params of a run with the defaults of the settings that are missing.

    A run without settings, such as a sweep's parent run, gets no defaults.
    """
    if "backend" not in params:
        return dict(params)
    return _implied(params) | dict(params)


def _implied(params: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults of all settings, with those of a run's backend, data and task.

    The names of the options that the run chose from the groups are added.
    """
    implied = _defaults(
        backend=params.get("backend"), data=params.get("data"), task=params.get("task.name")
    )
    names = {f"{group}.name": params[group] for group in GROUPS if group in params}
    return implied | names


@cache
def _defaults(**names: str | None) -> dict[str, str]:
    """Return the defaults of all settings; an unknown option adds none."""
    try:
        typed = type_config(names)
        typed.calib = CalibConfig
        typed.model = ModelConfig
        config: Any = OmegaConf.to_container(typed)
    except OmegaConfBaseException:  # params in a store may name anything
        return {}
    return {key: value for key, value in flatten(config) if value != MISSING}
