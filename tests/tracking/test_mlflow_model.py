"""Tests of a run's model in MLflow: its name, its metrics, its description in the registry."""

from dataclasses import replace
from pathlib import Path

import mlflow
import numpy as np
import onnx
import pytest
from mlflow.entities import LoggedModelStatus

from resnet8ptq.core import code
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.deploy import registering
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.graph.session import open_runner
from resnet8ptq.tasks import classification
from resnet8ptq.tasks.classification import ClassScores
from resnet8ptq.tracking.mlflow_store import mlflow_model, upload
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.run import Run, start_run
from tests.helpers import onnx_networks
from tests.helpers.configs import make_config
from tests.helpers.results import make_result

NAMES = ("cat", "dog")
RUN_NAME = "torch-int8-percentile_99.9"


@pytest.fixture
def logged(own_store: Store, tmp_path: Path) -> Run:
    """A finished run with a model, data sets and a result."""
    labels = np.array([0, 0, 1, 1])
    split = Split(np.zeros((4, 2, 2, 3), np.uint8), labels, "made up")
    data = Dataset("made up", NAMES, split, split)
    (tmp_path / "model.pt").write_text("what torch would refuse")
    np.savez(tmp_path / "example.npz", inputs=np.zeros((1, 4), np.float32))
    task = classification.build(NAMES)
    scores = [
        ClassScores(np.eye(2, dtype=np.float32)[hit], labels) for hit in ([0, 1, 1, 1], labels)
    ]
    result = make_result(task, task.compare(*scores))
    with start_run(own_store, RUN_NAME, tmp_path) as run:
        run.log_config(make_config("data=shapes"))
        run.log_datasets(data, CalibrationSet(split, np.arange(4)), NAMES)
        run.log_step(1, {"qat/loss": 0.5})
        run.log_model(tmp_path / "model.pt", {"scores": [2]}, "onednn")
        run.log_result(result)
    return run


def test_a_model_has_the_name_of_its_run_and_its_leading_metrics(own_store, logged):
    (output,) = own_store.client.get_run(logged.run_id).outputs.model_outputs
    for _ in range(2):
        model = own_store.client.get_logged_model(output.model_id)
        assert model.name == "torch-int8-percentile_99_9"  # MLflow refuses a dot
        metrics = {metric.key: metric for metric in model.metrics}
        assert len(metrics) == len(model.metrics)
        assert metrics["accuracy_percent"].value == 75
        assert {"loss_points", "size_kb"} <= metrics.keys()
        assert (model.params["file"], model.params["dtype"]) == ("model.pt", "int8")
        assert not [key for key in metrics if "/" in key]
        test = next(iter(logged.journal.datasets[1:]))
        sets = {(metric.dataset_name, metric.dataset_digest) for metric in model.metrics}
        assert sets == {("made up-test", test.digest[:36])}
        upload.push(own_store, logged.journal, logged.folder)  # twice does no harm


def test_a_later_upload_logs_the_same_model(own_store, logged):
    first = own_store.client.get_run(logged.run_id)
    (output,) = first.outputs.model_outputs
    logged.journal.key = "sent later"
    again = own_store.client.get_run(upload.push(own_store, logged.journal, logged.folder))
    assert again.data.metrics == first.data.metrics
    assert again.data.params == first.data.params
    both = [
        own_store.client.get_logged_model(model_id)
        for model_id in (output.model_id, again.outputs.model_outputs[0].model_id)
    ]
    values = [{metric.key: metric.value for metric in model.metrics} for model in both]
    assert values[0] == values[1] and both[0].name == both[1].name


def test_a_model_without_its_files_is_logged_again(own_store, logged):
    """As a process leaves it that is killed between the link to the run and the upload."""
    (output,) = own_store.client.get_run(logged.run_id).outputs.model_outputs
    own_store.client.finalize_logged_model(output.model_id, LoggedModelStatus.FAILED)
    assert mlflow_model.find_model(own_store, logged.run_id) is None
    upload.push(own_store, logged.journal, logged.folder)
    model = mlflow_model.find_model(own_store, logged.run_id)
    assert model is not None and model.model_id != output.model_id
    assert Path(model.artifact_location.removeprefix("file://"), "MLmodel").is_file()
    assert {metric.key: metric.value for metric in model.metrics}["accuracy_percent"] == 75


def test_a_file_that_no_backend_writes_is_refused(own_store, logged):
    """As another person's journal may name one."""
    (logged.folder / "model.txt").write_text("a note")
    logged.journal.key = "changed"
    logged.journal.model = replace(logged.journal.model, file="model.txt")
    with pytest.raises(TrackingError, match=r"model\.txt"):
        upload.push(own_store, logged.journal, logged.folder)


def test_a_deleted_model_is_logged_again(own_store, logged):
    (output,) = own_store.client.get_run(logged.run_id).outputs.model_outputs
    own_store.client.delete_logged_model(output.model_id)
    assert mlflow_model.find_model(own_store, logged.run_id) is None
    upload.push(own_store, logged.journal, logged.folder)
    model = mlflow_model.find_model(own_store, logged.run_id)
    assert model is not None and model.model_id != output.model_id


def test_a_file_is_served_on_the_provider_of_its_run(own_store, tmp_path):
    """Or on the CPU, where MLflow does not find the provider; it warns."""
    proto = onnx_networks.build()
    del proto.graph.input[1:]  # the weights
    onnx.save(proto, tmp_path / "model.onnx")
    images = onnx_networks.IMAGES
    np.savez(tmp_path / "example.npz", inputs=images[:1])
    with start_run(own_store, RUN_NAME, tmp_path) as run:
        run.log_config(make_config("data=shapes", "backend.provider=CUDAExecutionProvider"))
        run.log_model(tmp_path / "model.onnx", {}, None)
    model = mlflow_model.find_model(own_store, run.run_id)
    assert model is not None
    mlflow.set_tracking_uri(own_store.uri)
    served = mlflow.pyfunc.load_model(f"models:/{model.model_id}")
    flavor = served.metadata.flavors["onnx"]
    assert flavor["providers"] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    [expected] = open_runner(str(tmp_path / "model.onnx"))(images)
    [outputs] = served.predict(images).values()
    np.testing.assert_allclose(outputs, expected, atol=1e-6)


def test_a_registered_version_says_what_it_is(own_store, logged):
    record = logged.record.changed(verdict_text="undecided")
    source = SourceRun(record, make_config(), logged.folder / "model.pt")
    registering.register(own_store, source, "pets")
    version = own_store.client.get_model_version_by_alias("pets", "recommended")
    plain = str(version.description).replace("\\", "")
    facts = ("per tensor, on made up", "accuracy 75.00%", "FP32 100.00%", "100.0 kB")
    for text in (*facts, "undecided", f"run {RUN_NAME} ({logged.run_id})"):
        assert text in plain


def test_a_served_model_does_without_this_package():
    alone = "resnet8ptq.tracking.mlflow_store.served_model"
    assert code.closure(alone) == {alone}
