"""`sweep.resume=true`: nothing that has finished is run again, everything else is."""

import re
import shutil
from pathlib import Path
from typing import Any

import mlflow
import pytest
from PIL import Image

from resnet8ptq.core import code, console
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.data import locate, shapes
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.sweeps import identity, resume
from resnet8ptq.tracking import history, journal
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import sync, upload
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.run import (
    end_parent,
    replace_runs,
    restart_parent,
    start_parent,
    start_run,
)
from resnet8ptq.tracking.sweep_file import SharedSweep
from tests.helpers.calling import NO_REAL_FILES, QUICK, Called, call
from tests.helpers.cifar_files import write_folder
from tests.helpers.configs import make_config
from tests.helpers.forked import call_process
from tests.helpers.stores import new_store

SHAPES = ("data=shapes", "calib.samples_per_class=20")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return new_store(tmp_path_factory.mktemp("mlruns"))


@pytest.fixture
def own(store: Store, tmp_path: Path) -> SharedSweep:
    return start_sweep(store, tmp_path / "sweep", "a key")


def start_sweep(store: Store, folder: Path, key: str) -> SharedSweep:
    folder.mkdir()
    parent_id = start_parent(store, "sweep", folder, {"sweep_key": key})
    made = SharedSweep(store, parent_id, folder, resume=True)
    made.save()
    return made


def run_job(
    sweep: SharedSweep, number: int, digest: str, error: BaseException | None = None
) -> str:
    """Run a job that does nothing, or raises; return the id of its run."""
    tags = {"job_number": str(number), "identity": digest}
    folder = sweep.folder / f"{number}_{len(list(sweep.folder.iterdir()))}"
    folder.mkdir()
    earlier = resume.find_attempts(sweep, number)
    try:
        with start_run(sweep.store, "job", folder, sweep.parent_id, tags) as run:
            replace_runs(sweep.store, earlier, run)
            run.log_result(RunResult("ok"))
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    return run.run_id


def identify(*overrides: str) -> str:
    return identity.hash_run(resolve(make_config(*overrides)))


def test_the_same_run_has_one_identity():
    first = identify(*SHAPES)
    assert first == identify(*SHAPES)
    for kept_elsewhere in (
        *("tracking.root=/elsewhere", "tracking.experiment_name=another", "cache_dir=/elsewhere"),
        *("report.columns=[all]", "sweep.resume=true"),
        "+per_backend.torch.float_output=true",
    ):
        assert identify(*SHAPES, kept_elsewhere) == first


@pytest.mark.parametrize(
    "other",
    [
        *("dtype=uint8", "calib=entropy", "calib.percentile=99", "per_channel=true", "seed=1"),
        *("backend=torch", "method=dynamic", "slim=true", "evaluate.split=held_out", "threads=1"),
        *("nodes_to_exclude=[a]", "latency.enabled=false", "model.fold=false"),
        *("report.max_drop=0.1", "report.expected_accuracy=0.9", "report.confirmations=2"),
    ],
)
def test_another_setting_is_another_run(other):
    assert identify(*SHAPES, other) != identify(*SHAPES)


def test_another_network_is_another_run_wherever_it_lies(tmp_path):
    weights = shapes.WEIGHTS.read_bytes()
    result = []
    for folder, content in (("a", weights), ("b", weights), ("c", weights + b"\0")):
        path = tmp_path / folder / "model.h5"
        path.parent.mkdir()
        path.write_bytes(content)
        result.append(identify(*SHAPES, f"model.path={path}"))
    assert result[0] == result[1] != result[2]


def test_another_table_is_another_run_wherever_it_lies(tmp_path):
    result = []
    for name, content in (("a", "{}"), ("b", "{}"), ("c", "[]")):
        path = tmp_path / f"{name}.json"
        path.write_text(content)
        result.append(identify(*SHAPES, f"calib.table={path}"))
    assert result[0] == result[1] != result[2]


def test_other_pictures_that_calibrate_are_another_run_wherever_they_lie(tmp_path):
    result = [identify(*SHAPES)]
    for name, grey in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        Image.new("RGB", (32, 32), (grey,) * 3).save(tmp_path / name / "picture.png")
        result.append(identify(*SHAPES, f"calib.images={tmp_path / name}"))
    assert result[1] == result[2]
    assert len(set(result)) == 3


