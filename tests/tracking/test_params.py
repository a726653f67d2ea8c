"""The params that MLflow shows, and the settings that a reader adds again."""

from dataclasses import asdict

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from resnet8ptq.config import schema
from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tracking import params
from resnet8ptq.tracking.journal import Journal
from tests.helpers.configs import make_config

SPECIAL = ("file",)  # its settings come from its file
CHANGES = [
    *("per_channel=true", "slim=true", "float_output=true", "seed=1", "threads=1"),
    *("corrections.adaround=true", "corrections.adaround_iterations=7", "calib.percentile=99.9"),
    *("calib.num_bins=4096", "calib.averaging_constant=0.1", "qat.epochs=1", "latency.repeats=7"),
    *("report.max_drop=0.02", "evaluate.batch_size=8", "weight_only.block_size=64"),
    *("memory_gb=2", "max_seconds=9", "held_out_images=9", "nodes_to_exclude=auto"),
    *("attention=all", "reduce_range=true", "symmetric.weights=true", "latency.threads=1"),
]
# A setting, and what lets it have an effect.
NEEDS = {
    "calib.percentile": "percentile",
    "calib.averaging_constant": "moving_average",
    "corrections.adaround_iterations": "corrections.adaround=true",
    "qat.epochs": "qat",
    "weight_only.block_size": "weight_only",
    "max_drop": "nodes_to_exclude=auto",
}
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
def test_a_reader_without_the_file_gets_the_settings_back(words):
    """`result.json` has them all; these are of a run that did not write it."""
    journal = journal_of(*words)
    result = params.complete(params.select(journal))
    lost = {key for key, value in journal.params.items() if result.get(key) != value}
    assert lost == set()


@given(
    st.sampled_from(sorted(find_backends())),
    st.sampled_from(sorted(schema.DTYPES)),
    st.sampled_from(["static", "dynamic", "qat", "weight_only"]),
    st.sampled_from(["minmax", "entropy", "percentile", "mse", "moving_average", "histogram"]),
    st.sets(st.sampled_from(CHANGES)),
)
def test_at_most_25_params_are_shown_each_with_an_effect(backend, dtype, method, calib, changes):
    options = [] if backend in SPECIAL else [f"backend={backend}"]
    words = (*options, f"dtype={dtype}", f"method={method}", f"calib={calib}", *sorted(changes))
    try:
        journal = journal_of(*words)
    except ConfigError:  # settings that contradict each other
        reject()
    journal.params |= dict.fromkeys(params.RESOLVED, "x")
    shown = params.select(journal)
    assert len(shown) <= params.MOST
    assert not {"null", "[]", "{}"} & {*shown.values()}
    assert set(params.RESOLVED) <= shown.keys()
    if dtype == "fp32":
        assert not {"calib", "per_channel", "corrections.adaround"} & shown.keys()
    for key, needed in NEEDS.items():
        if key in shown:
            assert needed in (calib, method) or needed in changes, key


def test_later_values_remove_no_param():
    """MLflow keeps a param once it is logged."""
    journal = journal_of("calib=percentile", "corrections.adaround=true")
    before = params.select(journal)
    journal.params |= {"dataset": "shapes", "cut_short": "x", "opset": "17"}
    after = params.select(journal)
    assert before.items() < after.items()
    assert after.keys() - before.keys() == {"dataset", "cut_short"}


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


def test_changed_settings_are_those_that_made_the_file():
    """`backend=torch` alone names another model than `backend=torch_pt2e`."""
    words = ("backend=torch_pt2e", "calib=percentile", "calib.percentile=99.9", "slim=true")
    changed = params.find_changed(journal_of(*words, "qat.epochs=7").params)
    assert changed["backend.flow"] == "pt2e"
    assert changed["calib.percentile"] == "99.9" and changed["slim"] == "true"
    assert not {"calib.num_bins", "qat.epochs", "backend.engine"} & changed.keys()
