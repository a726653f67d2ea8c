"""Searches: what a sweeper is told, the front, and a small search of the embedded set."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cells import predictions, sweep
from conftest import NO_REAL_FILES, REPO, Called, call, make_config
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from omegaconf import DictConfig

from resnet8ptq import pareto, report, search, sweep_plots
from resnet8ptq.config import OBJECTIVES, ReportConfig, register_schemas
from resnet8ptq.errors import ConfigError
from resnet8ptq.results import RunResult

SPACE = ("experiment=search", "data=shapes", "calib=minmax", "per_backend.onnx.slim=true")
QUICK = ("latency.repeats=5", "latency.batch_repeats=1", "held_out_images=500")


class Measured(RunResult):
    """A result with figures, and without the models that they come from."""

    def to_metrics(self) -> dict[str, float]:
        return {"accuracy": 0.9, "size_bytes": 1e5}


def compose_whole(*overrides: str) -> DictConfig:
    register_schemas()
    with initialize_config_dir(str(REPO / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


# Few levels, so that there are ties.
points = arrays(
    np.float64, st.tuples(st.integers(1, 12), st.integers(1, 4)), elements=st.integers(0, 3)
)


@given(points)
def test_the_front_is_what_nothing_dominates(costs: np.ndarray) -> None:
    def dominated(point: np.ndarray) -> bool:
        return any((other <= point).all() and (other < point).any() for other in costs)

    found = pareto.mask(costs)
    assert found.tolist() == [not dominated(point) for point in costs]
    assert found.any()


def test_the_front_by_hand() -> None:
    costs = np.array([(1.0, -0.5), (2.0, -0.4), (2.0, -0.7), (2.0, -0.7), (3.0, -0.7), (4.0, -0.9)])
    assert pareto.mask(costs).tolist() == [True, False, True, True, False, True]


def test_a_sweeper_is_told_what_it_asked_for() -> None:
    result = Measured("ok")
    assert search.to_return_value(result, ["accuracy", "size_bytes"]) == [0.9, 1e5]
    assert search.to_return_value(result, ["size_bytes"]) == 1e5
    assert search.to_return_value(result, ["accuracy", "latency_p50_ms"]) is None
    assert search.to_return_value(RunResult("unsupported", "why"), ["accuracy"]) is None
    assert search.to_return_value(RunResult("unsupported", "why"), None) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objectives=[beauty]"], "objectives: got 'beauty', takes accuracy | "),
        (["objectives=[accuracy,accuracy]"], "objectives: got accuracy accuracy, takes each once"),
        (
            ["objectives=[accuracy,size_bytes]"],
            "hydra.sweeper.direction: got [maximize, minimize, minimize], takes "
            "[maximize, minimize] for accuracy size_bytes",
        ),
        (["objectives=null"], "takes [minimize] for the accuracy drop"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_trial(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        search.prepare(compose_whole("experiment=search", *overrides))
    assert message in str(caught.value)


def test_every_objective_is_a_metric_with_a_direction() -> None:
    assert set(OBJECTIVES.values()) == {"maximize", "minimize"}
    for name in OBJECTIVES:
        make_config(f"objectives=[{name}]")
    with pytest.raises(ConfigError, match=r"latency\.enabled: got false, takes true with"):
        make_config("objectives=[speedup]", "latency.enabled=false")


def test_other_sweepers_still_get_the_accuracy_drop() -> None:
    assert search.prepare(compose_whole()) == {}
    assert search.prepare(compose_whole("hydra/sweeper=optuna")) == {}


def test_every_axis_of_the_search_composes() -> None:
    params = compose_whole("experiment=search").hydra.sweeper.params
    for key, values in params.items():
        cells = [make_config("experiment=search", f"{key}={v}") for v in str(values).split(",")]
        assert len({str(cell) for cell in cells}) == len(cells)
    assert make_config("experiment=search", "per_backend.onnx.slim=true").slim
    assert not make_config("experiment=search", "backend=torch", "per_backend.onnx.slim=true").slim


def test_the_report_lists_the_front_and_what_to_type() -> None:
    searched = {"objectives": '["accuracy", "size_bytes"]', "evaluate.split": "held_out"}
    found = sweep(
        ("small", predictions(lost=5), {**searched, "size_bytes": 9e4}),
        ("best", predictions(won=5), {**searched, "size_bytes": 1e5, "dtype": "uint8"}),
        ("worse", predictions(lost=9), {**searched, "size_bytes": 1e5, "dtype": "u8s8"}),
    )
    found.cells[1].record.tags["job_overrides"] = (
        "experiment=search evaluate.split=held_out 'op_types=[Conv, Gemm]' hydra.sweeper.n_trials=3"
    )
    front = pareto.find(found)
    assert front is not None
    assert [cell.record.run_id for cell in front.members] == ["best", "small"]
    text = report.to_markdown(found, ReportConfig(), {})
    section = text.split("## Pareto front")[1].split("## All runs")[0]
    assert "| configuration | accuracy | size kB |" in section
    assert "| onnx uint8 minmax per tensor | 90.50% | 100.0 |" in section
    assert "held-out training images, not test images" in section
    assert (
        "    python run.py experiment=search 'op_types=[Conv, Gemm]' evaluate.split=test "
        "hydra.mode=RUN" in section
    )
    figure = sweep_plots.trade_offs(found)
    assert figure is not None
    assert "on the front of the search" in {t.get_text() for t in figure.legends[0].get_texts()}


def test_a_sweep_that_looks_for_nothing_has_no_front() -> None:
    found = sweep(("a", predictions(), {}))
    assert pareto.find(found) is None
    assert "Pareto" not in report.to_markdown(found, ReportConfig(), {})


def test_without_the_extra_one_line_names_it(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.modules['hydra_plugins.hydra_optuna_sweeper'] = None; "
        "sys.path.insert(0, %r); runpy.run_path(sys.path[0] + '/run.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code % str(REPO), "experiment=search"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line.endswith("search: pip install -c constraints.txt -e '.[search]'")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Called:
    """Torch alone does not do uint8, and `seed=-1` is refused: neither ends the search."""
    folder = tmp_path_factory.mktemp("search")
    space = ("backend=torch", "dtype=choice(uint8,int8)", "per_channel=choice(false,true)")
    trials = ("seed=choice(42,-1)", "hydra.sweeper.n_trials=6", "per_backend.onnx.format=qdq")
    fixed = ("per_backend.onnx.float_output=false",)
    return call(folder, *SPACE, *QUICK, *space, *trials, *fixed, **NO_REAL_FILES)


def test_a_search_goes_on_past_what_is_unsupported_or_fails(searched: Called) -> None:
    states = [run.data.tags["status"] for run in searched.children]
    assert set(states) == {"ok", "unsupported", "failed"}
    assert searched.parent.data.tags["status"] == "failed"
    assert searched.code == 1
    assert "Warning" not in searched.err
    assert "Failed experiment" not in searched.err