def test_other_code_of_the_users_own_is_another_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    result = []
    for number in (1, 1, 2):
        code = f"def metric(outputs, targets):\n    return {number}\n"
        (tmp_path / "metric_of_a_run.py").write_text(code)
        settings = "task=custom", "task.metric._target_=metric_of_a_run.metric"
        result.append(identify(*SHAPES, *settings))
    assert result[0] == result[1] != result[2]


def test_data_that_stands_in_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(locate, "_find_cifar10", lambda: (None, "nowhere"))
    console.warn_once.cache_clear()
    identify("data=cifar10")
    identify("data=cifar10", "seed=1")
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "CIFAR-10 NOT FOUND" in warned.message


def test_other_images_are_another_run_wherever_they_lie(tmp_path):
    settings = "data=cifar10", f"model.path={shapes.WEIGHTS}"
    result = []
    for name, train, test in (("a", 4, 3), ("b", 4, 3), ("c", 5, 3), ("d", 4, 2)):
        root = write_folder(tmp_path / name, train, test)
        result.append(identify(*settings, f"data.root={root}"))
    assert result[0] == result[1]
    assert len(set(result)) == 3


def test_other_code_or_versions_are_another_run_and_another_sweep(monkeypatch):
    before = identify(*SHAPES), identity.sweep_key(["dtype=int8"])
    monkeypatch.setattr(code, "behind", lambda *_: "other code")
    after = identify(*SHAPES), identity.sweep_key(["dtype=int8"])
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_the_order_of_a_plan_is_no_setting():
    plans = ("{a: 4, b: 8}", "{b: 8, a: 4}", "{a: 8, b: 4}")
    one, same, other = (identify(*SHAPES, f"precision.plan={plan}") for plan in plans)
    assert one == same != other


def test_a_sweep_is_known_by_what_it_asks_for():
    asked = identity.sweep_key(["dtype=int8,uint8"])
    assert identity.sweep_key(["dtype=int8,uint8", "sweep.resume=true", "cache_dir=/x"]) == asked
    assert identity.sweep_key(["dtype=int8,uint8", "report.columns=[all]"]) == asked
    for other in (["dtype=int8"], ["dtype=int8,uint8", "report.max_drop=0.1"]):
        assert identity.sweep_key(other) != asked


def test_only_a_finished_run_is_found(own):
    run_job(own, 0, "finished")
    run_job(own, 1, "failed", ValueError("broken"))
    run_job(own, 2, "killed", KeyboardInterrupt())
    finished = resume.find_finished(own, 0, "finished")
    assert finished is not None
    assert finished.tags["job_number"] == "0"
    assert resume.find_finished(own, 1, "failed") is None
    assert resume.find_finished(own, 2, "killed") is None
    assert resume.find_finished(own, 3, None) is None


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_run_that_did_not_finish_is_replaced(own, error):
    first = run_job(own, 0, "x", error)
    second = run_job(own, 0, "x")
    (child,) = history.load_children(own.store, own.parent_id)
    assert child.run_id == second
    deleted = own.store.client.get_run(first)
    assert deleted.info.lifecycle_stage == "deleted"
    assert deleted.data.tags["run_again_as"] == second


def test_a_clock_that_is_set_back_hides_no_finished_run(own, monkeypatch):
    """Also if the run that failed cannot be deleted, as on a server of several users."""
    monkeypatch.setattr(upload, "replace_runs", lambda *_: None)
    run_job(own, 0, "x", ValueError("broken"))
    monkeypatch.setattr(journal.time, "time", lambda: 1_000_000.0)
    second = run_job(own, 0, "x")
    assert [child.run_id for child in history.load_children(own.store, own.parent_id)] == [second]
    finished = resume.find_finished(own, 0, "x")
    assert finished is not None and finished.run_id == second


def test_a_run_does_not_end_before_its_start(monkeypatch):
    kept = Journal("job", "experiment")
    monkeypatch.setattr(journal.time, "time", lambda: 0.0)
    kept.end("FINISHED")
    assert kept.end_ms == kept.start_ms


