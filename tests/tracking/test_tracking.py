"""The MLflow store: made once, read back whole, and closed as what the run became."""

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from omegaconf import DictConfig

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core import command, interrupts
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.sweeps import callback, ongoing, running
from resnet8ptq.tracking import history, journal
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import upload
from resnet8ptq.tracking.mlflow_store.store import Store, find_store, open_store
from resnet8ptq.tracking.run import end_parent, start_parent, start_run
from resnet8ptq.tracking.sweep_file import SharedSweep
from tests.helpers import forked
from tests.helpers.configs import compose_whole, make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of
from tests.helpers.stores import new_store

URI_WITH_PASSWORD = "http://user:hunter2@127.0.0.1:9"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return new_store(tmp_path_factory.mktemp("mlruns"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def client(store: Store) -> mlflow.MlflowClient:
    return mlflow.MlflowClient(tracking_uri=store.uri)


def artifacts(store: Store, run_id: str) -> dict[str, Path]:
    root = Path(mlflow.artifacts.download_artifacts(run_id=run_id, tracking_uri=store.uri))
    return {path.name: path for path in root.iterdir()}


def fail_in_a_run(
    store: Store, folder: Path, error: BaseException, prepare: Callable[[], object] = lambda: None
) -> str:
    """Raise `error` inside a run; return the run's id."""
    with pytest.raises(type(error)), start_run(store, "name", folder) as run:
        run.log_config(make_config())
        run_id = run.run_id
        prepare()
        raise error
    return run_id


def test_store_and_experiment_are_made_once(tmp_path):
    config = TrackingConfig(root=str(tmp_path / "new" / "mlruns"), experiment_name="mine")
    first = open_store(config)
    assert first.uri == f"sqlite:///{tmp_path}/new/mlruns/mlflow.db"
    assert open_store(config) == first
    names = [experiment.name for experiment in client(first).search_experiments()]
    assert sorted(names) == ["Default", "mine"]
    location = client(first).get_experiment(first.experiment_id).artifact_location
    assert location.endswith("/new/mlruns/artifacts/mine")


def test_store_that_cannot_be_made_leaves_no_half_of_it(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(TrackingError, match=r"mlflow\.db cannot be used \(disk full\)"):
        open_store(TrackingConfig(root=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


class Pair:
    """Two processes that call a function at the same time."""

    barrier: Any  # in each of the processes

    def __init__(self) -> None:
        context = forked.start_server()
        self.pool = ProcessPoolExecutor(2, context, self._enter, (context.Barrier(2),))

    @classmethod
    def _enter(cls, barrier: Any) -> None:
        cls.barrier = barrier

    @classmethod
    def _wait_and_call(cls, function: Callable[..., Any], *args: Any) -> Any:
        cls.barrier.wait()
        return function(*args)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        calls = [self.pool.submit(self._wait_and_call, function, *args) for _ in range(2)]
        return [call.result() for call in calls]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    result = Pair()
    with result.pool:
        yield result


@pytest.mark.slow
def test_two_processes_make_one_store(tmp_path, pair):
    first, second = pair.call(open_store, TrackingConfig(root=str(tmp_path / "mlruns")))
    assert first == second
    result = client(first).search_experiments(view_type=mlflow.entities.ViewType.ALL)
    assert sorted(experiment.name for experiment in result) == ["Default", "resnet8ptq"]


def log_images(store: Store, folder: Path) -> None:
    images = np.zeros((10, 2, 2, 3), np.uint8)
    split = Split(images, np.arange(10), "made up")
    drawn = CalibrationSet(split, np.arange(10))
    own = folder / str(os.getpid())
    own.mkdir()
    with start_run(store, "a run", own) as run:
        run._config_logged = True
        Pair.barrier.wait()
        run.log_datasets(Dataset("made up", ("a", "b"), split, split), drawn)


@pytest.mark.slow
def test_jobs_that_are_the_first_to_log_a_data_set_at_once_all_have_it(tmp_path, pair):
    result = new_store(tmp_path / "mlruns")
    pair.call(log_images, result, tmp_path)
    runs = client(result).search_runs([result.experiment_id])
    assert [len(run.inputs.dataset_inputs) for run in runs] == [2] * 2


@pytest.mark.parametrize("failures", [1, 3])
def test_logging_a_data_set_is_tried_three_times(store, tmp_path, monkeypatch, failures):
    calls: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) <= failures:
            raise RuntimeError("UNIQUE constraint failed")

    monkeypatch.setattr(mlflow.MlflowClient, "log_inputs", fail)
    split = Split(np.zeros((10, 2, 2, 3), np.uint8), np.arange(10), "made up")
    data = Dataset("made up", ("a", "b"), split, split)
    with (
        pytest.raises(TrackingError) if failures == 3 else nullcontext(),
        start_run(store, "retried", tmp_path) as run,
    ):
        run._config_logged = True
        run.log_datasets(data, CalibrationSet(split, np.arange(10)))
    assert len(calls) == min(failures + 1, 3)


@pytest.mark.parametrize(
    "labels",
    [
        np.arange(10),
        np.zeros((10, 3), bool),
        np.array(["a line"] * 10),
        np.zeros(10, np.dtype((np.void, 4))),
    ],
    ids=["classes", "several labels", "texts", "boxes"],
)
def test_a_run_with_labels_of_any_kind_is_read_back(labels, own_store, tmp_path):
    split = Split(np.zeros((10, 2, 2, 3), np.uint8), labels, "made up")
    with start_run(own_store, "labelled", tmp_path) as run:
        run._config_logged = True
        run.log_datasets(Dataset("made up", (), split, split), CalibrationSet(split, np.arange(10)))
    assert Journal.load(tmp_path).status == "FINISHED"


def test_deleted_experiment_is_refused(own_store, tmp_path):
    client(own_store).delete_experiment(own_store.experiment_id)
    with pytest.raises(TrackingError, match="'resnet8ptq' was deleted"):
        open_store(TrackingConfig(root=str(tmp_path / "mlruns")))


def test_a_moved_store_names_the_mend(own_store, tmp_path):
    """MLflow stores absolute paths: every command refused a project folder that was renamed."""
    (tmp_path / "mlruns").rename(tmp_path / "moved")
    with pytest.raises(TrackingError, match=r"^artifact_uri: .*; if the folder was moved") as said:
        open_store(TrackingConfig(root=str(tmp_path / "moved")))
    assert f"move {tmp_path / 'moved'} away" in str(said.value)
    assert "resnet8ptq sync" in str(said.value)


@pytest.mark.parametrize("folder", ["mlruns", "of mine #1"])
def test_a_local_store_is_found_without_mlflow(folder, tmp_path):
    config = TrackingConfig(root=str(tmp_path / folder))
    assert find_store(config) is None
    assert not (tmp_path / folder).exists()
    opened = new_store(tmp_path / folder)
    assert find_store(config) == opened == open_store(config)
    assert find_store(replace(config, experiment_name="another")) is None
    client(opened).delete_experiment(opened.experiment_id)
    assert find_store(config) is None


def test_only_a_local_store_is_found(own_store, tmp_path, monkeypatch):
    config = TrackingConfig(root=str(tmp_path / "mlruns"))
    assert find_store(config) == own_store
    assert find_store(replace(config, uri="http://127.0.0.1:5000")) is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert find_store(config) is None
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    (tmp_path / "mlruns" / "mlflow.db").write_bytes(b"no database" * 1000)
    assert find_store(config) is None


def test_file_in_the_way_of_the_root_is_refused(tmp_path):
    (tmp_path / "mlruns").write_text("")
    with pytest.raises(TrackingError, match=r"tracking.root: cannot write to .*mlruns"):
        open_store(TrackingConfig(root=str(tmp_path / "mlruns")))


@pytest.mark.parametrize("name", ["what?", "half%41"])
def test_a_folder_that_mlflow_would_misread_is_refused(tmp_path, name):
    config = TrackingConfig(root=str(tmp_path / name))
    assert find_store(config) is None
    with pytest.raises(ConfigError, match=r"tracking.root: got .* without \? and %"):
        open_store(config)
    assert not (tmp_path / name).exists()


WITH_PASSWORD = pytest.mark.parametrize("uri", [URI_WITH_PASSWORD, "nosuch://user:hunter2@host/db"])


@WITH_PASSWORD
def test_password_in_the_config_is_refused(uri, tmp_path):
    """The config is written down in many places: Hydra's, MLflow's, our own."""
    with pytest.raises(ConfigError, match=r"^tracking.uri: holds a password") as caught:
        open_store(TrackingConfig(uri=uri, root=str(tmp_path / "unused")))
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@WITH_PASSWORD
def test_unusable_uri_is_refused_without_its_password(uri, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises((ConfigError, TrackingError)) as caught:
        open_store(TrackingConfig(root=str(tmp_path)))
    assert uri.partition(":")[0] in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_server_that_goes_away_is_reported_without_the_password(folder, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with start_run(Store(URI_WITH_PASSWORD, "0", "name"), "name", folder):
        pass
    assert "TRACKING STORE UNAVAILABLE" in caplog.text
    assert "127.0.0.1:9" in caplog.text
    assert "hunter2" not in caplog.text
    assert Journal.load(folder).status == "FINISHED"
    assert "hunter2" not in (folder / journal.FILE).read_text()


def test_config_uri_wins_over_environment_wins_over_root(store, own_store, tmp_path, monkeypatch):
    root = str(tmp_path / "unused")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own_store.uri)
    assert open_store(TrackingConfig(root=root)).uri == own_store.uri
    assert open_store(TrackingConfig(uri=store.uri, root=root)).uri == store.uri
    assert not Path(root).exists()


@pytest.mark.parametrize("uri", [None, ""])
def test_empty_uri_is_no_uri(uri, own_store, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.chdir(tmp_path)  # where MLflow would put a store of its own
    config = TrackingConfig(uri=uri, root=str(tmp_path / "mlruns"))
    assert open_store(config).uri == own_store.uri


def test_ui_command_hides_the_password():
    command = Store(URI_WITH_PASSWORD, "7", "name").ui_command
    assert command.startswith("http://127.0.0.1:9/#/experiments/7")


def test_finished_run(store, folder):
    (folder / "result.json").write_text("{}")
    (folder / ".hydra").mkdir()
    with start_run(store, "a name", folder) as run:
        run.log_config(make_config("data=shapes", "dtype=uint8", "calib=percentile"))
        run.log_result(RunResult("ok", resolved={"weight_dtype": "uint8"}))
    result = client(store).get_run(run.run_id)
    assert result.info.status == "FINISHED"
    assert result.info.run_name == "a name"
    params, tags = history.load_run(store, run.run_id).params, result.data.tags
    for key, value in {
        **{"backend": "onnx", "dtype": "uint8", "calib": "percentile", "model": "resnet8"},
        **{"data": "shapes", "data.name": "shapes", "per_channel": "false", "seed": "42"},
        **{"calib.percentile": "99.99", "model.fold": "true", "weight_dtype": "uint8"},
    }.items():
        assert params[key] == value
    assert int(params["threads"]) >= 1  # what null came to
    assert tags["status"] == "ok"
    assert tags["folder"] == str(folder)
    assert "cpu" in tags
    filed = history.load_named(store, "run_id", run.run_id).tags
    assert {"version.onnxruntime", "version.torch", "cpu_flags", "git_commit"} <= set(filed)
    assert not {"version.torch", "cpu_flags"} & set(tags)
    assert set(artifacts(store, run.run_id)) == {"result.json"}


def test_unsupported_run_says_why(store, folder):
    with start_run(store, "name", folder) as run:
        run.log_config(make_config("backend=torch", "dtype=uint8"))
        run.log_result(RunResult("unsupported", "the reason"))
    result = history.load_run(store, run.run_id)
    assert (result.tags["status"], result.tags["reason"]) == ("unsupported", "the reason")
    assert result.params["dtype"] == "uint8"
    assert result.metrics == {}


def test_failed_run(store, folder):
    run_id = fail_in_a_run(store, folder, ValueError("first line\nsecond line"))
    run = client(store).get_run(run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["status"] == "failed"
    assert run.data.tags["reason"] == "first line second line"
    assert run.data.params["backend"] == "onnx"  # as far as it was known
    text = artifacts(store, run_id)["traceback.txt"].read_text()
    assert text.startswith("Traceback")
    assert "ValueError: first line\nsecond line" in text
    assert mlflow.active_run() is None


def test_failure_without_a_message_still_has_a_reason(store, folder):
    run_id = fail_in_a_run(store, folder, MemoryError())
    assert history.load_run(store, run_id).tags["reason"] == "MemoryError"


def test_endless_reason_is_cut(store, folder):
    run_id = fail_in_a_run(store, folder, RuntimeError("x" * 100_000))
    assert 1000 < len(history.load_run(store, run_id).tags["reason"]) < 10_000


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_interrupted_run_is_killed(store, folder, error):
    run_id = fail_in_a_run(store, folder, error)
    run = client(store).get_run(run_id)
    assert run.info.status == "KILLED"
    assert run.data.tags["status"] == "killed"
    assert mlflow.active_run() is None


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_waits_for_what_is_being_written(store, folder, monkeypatch):
    """In the middle of a transaction it would leave the database locked."""
    log_batch = mlflow.MlflowClient.log_batch

    def interrupted(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        log_batch(*args)

    with start_run(store, "whole", folder) as run:
        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.log_params({"engine": "1"})
        monkeypatch.undo()
    assert store.client.get_run(run.run_id).data.params["engine"] == "1"


@pytest.mark.usefixtures("interruptible")
def test_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_run_whose_failure_cannot_be_recorded_is_closed(store, folder):
    """Else MLflow would refuse every later run of the sweep, as one is still open."""
    with (
        pytest.raises(Exception, match=r"the cause|No such file"),
        start_run(store, "name", folder) as run,
    ):
        shutil.rmtree(folder)
        raise ValueError("the cause")
    assert mlflow.active_run() is None
    assert client(store).get_run(run.run_id).info.status == "FAILED"


def test_run_whose_files_cannot_be_uploaded_has_failed(store, folder):
    with pytest.raises(FileNotFoundError), start_run(store, "name", folder) as run:
        run.log_result(RunResult("ok"))
        shutil.rmtree(folder)
    assert mlflow.active_run() is None
    result = client(store).get_run(run.run_id)
    assert result.info.status == "FAILED"
    assert result.data.tags["status"] == "failed"


def compose_sweep(folder: Path, *overrides: str) -> DictConfig:
    """Compose a sweep's config with Hydra's own settings, as its callback gets them."""
    return compose_whole(*overrides, f"hydra.sweep.dir={folder}")


def test_sweep_with_a_password_in_its_config_does_not_start(tmp_path, capsys):
    config = compose_sweep(tmp_path / "sweep", f"tracking.uri={URI_WITH_PASSWORD}")
    with ongoing.begin([]), pytest.raises(command.Abort) as caught:
        callback.SweepCallback().on_multirun_start(config)
    assert isinstance(caught.value.error, ConfigError)
    err = str(caught.value.error)
    assert err.startswith("tracking.uri: holds a password")
    assert "hunter2" not in err + capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_password_of_the_environment_stays_in_the_sweeps_private_file(store, tmp_path, monkeypatch):
    reached = Store(URI_WITH_PASSWORD, store.experiment_id, store.experiment_name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI_WITH_PASSWORD)
    # No server to log in to, or to search
    monkeypatch.setattr("resnet8ptq.tracking.mlflow_store.store.open_store", lambda config: reached)
    monkeypatch.setattr("resnet8ptq.sweeps.resume.find_killed", lambda store, key: None)
    make = start_parent
    monkeypatch.setattr("resnet8ptq.tracking.run.start_parent", lambda _, *args: make(store, *args))
    with ongoing.begin([]):
        callback.SweepCallback().on_multirun_start(compose_sweep(tmp_path / "sweep"))
        current = running.open_running_sweep()
    holders = [
        path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()
    ]
    (private,) = holders
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert SharedSweep.load(tmp_path / "sweep").store == reached
    parent = history.load_run(store, current.parent_id)
    assert "hunter2" not in json.dumps([parent.params, parent.tags])


@pytest.mark.parametrize("fails", [False, True])
def test_password_of_the_environment_is_not_logged(store, folder, monkeypatch, fails):
    (folder / "run.log").write_text("started")
    with (
        pytest.raises(ValueError, match="broken") if fails else nullcontext(),
        start_run(store, "name", folder) as run,
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", URI_WITH_PASSWORD)
        run.log_config(make_config("data=shapes"))
        if fails:
            raise ValueError("broken")
    result = history.load_run(store, run.run_id)
    assert result.params["tracking.uri"] == "null"
    assert "hunter2" not in json.dumps([result.params, result.tags])
    files = artifacts(store, run.run_id)
    assert set(files) == ({"run.log", "traceback.txt"} if fails else {"run.log"})
    assert all(b"hunter2" not in path.read_bytes() for path in files.values())


def test_data_sets_are_logged_with_digests(store, folder, shapes):
    calibration = draw_calibration(shapes, 5, 42)
    with start_run(store, "name", folder) as run:
        run.log_datasets(shapes, calibration)
    result = client(store).get_run(run.run_id)
    assert result.data.tags["test_digest"] == shapes.test.digest
    assert result.data.tags["calibration_digest"] == calibration.digest
    logged = {item.tags[0].value: item.dataset for item in result.inputs.dataset_inputs}
    assert set(logged) == {"calibration", "test"}
    assert logged["test"].name == "shapes-test"
    assert shapes.test.digest.startswith(logged["test"].digest)
    assert calibration.digest.startswith(logged["calibration"].digest)
    assert json.loads(logged["calibration"].profile)["features_shape"] == [50, 32, 32, 3]


@pytest.mark.slow
def test_logged_onnx_model_loads_back(store, folder, shapes, shapes_model):
    quantizer = quantizer_of(make_config("data=shapes"))
    artifact = quantize_network(
        quantizer, shapes_model, draw_calibration(shapes, 5, 42).split, folder
    )
    with start_run(store, "name", folder) as run:
        np.savez(folder / "example.npz", inputs=shapes.test.inputs(slice(1)))
        run.log_model(artifact.path, {"probabilities": [10]})
    (output,) = client(store).get_run(run.run_id).outputs.model_outputs
    uri = f"models:/{output.model_id}"
    files = list(Path(mlflow.artifacts.download_artifacts(uri)).rglob("*"))
    assert [path.name for path in files if "onnx" in path.name] == ["model.onnx"]
    assert not [path.name for path in files if "data" in path.name]

    info = mlflow.models.get_model_info(uri)
    assert info.saved_input_example_info is not None
    (takes,), (gives,) = info.signature.inputs.inputs, info.signature.outputs.inputs
    assert (takes.shape, takes.type) == ((-1, 32, 32, 3), np.float32)
    assert (gives.shape, gives.type) == ((-1, 10), np.float32)

    batch = next(iter(shapes.test.batches(20)))
    expected = quantizer.load(artifact.path, THREADS).predict(batch)[0]
    (got,) = mlflow.pyfunc.load_model(uri).predict(batch).values()
    np.testing.assert_array_equal(got, expected)
    graph = mlflow.onnx.load_model(uri).graph
    assert any(node.op_type == "QuantizeLinear" for node in graph.node)


def test_a_torch_file_is_logged_without_loading_it(store, folder, caplog):
    (folder / "model.pt").write_text("what torch would refuse")
    np.savez(folder / "example.npz", inputs=np.zeros((1, 4), np.float32))
    with start_run(store, "name", folder) as run:
        run.log_model(folder / "model.pt", {"scores": [3]}, "onednn")
    assert not caplog.records  # MLflow warns of an example that it has tried in vain
    (output,) = client(store).get_run(run.run_id).outputs.model_outputs
    info = mlflow.models.get_model_info(f"models:/{output.model_id}")
    assert info.saved_input_example_info is not None
    (takes,), (gives,) = info.signature.inputs.inputs, info.signature.outputs.inputs
    assert (takes.shape, gives.shape, gives.name) == ((-1, 4), (-1, 3), "scores")


def test_children_come_back_in_order(store, folder):
    parent_id = start_parent(store, "sweep", folder, {"overrides": "dtype=int8,uint8"})
    for name in ("first", "second", "third"):
        with start_run(store, name, folder, parent_id):
            pass
    with start_run(store, "another", folder):
        pass
    children = history.load_children(store, parent_id)
    assert [r.tags["mlflow.runName"] for r in children] == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("status", "expected"), [("ok", "FINISHED"), ("failed", "FAILED"), ("killed", "KILLED")]
)
def test_parent_is_closed_as_what_it_became(store, folder, status, expected):
    parent_id = start_parent(store, "sweep", folder, {"overrides": "dtype=int8"})
    assert client(store).get_run(parent_id).info.status == "RUNNING"
    end_parent(store, parent_id, status, folder)
    run = client(store).get_run(parent_id)
    assert (run.info.status, run.data.tags["status"]) == (expected, status)
    assert run.data.tags["overrides"] == "dtype=int8"


def test_files_are_added_to_a_run_and_replaced(store, folder):
    parent_id = start_parent(store, "sweep", folder, {})
    first, second = folder / "report.md", folder / "runs.csv"
    first.write_text("stale")
    second.write_text("a,b")
    upload.log_files(store, parent_id, [first, second])
    first.write_text("fresh")
    upload.log_files(store, parent_id, [first])
    result = {name: path.read_text() for name, path in artifacts(store, parent_id).items()}
    assert result == {"report.md": "fresh", "runs.csv": "a,b"}


def test_artifact_is_read_where_it_lies(store, folder):
    (folder / "ranges.json").write_text("{}")
    with start_run(store, "name", folder) as run:
        pass
    record = history.load_run(store, run.run_id)
    with history.artifact(store, record, "ranges.json") as path:
        assert path.read_text() == "{}"
    assert path.as_uri() == f"{record.artifact_uri}/ranges.json"


def test_missing_artifact_is_named(store, folder):
    with start_run(store, "name", folder) as run:
        pass
    with (
        pytest.raises(TrackingError, match=f"run {run.run_id}: no artifact ranges.json"),
        history.artifact(store, history.load_run(store, run.run_id), "ranges.json"),
    ):
        pass


def test_newest_sweep_is_found_among_other_runs(store, folder):
    root = Path(store.uri.removeprefix("sqlite:///")).parent
    fresh = open_store(TrackingConfig(root=str(root), experiment_name="without sweeps"))
    with start_run(fresh, "no sweep", folder):
        pass
    assert history.find_parent(fresh) is None
    for name in ("old", "new"):
        newest = start_parent(fresh, name, folder, {})
        with start_run(fresh, "child", folder, newest):
            pass
    parent = history.find_parent(fresh)
    assert parent is not None
    assert parent.run_id == newest
