"""Sweeps whose jobs run at once (hydra/launcher=joblib): the same results, and no lost run."""

import multiprocessing
import pickle
import signal
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import joblib
import numpy as np
import pytest
from conftest import NO_REAL_FILES, REPO, Called, call
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from test_run import QUICK, cell_of, interrupt

from resnet8ptq import environment, jobs
from resnet8ptq.config import register_schemas
from resnet8ptq.errors import ConfigError

if TYPE_CHECKING:
    from mlflow.entities import Run

PARALLEL = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")


def count(*overrides: str) -> int:
    register_schemas()
    with initialize_config_dir(str(REPO / "conf"), version_base="1.3"):
        config = compose("config", overrides=list(overrides), return_hydra_config=True)
    return jobs.count(config.hydra.launcher)


def test_jobs_at_once_are_the_launchers() -> None:
    assert count() == 1
    assert count(*PARALLEL) == 2
    assert count("hydra/launcher=joblib") == joblib.cpu_count()


def test_no_jobs_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.n_jobs: got 0, takes 1 or more"):
        count("hydra/launcher=joblib", "hydra.launcher.n_jobs=0")


@given(st.integers(1, 300))
def test_the_threads_of_all_jobs_fit_the_cores(at_once: int) -> None:
    cores, share = environment.threads(None), jobs.share_threads(None, at_once)
    assert share >= 1
    assert share * at_once <= max(cores, at_once)
    assert (share + 1) * at_once > cores  # none is left idle
    assert jobs.share_threads(7, at_once) == 7


class TwoArgumentsError(Exception):
    """Which pickle cannot make again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ConfigError("a key"), ConfigError), (TwoArgumentsError("a", "key"), RuntimeError)],
)
def test_every_error_reaches_the_parent_with_its_traceback(
    error: Exception, kind: type[Exception]
) -> None:
    try:
        raise error
    except Exception as raised:
        found = pickle.loads(pickle.dumps(jobs.to_picklable(raised)))
    assert type(found) is kind
    assert "a key" in str(found)
    assert f"raise error\n{''.join(found.__notes__).splitlines()[-1]}" in found.__notes__[0]


def test_a_worker_can_start_processes() -> None:
    def start_another() -> str:
        jobs.enter_worker()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(str, "done").result()

    assert joblib.Parallel(n_jobs=2)([joblib.delayed(start_another)()] * 2) == ["done", "done"]


# Serially and at once: two frameworks, two calibrations that work, and one that fails.
CELLS = (
    *("-m", *QUICK, "backend=onnx,torch", "calib=percentile", "calib.percentile=99.9,120,99"),
    *("calib.samples_per_class=20", "evaluate.split=held_out", "held_out_images=1000"),
)
MEASURED = {
    *("quantize_s", "evaluate_s", "images_per_s", "peak_memory_bytes"),
    *("evaluate_batch_size", "evaluate_threads"),
}


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Called:
    return call(tmp_path_factory.mktemp("serial"), *CELLS, **NO_REAL_FILES)


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Called:
    return call(tmp_path_factory.mktemp("parallel"), *CELLS, *PARALLEL, **NO_REAL_FILES)


@pytest.mark.slow
def test_jobs_at_once_have_one_parent_and_lose_no_run(serial: Called, parallel: Called) -> None:
    statuses = ["ok", "failed", "ok"] * 2
    for sweep in (serial, parallel):
        assert [run.data.tags["status"] for run in sorted_children(sweep)] == statuses
        assert len(sweep.runs) == 7
        assert (sweep.parent.info.status, sweep.parent.data.tags["status"]) == ("FAILED", "failed")
        assert sweep.code == 1
        assert sweep.errors == ["error: calib.percentile: got 120.0, takes 50 < p <= 100"]
        assert "Traceback" not in sweep.err
        assert "Warning" not in sweep.err
        assert {"report.md", "report.html", "runs.csv"} <= set(sweep.artifacts(sweep.parent))
    assert parallel.table == serial.table


@pytest.mark.slow
def test_jobs_at_once_find_the_same_to_the_last_prediction(
    serial: Called, parallel: Called
) -> None:
    pairs = list(zip(sorted_children(serial), sorted_children(parallel), strict=True))
    for one, other in pairs:
        assert one.info.run_name == other.info.run_name
        assert without(one.data.params, {"threads"}) == without(other.data.params, {"threads"})
        assert without(one.data.metrics, MEASURED) == without(other.data.metrics, MEASURED)
        theirs, ours = serial.artifacts(one), parallel.artifacts(other)
        assert set(theirs) == set(ours)
        if one.data.tags["status"] != "ok":
            continue
        with np.load(theirs["predictions.npz"]) as a, np.load(ours["predictions.npz"]) as b:
            assert set(a) == set(b)
            for name in a:
                np.testing.assert_array_equal(a[name], b[name])
        model = "model.onnx" if cell_of(one)[0] == "onnx" else "model.pt"
        assert theirs[model].read_bytes() == ours[model].read_bytes()


@pytest.mark.slow
def test_jobs_at_once_share_the_cores_and_say_so(serial: Called, parallel: Called) -> None:
    cores = environment.threads(None)
    for sweep, at_once in ((serial, 1), (parallel, 2)):
        for run in sweep.children:
            assert run.data.params["threads"] == str(max(1, cores // at_once))
            assert run.data.tags["jobs_at_once"] == str(at_once)
    assert "2 jobs at once" in parallel.artifacts(parallel.parent)["report.md"].read_text()
    assert "at once" not in serial.artifacts(serial.parent)["report.md"].read_text()


@pytest.mark.slow
def test_terminated_jobs_are_closed_and_leave_no_process(tmp_path: Path) -> None:
    found = interrupt(tmp_path, signal.SIGTERM, 2, *PARALLEL)
    assert found.code == 143
    assert len(found.children) == 2
    for run in (found.parent, *found.children):
        assert (run.info.status, run.data.tags["status"]) == ("KILLED", "killed")
    assert "Traceback" not in found.err


def sorted_children(sweep: Called) -> list["Run"]:
    return sorted(sweep.children, key=lambda run: int(run.data.tags["job_number"]))


def without(values: dict[str, object], keys: set[str]) -> dict[str, object]:
    return {key: value for key, value in values.items() if key not in keys}
