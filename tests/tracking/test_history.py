"""Runs read back from a store: their files, also from a server that hands them out itself."""

from pathlib import Path

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import _make_database, open_store
from tests.helpers.mlflow_server import Server
from tests.helpers.stores import copy_database


def test_files_on_a_server_have_the_names_of_the_run_folder(tmp_path):
    """MLflow lists them as `artifacts/NAME`; `deploy` and the report look for `NAME`."""
    copy_database(_make_database, tmp_path / "server.db")
    with Server(tmp_path, tmp_path / "server.db") as server:
        store = open_store(TrackingConfig(uri=server.uri))
        run_id = store.client.create_run(store.experiment_id).info.run_id
        for name in ("model.onnx", "config.yaml"):
            file = tmp_path / name
            file.write_text(name)
            store.client.log_artifact(run_id, str(file))
        record = history.load_run(store, run_id)
        names = history.list_artifacts(store, record)
        content = history.read_if_sound(
            store, record, "model.onnx", reader=Path.read_text, lacks="", optional=True
        )
    assert names == ["config.yaml", "model.onnx"]
    assert content == "model.onnx"
