"""Sweeps whose jobs run in processes of their own: the same results, and no lost run or process."""

import filecmp
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from mlflow.entities import ViewType

from resnet8ptq.core import machine
from tests.helpers import forked, ray_head, slurm
from tests.helpers.calling import FAILS, NO_REAL_FILES, QUICK, Called, call
from tests.helpers.forked import Process, call_process, interrupt
from tests.helpers.stores import new_store

if TYPE_CHECKING:
    from mlflow.entities import Run

pytestmark = pytest.mark.slow

CORES = machine.threads(None)
LAUNCHERS = {
    "processes": ("hydra/launcher=processes",),
    "ray_local": ("hydra/launcher=ray_local", "hydra.launcher.ray.init.num_cpus=2"),
    "ray_cluster": ("hydra/launcher=ray_cluster",),
    "slurm": (
        *("hydra/launcher=slurm", "hydra.launcher.array_parallelism=2"),
        "+hydra.launcher.additional_parameters.chdir=/",  # jobs start in another folder
    ),
}
AT_ONCE = {"processes": CORES}  # the others: 2

CELLS = (*QUICK, *FAILS)
AFTER_KILLED = (*CELLS[:-1], "calib.num_bins=4096,2048,2047")  # the first job is killed
WRONG = (
    "error: calib.num_bins: got 2047, expected an even number > 2 * calib.num_quantized_bins = 256"
)
SHARED = {"threads", "evaluation"}  # params that depend on other jobs, and on the cache
MEASURED = {
    *("system/quantize_s", "system/evaluate_s", "system/peak_memory_mb"),
}


