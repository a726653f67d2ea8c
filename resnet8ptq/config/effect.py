"""Typed settings that have no effect with the other settings.

`schema` declares for each setting the other settings that it needs (`only`).
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from resnet8ptq.config import words
from resnet8ptq.config.limits import Limit, shown
from resnet8ptq.config.schema import find_fields

_GROUPS = ("backend", "dtype", "calib", "data", "preprocess", "task", "analysis", "benchmark")


def find_idle(
    cfg: DictConfig, typed: Sequence[Override], swept: Sequence[Override] = ()
) -> list[str]:
    """Return a line for each typed setting that has no effect in any job.

    Args:
        cfg: the composed config.
        typed: the settings of the command line.
        swept: the settings of the sweep's own config, which typed ones override.
    """
    lines = []
    for override in typed:
        key = override.key_or_group
        conditions = [
            [pair for item in way for pair in item.metadata.get("only", {}).items()]
            for way in find_fields(key)
        ]
        unmet = [_unmet(pairs, cfg, [*swept, *typed]) for pairs in conditions]
        if unmet and None not in unmet:
            lines.append(f"{key}: has no effect with {unmet[0]}")
    return lines


def _unmet(
    conditions: Sequence[tuple[str, Limit]], cfg: DictConfig, overrides: Sequence[Override]
) -> str | None:
    """Return the first condition that no job fulfils, as text; None if there is none."""
    for key, limit in conditions:
        got = _values(key, cfg, overrides)
        if not any(limit.holds(value) for value in got):
            name = key.removesuffix(".name")
            return f"{name}={' | '.join(map(shown, got))}; takes {name}={limit.takes}"
    return None


def _values(key: str, cfg: DictConfig, overrides: Sequence[Override]) -> list[Any]:
    """Return the values of a setting in the jobs."""
    group, _, name = key.rpartition(".")
    names = {key, group} if name == "name" and group in _GROUPS else {key}
    setting = [override for override in overrides if override.key_or_group in names]
    if setting and setting[-1].is_sweep_override():
        return words.values(setting[-1])
    return [OmegaConf.select(cfg, key)]
