"""Composes the config of each job of a sweep once.

Hydra's sweepers compose all jobs to check them, and its launchers compose them again: 0.1 s each.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

_load = ConfigLoaderImpl.load_sweep_config


@contextmanager
def once() -> Iterator[None]:
    """During the block, keep the config of a job until it is asked for again."""
    kept: dict[tuple[str, ...], bytes] = {}  # 25 kB each

    def load(
        loader: ConfigLoaderImpl, master_config: DictConfig, sweep_overrides: Sequence[str]
    ) -> DictConfig:
        key = tuple(sweep_overrides)
        pickled = kept.pop(key, None)
        if pickled is None:
            config = _load(loader, master_config, list(sweep_overrides))
            kept[key] = pickle.dumps(config)
            return config
        config = pickle.loads(pickled)
        # Values that are resolved once for the whole sweep, such as the time.
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config

    ConfigLoaderImpl.load_sweep_config = load  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_sweep_config = _load  # type: ignore[method-assign]
