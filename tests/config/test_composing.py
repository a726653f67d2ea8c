"""The config of a job is composed once, and each caller gets its own copy."""

from functools import partial

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from resnet8ptq.config import composing
from tests.helpers.calling import REPO


def test_a_job_is_composed_once_for_the_sweeper_and_the_launcher(monkeypatch):
    composed = []
    load = composing._load

    def count(loader, master, overrides):
        composed.append(overrides)
        return load(loader, master, overrides)

    monkeypatch.setattr(composing, "_load", count)
    with initialize_config_dir(str(REPO / "conf"), version_base="1.3"), composing.once():
        loader = GlobalHydra.instance().config_loader()
        master = compose("config", return_hydra_config=True)
        checked = loader.load_sweep_config(master_config=master, sweep_overrides=["seed=1"])
        launched = loader.load_sweep_config(master, ["seed=1"])
        other = loader.load_sweep_config(master, ["seed=2"])
    assert composed == [["seed=1"], ["seed=2"]]
    plain = partial(OmegaConf.to_container, resolve=False)
    assert plain(launched) == plain(checked) and launched is not checked
    assert (launched.seed, other.seed) == (1, 2)
    assert launched.hydra.overrides.task == ["seed=1"]


def test_a_later_sweep_composes_anew():
    with pytest.raises(KeyError), composing.once():
        raise KeyError
    assert composing.ConfigLoaderImpl.load_sweep_config is composing._load