def test_a_job_that_is_still_running_is_not_started_again(own):
    folder = own.folder / "0"
    folder.mkdir()
    tags = {"job_number": "0"}
    with (
        start_run(own.store, "job", folder, own.parent_id, tags),
        pytest.raises(TrackingError, match=f"job 0 is still running in {folder}"),
    ):
        resume.find_attempts(own, 0)


def test_a_finished_run_of_another_sweep_counts_as_the_jobs_own(own, store, tmp_path):
    run_id = run_job(own, 0, "adopted")
    wider = start_sweep(store, tmp_path / "wider", "another key")
    another = run_job(wider, 0, "another")
    finished = resume.find_finished(wider, 1, "adopted")
    assert finished is not None
    children = history.load_children(store, wider.parent_id)
    assert [child.run_id for child in children] == [another, run_id]
    assert [r.run_id for r in history.load_children(store, own.parent_id)] == [run_id]


def test_a_finished_run_of_another_sweep_counts_in_place_of_a_failed_one(own, store, tmp_path):
    run_id = run_job(own, 0, "finished elsewhere")
    wider = start_sweep(store, tmp_path / "wider", "a fourth key")
    run_job(wider, 1, "finished elsewhere", ValueError("broken"))
    finished = resume.find_finished(wider, 1, "finished elsewhere")
    assert finished is not None
    assert [r.run_id for r in history.load_children(store, wider.parent_id)] == [run_id]


def test_the_result_of_another_machine_is_not_taken_over(own, store, tmp_path):
    run_id = run_job(own, 0, "carried")
    upload.log_batch(store, run_id, tags={journal.CARRIED_TAG: "ARM"})
    wider = start_sweep(store, tmp_path / "wider", "a third key")
    assert resume.find_finished(wider, 1, "carried") is None
    found = resume.find_finished(own, 0, "carried")
    assert found is not None and found.was_carried


def test_a_sweep_of_an_earlier_version_is_read(own):
    path = own.folder / "sweep.json"
    path.write_text(path.read_text().replace('"parallel"', '"worker"'))
    assert SharedSweep.load(own.folder) == own


def test_the_newest_sweep_of_a_key_is_gone_on_with_unless_it_runs(store, tmp_path):
    assert resume.find_sweep(store, "another") is None
    older = start_sweep(store, tmp_path / "older", "mine")
    newer = start_sweep(store, tmp_path / "newer", "mine")
    assert older.parent_id != newer.parent_id
    held = journal.lock(newer.folder)
    with pytest.raises(TrackingError, match=r"sweep\.resume: .* still running in .*newer"):
        resume.find_sweep(store, "mine")
    assert resume.find_sweep(store, "mine", own=newer.folder) is not None
    held.release()
    sweep = resume.find_sweep(store, "mine")
    assert sweep is not None
    assert sweep.run_id == newer.parent_id


@pytest.mark.parametrize("fault", ["cut", "gone"])
def test_a_sweep_whose_record_is_damaged_goes_on(store, tmp_path, caplog, fault):
    """As a resume left it that was killed between its steps."""
    sweep = start_sweep(store, tmp_path / "sweep", "a key")
    path = sweep.folder / journal.FILE
    before = Journal.load(sweep.folder)
    path.write_text("{") if fault == "cut" else path.unlink()
    (tmp_path / "new").mkdir()
    earlier = history.load_run(store, sweep.parent_id)
    assert restart_parent(store, earlier, tmp_path / "new") == sweep.parent_id
    assert "it is restored from the tracking store" in caplog.text
    kept = Journal.load(tmp_path / "new")
    assert (kept.key, kept.run_id, kept.start_ms) == (before.key, sweep.parent_id, before.start_ms)
    assert kept.tags["sweep_key"] == "a key"
    assert [item.parent.name for item in tmp_path.rglob(journal.FILE)] == ["new"]
    assert history.load_run(store, sweep.parent_id).tags["folder"] == str(tmp_path / "new")