@pytest.fixture(scope="module", params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """A Slurm; without root or its packages, what needs it is skipped."""
    with slurm.run() as running:
        yield running


@pytest.fixture(scope="module")
def parallel(
    launcher: str,
    tmp_path_factory: pytest.TempPathFactory,
    started: "Started",
    cache_root: Path,
    request: pytest.FixtureRequest,
) -> Called:
    """A sweep with a cache of its own, so that it evaluates its files itself."""
    if launcher == "slurm":
        request.getfixturevalue("cluster")
    folder = tmp_path_factory.mktemp(launcher)
    new_store(folder / "mlruns")
    hidden = shutil.ignore_patterns(".*")  # locks, and entries that are not complete
    shutil.copytree(cache_root / "models", folder / "cache" / "models", ignore=hidden)
    env = {**NO_REAL_FILES, "RESNET8PTQ_CACHE": str(folder / "cache")}
    if launcher in ("processes", "ray_local"):
        cells = CELLS if launcher == "ray_local" else AFTER_KILLED
        return call_and_kill(folder, started, *cells, *LAUNCHERS[launcher], **env)
    with ray_head.run() if launcher == "ray_cluster" else nullcontext():
        return call_process(folder, "-m", *CELLS, *LAUNCHERS[launcher], **env)


def test_jobs_have_one_parent_and_lose_no_run(failing_sweep, launcher, parallel):
    both = ["ok", "failed"]
    expected_of_all = (both, ["killed", *both] if launcher == "processes" else both)
    for sweep, expected in zip((failing_sweep, parallel), expected_of_all, strict=True):
        statuses = [run.data.tags["status"] for run in sorted_children(sweep)]
        assert statuses == expected, sweep.err
        assert len(sweep.runs) == len(expected) + 1
        assert (sweep.parent.info.status, sweep.parent.data.tags["status"]) == ("FAILED", "failed")
        assert sweep.code == 1
        if "killed" in expected:
            (error,) = sweep.errors
            assert error.startswith("error: job #0 ")
            assert "ended with -9" in error
            assert f"failed: {WRONG.removeprefix('error: ')}" in " ".join(sweep.err.split())
        else:
            assert sweep.errors == [WRONG]
        assert "Traceback" not in sweep.err
        assert "Warning" not in sweep.err
        assert {"report.md", "report.html", "runs.csv"} <= set(sweep.artifacts(sweep.parent))
    if launcher == "processes":
        assert [row["status"] for row in parallel.table] == ["baseline", "killed", "ok", "failed"]
    if launcher == "ray_local":  # which has started the killed job again
        experiment = [parallel.parent.info.experiment_id]
        (killed,) = parallel.client.search_runs(experiment, run_view_type=ViewType.DELETED_ONLY)
        assert killed.data.tags["run_again_as"] == sorted_children(parallel)[0].info.run_id


def test_jobs_find_the_same_to_the_last_prediction(failing_sweep, parallel):
    finished = [run for run in sorted_children(parallel) if run.data.tags["status"] != "killed"]
    for one, other in zip(sorted_children(failing_sweep), finished, strict=False):
        assert one.info.run_name == other.info.run_name
        assert without(one.data.params, SHARED) == without(other.data.params, SHARED)
        assert without(one.data.metrics, MEASURED) == without(other.data.metrics, MEASURED)
        theirs, ours = failing_sweep.artifacts(one), parallel.artifacts(other)
        assert set(theirs) == set(ours)
        if one.data.tags["status"] != "ok":
            continue
        with np.load(theirs["predictions.npz"]) as a, np.load(ours["predictions.npz"]) as b:
            assert set(a) == set(b)
            for name in a:
                np.testing.assert_array_equal(a[name], b[name])
        assert filecmp.cmp(theirs["model.onnx"], ours["model.onnx"], shallow=False)


def test_jobs_share_the_cores_and_say_so(failing_sweep, launcher, parallel):
    at_once = AT_ONCE.get(launcher, 2)
    for sweep, tag, param in ((failing_sweep, 1, CORES), (parallel, at_once, 1)):
        ran = [run for run in sweep.children if run.data.tags["status"] != "killed"]
        assert len(ran) >= 2
        for run in ran:
            assert run.data.params["threads"] == str(param)
            assert run.data.tags["jobs_at_once"] == str(tag)
    report = parallel.artifacts(parallel.parent)["report.md"].read_text()
    assert (f"{at_once} jobs at once" in report) == (at_once > 1)
    assert "at once" not in failing_sweep.artifacts(failing_sweep.parent)["report.md"].read_text()


class Started:
    """The processes that the tests of this file start, and those that they start."""

    def __init__(self) -> None:
        self.mark = f"STARTED_BY={uuid.uuid4().hex}"

    def __iter__(self) -> Iterator[int]:
        """Go through those that have the mark in their environment; not this one."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended, or belongs to somebody else
                continue
            if self.mark in variables and int(path.parent.name) != os.getpid():
                yield int(path.parent.name)


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """Mark what the tests start; end what is left."""
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    forked.start_server()  # which is not ours
    result = Started()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*result.mark.split("="))
        yield result
    for process in result:
        os.kill(process, signal.SIGKILL)


@pytest.mark.usefixtures("shapes_model")  # a conversion would not be interrupted
def test_interrupted_jobs_are_closed_and_leave_no_process(tmp_path, started):
    result = interrupt(tmp_path, signal.SIGTERM, set("01"[:CORES]), *LAUNCHERS["processes"])
    assert result.code == 143
    assert len(result.children) == min(2, CORES)
    for run in (result.parent, *result.children):
        assert (run.info.status, run.data.tags["status"]) == ("KILLED", "killed")
    assert "Traceback" not in result.err
    assert list(started) == []


@pytest.mark.usefixtures("shapes_model")
def test_interrupted_jobs_of_slurm_are_cancelled(tmp_path, cluster):
    result = interrupt(tmp_path, signal.SIGINT, {"0", "1"}, *LAUNCHERS["slurm"])
    assert result.code == 130
    assert len(result.children) == 2
    for run in (result.parent, *result.children):
        assert (run.info.status, run.data.tags["status"]) == ("KILLED", "killed")
    assert "Traceback" not in result.err
    assert cluster.list_jobs("PENDING", "RUNNING") == []


def test_what_slurm_ends_is_named_and_run_again(tmp_path, cluster):
    # Jobs that are timed, so that none ends before it is cancelled.
    long = ("latency.enabled=true", "latency.repeats=20000", "latency.max_seconds=0.5")
    cells = (*QUICK, *long, "dtype=int8,uint8,u8s8")
    new_store(tmp_path / "mlruns")
    one_at_once = (*LAUNCHERS["slurm"][:1], "hydra.launcher.array_parallelism=1")
    with Process(tmp_path, "-m", *cells, *one_at_once, **NO_REAL_FILES) as process:
        process.wait_for_jobs({"0"})
        os.kill(find_job(0, cluster), signal.SIGKILL)
        process.wait_for_jobs({"1"})
        (running,) = cluster.list_jobs("RUNNING")
        cluster.cancel(running)
        ended = process.wait()
    assert ended.code == 1
    killed, cancelled, _ = (run.info.run_id for run in sorted_children(ended))
    assert [run.data.tags["status"] for run in sorted_children(ended)] == ["killed", "killed", "ok"]
    said = " ".join(ended.err.split())
    for number, state in enumerate(("FAILED", "CANCELLED")):
        assert f"job #{number} " in said
        assert f"Slurm reports {state}, and it left no result" in said

    resumed = call(tmp_path, "-m", *cells, "sweep.resume=true", **NO_REAL_FILES)
    assert resumed.code == 0, resumed.err
    assert "Skipped: 1 of 3 runs" in resumed.out
    children = sorted_children(resumed)
    assert [run.data.tags["job_number"] for run in children] == ["0", "1", "2"]
    assert {run.data.tags["status"] for run in children} == {"ok"}
    assert not {killed, cancelled} & {run.info.run_id for run in children}


@pytest.mark.usefixtures("cluster")
def test_what_slurm_refuses_is_reported_in_one_line(tmp_path):
    new_store(tmp_path / "mlruns")
    nowhere = "hydra.launcher.partition=nowhere"
    result = call(tmp_path, "-m", *QUICK, "dtype=int8", *LAUNCHERS["slurm"], nowhere)
    assert result.code == 1
    assert "Traceback" not in result.err
    assert "hydra/launcher=slurm: " in result.err
    assert "Invalid partition name specified" in result.err


def call_and_kill(folder: Path, pids: Iterable[int], *args: str, **env: str) -> Called:
    """Call a sweep, and kill its first job, which is one of the processes `pids`."""
    with Process(folder, "-m", *args, **env) as process:
        process.wait_for_jobs({"0"})
        os.kill(find_job(0, pids), signal.SIGKILL)
        return process.wait()


def find_job(number: int, pids: Iterable[int]) -> int:
    """Return the process that writes the log of the job."""
    for process in pids:
        for file in Path(f"/proc/{process}/fd").glob("*"):
            try:
                target = file.readlink()
            except OSError:  # closed meanwhile
                continue
            if target.name == "run.log" and target.parent.name.startswith(f"{number}_"):
                return process
    pytest.fail(f"job {number} has no process")


def sorted_children(sweep: Called) -> list["Run"]:
    return sorted(sweep.children, key=lambda run: int(run.data.tags["job_number"]))


def without(values: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}
