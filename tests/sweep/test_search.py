"""Searches: what a sweeper is told, the front, and a small search of the embedded set."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra.types import RunMode
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from omegaconf import OmegaConf

from resnet8ptq.config.schema import OBJECTIVES, ReportConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.report import page, pareto, trade_off
from resnet8ptq.sweep.objectives import prepare, to_return_value
from studies.search_grid import read_grid, runs_to_best, runs_to_front
from tests.helpers.calling import NO_REAL_FILES, REPO, RUN, Called, call
from tests.helpers.cells import predictions, record, sweep
from tests.helpers.configs import compose_whole, make_config
from tests.helpers.pages import to_page

SPACE = ("experiment=search", "data=shapes", "calib=percentile", "per_backend.onnx.slim=true")
QUICK = ("latency.repeats=5", "latency.batch_repeats=1", "held_out_images=500")


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


@given(points, st.floats(0, 0.3))
def test_a_thinned_front_has_one_of_each_kind(costs: np.ndarray, tolerance: float) -> None:
    """What is left out has one on the front that it is not noticeably better than in anything."""
    tolerances = [0.0, *[tolerance] * (costs.shape[1] - 1)]
    kept = pareto.thin(costs, tolerances)
    assert kept.any()
    slack = np.abs(costs) * tolerances
    for point in np.flatnonzero(~kept):
        assert (costs[point] + slack[point] >= costs[kept]).all(axis=1).any()
    assert pareto.thin(costs[pareto.mask(costs)], [0.0] * costs.shape[1]).all()


def test_a_few_bytes_make_no_place_on_the_front() -> None:
    """Less accurate and 8 bytes smaller, or as accurate and within the noise of the latency."""
    searched = {"objectives": '["size_bytes", "accuracy", "latency_p50_ms"]'}
    measured = (
        ("best", 5, 100_008.0, 1.0),
        ("bytes", 4, 100_000.0, 1.0),
        ("noise", 5, 100_300.0, 0.98),
        ("small", 3, 90_000.0, 1.0),
        ("fast", 2, 100_008.0, 0.5),
    )
    found = sweep(
        *(
            (name, predictions(won=won), {**searched, "size_bytes": size, "latency_p50_ms": ms})
            for name, won, size, ms in measured
        )
    )
    front = pareto.find(found)
    assert front is not None
    assert {cell.record.run_id for cell in front.members} == {"best", "small", "fast"}


def test_a_sweeper_is_told_what_it_asked_for() -> None:
    measured = record("a", predictions(lost=10))  # 890 of 1,000 right, the baseline 900
    assert to_return_value(measured, ["accuracy", "size_bytes"]) == [0.89, 1e5]
    assert to_return_value(measured, ["size_bytes"]) == 1e5
    assert to_return_value(measured, ["accuracy", "latency_p50_ms"]) is None
    assert to_return_value(measured, None) == pytest.approx(0.01)
    unsupported = replace(measured, metrics={})
    assert to_return_value(unsupported, ["accuracy"]) is None
    assert to_return_value(unsupported, None) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objectives=[beauty]"], "objectives: got 'beauty', takes accuracy | "),
        (
            ["objectives=[accuracy,accuracy]"],
            "objectives: got ['accuracy', 'accuracy'], takes each metric once",
        ),
        (
            ["objectives=[accuracy,size_bytes]"],
            "hydra.sweeper.direction: got [maximize, minimize, minimize], takes "
            "[maximize, minimize] for accuracy size_bytes",
        ),
        (["objectives=null"], "takes [minimize] for the drop"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_trial(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(compose_whole("experiment=search", *overrides))
    assert message in str(caught.value)


def test_every_objective_is_a_metric_with_a_direction() -> None:
    assert set(OBJECTIVES.values()) == {"maximize", "minimize"}
    for name in OBJECTIVES:
        make_config(f"objectives=[{name}]")
    with pytest.raises(ConfigError, match=r"latency\.enabled: got false, takes true with"):
        make_config("objectives=[speedup]", "latency.enabled=false")


def test_other_sweepers_still_get_the_drop() -> None:
    assert prepare(compose_whole()) == {}
    assert prepare(compose_whole("hydra/sweeper=optuna")) == {}


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
    found.cells[0].record.tags["job_overrides"] = "an open ' quote"  # from who knows where
    front = pareto.find(found)
    assert front is not None
    assert len(front.commands) == 1
    assert [cell.record.run_id for cell in front.members] == ["best", "small"]
    text = page.to_markdown(page.select([found], ReportConfig()), {})
    section = text.split("## Pareto front")[1].split("## All runs")[0]
    assert "| configuration | accuracy | size kB |" in section
    assert "| onnx uint8 minmax per tensor | 90.50% | 100.0 |" in section
    assert "held-out training samples, not test samples" in section
    assert (
        "    python -m resnet8ptq run experiment=search 'op_types=[Conv, Gemm]' "
        "evaluate.split=test hydra.mode=RUN" in section
    )
    (size,) = trade_off.panels(*page.select([found], ReportConfig()))
    assert sum(point.ring for point in size.points) == len(front.members)
    assert to_page(found).count('class="ring"') == len(front.members)


def test_a_sweep_that_looks_for_nothing_has_no_front() -> None:
    found = sweep(("a", predictions(), {}))
    assert pareto.find(found) is None
    assert "Pareto" not in page.to_markdown(page.select([found], ReportConfig()), {})


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
    assert line.endswith("search: pip install 'resnet8ptq[search]'")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Called:
    """Eight configurations, proposed twelve times: two are done, two unsupported, four refused."""
    folder = tmp_path_factory.mktemp("search")
    fixed = ("backend=torch", "per_channel=false", "per_backend.onnx.format=qdq")
    space = ("dtype=choice(uint8,int8)", "calib.num_bins=choice(2048,2047)", "seed=choice(1,2)")
    trials = ("per_backend.onnx.float_output=false", "hydra.sweeper.n_trials=12")
    return call(folder, *SPACE, *QUICK, *fixed, *space, *trials, **NO_REAL_FILES)


def test_a_search_goes_on_past_what_is_unsupported_or_fails(searched: Called) -> None:
    states = [run.data.tags["status"] for run in searched.children]
    assert set(states) == {"ok", "unsupported", "failed"}, searched.err
    assert (searched.parent.data.tags["status"], searched.code) == ("failed", 1)
    assert searched.parent.data.tags["objectives"] == "accuracy size_bytes latency_p50_ms"
    assert "Warning" not in searched.err
    assert "Failed experiment" not in searched.err


def test_what_is_proposed_again_is_not_run_again(searched: Called) -> None:
    finished = [r.data.tags["identity"] for r in searched.children if r.info.status == "FINISHED"]
    assert len(set(finished)) == len(finished)
    assert len(searched.children) < 12
    assert "skipped, finished as run" in searched.err


def test_the_front_in_the_report_is_that_of_its_runs(searched: Called) -> None:
    runs = [run for run in searched.children if run.data.tags["status"] == "ok"]
    names = ("accuracy", "size_bytes", "latency_p50_ms")
    costs = np.array([[run.data.metrics[name] for name in names] for run in runs]) * (-1, 1, 1)
    files = searched.artifacts(searched.parent)
    section = files["report.md"].read_text().split("## Pareto front")[1].split("## All runs")[0]
    commands = [line for line in section.splitlines() if line.startswith(f"    python {RUN}")]
    assert len(commands) == pareto.mask(costs).sum()
    solutions = OmegaConf.load(files["optimization_results.yaml"]).solutions
    found = {tuple(solution["values"]) for solution in solutions}
    assert found == {tuple(row) for row in (costs * (-1, 1, 1))[pareto.mask(costs)].tolist()}


def test_a_command_of_the_report_is_one_run_on_the_test_images(searched: Called) -> None:
    report_md = searched.artifacts(searched.parent)["report.md"].read_text()
    command = next(line for line in report_md.splitlines() if line.startswith(f"    python {RUN}"))
    words = shlex.split(command)[2:]
    assert compose_whole(*words).hydra.mode == RunMode.RUN
    config = make_config(*words[:-1])
    assert (config.evaluate.split, config.backend.name) == ("test", "torch")


def test_the_recorded_grid_is_that_of_the_search() -> None:
    grid = read_grid()  # which checks it
    costs = grid.costs(grid.found)
    assert (costs.min(), costs.max()) == (0, 1)
    best = next(iter(grid.best))
    whole, one = grid.hypervolume(grid.found), grid.hypervolume([best])
    assert 0 < one < whole < 1.1**3
    order = [run for run in grid.found if run not in grid.best]
    assert runs_to_best(grid, [*order, best]) == len(order) + 1
    assert runs_to_best(grid, order) == np.inf
    assert runs_to_front(grid, list(grid.found)) <= len(grid.found)