def test_the_newest_sweep_with_a_key_is_killed_if_it_neither_ended_nor_runs(store, tmp_path):
    sweep = start_sweep(store, tmp_path / "sweep", "of a killed sweep")
    held = journal.lock(sweep.folder)
    assert resume.find_killed(store, "of a killed sweep") is None  # it runs

    held.release()
    (sweep.folder / journal.LOCK).touch()  # as SIGKILL leaves it
    killed = resume.find_killed(store, "of a killed sweep")
    assert killed is not None and killed.run_id == sweep.parent_id

    sync.sync(store, tmp_path)  # closes it as killed
    assert history.load_run(store, sweep.parent_id).ended
    killed = resume.find_killed(store, "of a killed sweep")
    assert killed is not None and killed.run_id == sweep.parent_id

    end_parent(store, sweep.parent_id, "ok", sweep.folder)
    assert resume.find_killed(store, "of a killed sweep") is None


def test_a_sweep_whose_folder_is_on_another_machine_is_not_called_killed(store, tmp_path):
    sweep = start_sweep(store, tmp_path / "sweep", "elsewhere")
    journal.lock(sweep.folder).release()
    shutil.rmtree(sweep.folder)
    assert resume.find_killed(store, "elsewhere") is None


class Killed(BaseException):
    """Stands for SIGKILL: nothing is cleaned up after it."""


@pytest.mark.parametrize("step", ["log_batch", "update_run", "unlink"])
def test_a_resume_that_is_killed_at_any_step_can_be_resumed(store, tmp_path, monkeypatch, step):
    sweep = start_sweep(store, tmp_path / "sweep", "a key")
    end_parent(store, sweep.parent_id, "killed", sweep.folder)
    for name in ("second", "third"):
        (tmp_path / name).mkdir()

    unlink = Path.unlink

    def kill(first: object, *_: Any, **named: Any) -> None:
        if isinstance(first, Path) and first.name != journal.FILE:
            return unlink(first, **named)  # a temporary file
        raise Killed

    owner = {"log_batch": upload, "update_run": mlflow.MlflowClient, "unlink": Path}[step]
    earlier = history.load_run(store, sweep.parent_id)
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, kill)
        with pytest.raises(Killed):
            restart_parent(store, earlier, tmp_path / "second")

    again = history.load_run(store, sweep.parent_id)
    assert Journal.load(Path(again.tags["folder"])).key == again.tags["record"]
    restart_parent(store, again, tmp_path / "third")
    held = journal.lock(tmp_path / "third")  # the sweep runs, and another process synchronizes
    assert sync.sync(store, tmp_path).running == [tmp_path / "third"]
    assert store.client.get_run(sweep.parent_id).info.status == "RUNNING"
    held.release()


CELLS = ("-m", "dtype=int8,uint8,u8s8", *QUICK)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_elsewhere_and_finds_the_same(tmp_path, sweep):
    """Killed with SIGKILL in its second job; resumed in another process."""
    new_store(tmp_path / "mlruns")
    killed = call_process(tmp_path, *CELLS, strike=(1, 0), **NO_REAL_FILES)
    assert killed.code == -9
    before = Called(tmp_path, -9, "", "")
    # The folders have it all; what the store has depends on how far the process beside has come.
    kept = [Journal.load(path.parent) for path in sorted(tmp_path.rglob(journal.FILE))]
    assert [(item.tags.get("job_number"), item.status) for item in kept] == [
        ("0", "FINISHED"),
        ("1", "RUNNING"),
        (None, "RUNNING"),
    ]

    after = call(tmp_path, *CELLS, "sweep.resume=true", **NO_REAL_FILES)
    assert after.code == 0, after.err
    assert "was killed" not in after.err
    assert "Skipped: 1 of 3 runs" in after.out
    assert after.parent.info.run_id == before.parent.info.run_id
    assert after.parent.info.status == "FINISHED"
    assert {run.data.tags["job_number"] for run in after.children} == set("012")
    assert [run.info.status for run in after.children] == ["FINISHED"] * 3
    assert kept[0].key in {run.data.tags["record"] for run in after.children}

    result = {row["dtype"]: row for row in after.table}
    for expected in sweep.table:
        if expected["framework"] == "onnx":
            row = result[expected["dtype"]]
            for key in ("accuracy", "delta", "size kB"):
                assert row[key] == expected[key]

    (folder,) = re.findall(r"^Files: +(.*)", after.out, re.M)
    own = f"hydra.sweep.dir={folder}"
    again = call(tmp_path, *CELLS, "sweep.resume=true", own, **NO_REAL_FILES)
    assert "Skipped: 3 of 3 runs" in again.out
    assert len(again.runs) == 4
