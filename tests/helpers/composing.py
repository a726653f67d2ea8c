"""Hydra composes each choice of groups once for all tests of a process.

A config takes 0.01 s instead of 0.2 s, and each job of a sweep is composed three times. A `run.py`
in a process of its own composes as it always does. Compositions are kept by the config files'
folder and the groups; keys are set in a copy, by Hydra.
"""

import pickle
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

from hydra._internal import config_loader_impl as hydra
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

T = TypeVar("T")

_kept: dict[Hashable, bytes] = {}  # pickled: a copy is read five times as fast as OmegaConf copies
_PLACES = (
    (ConfigRepository, "load_config"),
    (hydra, "create_defaults_list"),
    (hydra.ConfigLoaderImpl, "_compose_config_from_defaults_list"),
)
_load, _list_defaults, _compose = tuple(getattr(*target) for target in _PLACES)


@contextmanager
def once() -> Iterator[None]:
    """Compose each choice of groups once during the block, and in later ones."""
    with ExitStack() as stack:
        for target, function in zip(_PLACES, (load, list_defaults, compose), strict=True):
            stack.enter_context(mock.patch.object(*target, function))
        # Hydra copies its sources for each config, and with them every schema: 0.02 s.
        stack.enter_context(
            mock.patch.object(ConfigStore, "__deepcopy__", lambda store, _: store, create=True)
        )
        yield


def keep(repo: IConfigRepository, make: Callable[[], T], *words: Hashable) -> T:
    key = (*((source.provider, source.path) for source in repo.get_sources()), *words)
    if key not in _kept:
        _kept[key] = pickle.dumps(make())
    return pickle.loads(_kept[key])


def load(repo: ConfigRepository, config_path: str) -> Any:
    return keep(repo, lambda: _load(repo, config_path), "file", config_path)


def list_defaults(
    repo: IConfigRepository, config_name: str | None, overrides_list: list[Override], **how: bool
) -> DefaultsList:
    groups = [override for override in overrides_list if repo.group_exists(override.key_or_group)]
    keys = [
        override
        for override in overrides_list
        if override not in groups and not override.is_sweep_override()
    ]
    words = (config_name, *(override.input_line for override in groups), *how.values())
    result = keep(repo, lambda: _list_defaults(repo, config_name, groups, **how), "list", *words)
    return replace(result, config_overrides=[*result.config_overrides, *keys])


def compose(loader: Any, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
    return keep(repo, lambda: _compose(loader, defaults, repo), "config", repr(defaults))
