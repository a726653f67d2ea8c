"""The params that MLflow shows, and the settings that a reader adds again."""

from dataclasses import asdict

import pytest

from resnet8ptq.tracking import params
from resnet8ptq.tracking.journal import Journal
from tests.helpers.configs import make_config

RUNS = [
    (),
    ("backend=torch", "dtype=u8s8", "per_channel=true"),
    ("backend=tflite", "calib=percentile", "calib.percentile=99.9"),
    ("data=arrays", "data.root=x.npz", "task=binary", "task.threshold=0.3"),
    ("backend=torch_pt2e", "data=table", "data.root=x.csv", "corrections.adaround=true"),
    ("model.path=a.onnx", "preprocess=unit", "latency.repeats=7", "seed=3"),
]


def journal_of(*words: str, overrides: str = "") -> Journal:
    flat = dict(params.flatten(asdict(make_config(*words))))
    flat |= {group: flat.get(f"{group}.name", "") for group in params.GROUPS}
    tags = {"job_overrides": overrides} if overrides else {}
    return Journal(name="run", experiment="x", start_ms=0, params=flat, tags=tags)


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_a_reader_gets_every_setting_back(words):
    journal = journal_of(*words)
    shown = params.select(journal)
    assert params.complete(shown) == journal.params
    assert len(shown) <= 30


def test_chosen_settings_are_shown_and_defaults_are_not():
    shown = params.select(journal_of("calib=percentile", "calib.percentile=99.9"))
    assert (shown["calib"], shown["calib.percentile"]) == ("percentile", "99.9")
    assert not {"qat.epochs", "backend.name", "preprocess.filter"} & {*shown}


def test_an_analysis_shows_its_settings():
    assert not [key for key in params.select(journal_of()) if key.startswith("analysis.")]
    shown = params.select(journal_of("+analysis=sensitivity"))
    assert shown["analysis.mode"] == "one_at_a_time"


def test_a_setting_that_a_sweep_varies_is_shown_at_its_default_too():
    assert "slim" not in params.select(journal_of())
    assert params.select(journal_of(overrides="slim=false"))["slim"] == "false"
    assert params.select(journal_of(overrides="an open ' quote"))


@pytest.mark.parametrize("stored", [{}, {"a": "1"}, {"backend": "\x1b", "data": "../../x"}])
def test_params_of_others_are_kept(stored):
    complete = params.complete(stored)
    assert stored.items() <= complete.items()
    assert ("backend" in stored) or complete == stored
