"""The saved view: an earlier one of this project is renewed, one that somebody changed stays."""

import json

import pytest

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.tracking.mlflow_store import store, view


def stored(**changes: object) -> str:
    return json.dumps(json.loads(view.VALUE) | changes)


OLD = '{"selectedColumns": ["metrics.`accuracy`"]}'
FIRST = json.dumps({"name": "Comparison", "createdAt": 0, "state": OLD})  # without a digest


@pytest.mark.parametrize(
    ("value", "outdated"),
    [
        (None, True),
        (view.VALUE, False),
        (FIRST, True),
        (stored(state=OLD, digest=view._digest(OLD)), True),
        (stored(state=OLD), False),  # changed: not the digest of its state
        (json.dumps({"name": "Mine", "createdAt": 1, "state": OLD}), False),
        ("no JSON", False),
        ("[]", False),
    ],
)
def test_only_an_earlier_view_of_this_project_is_outdated(value, outdated):
    assert view.is_outdated(value) is outdated


@pytest.mark.slow
@pytest.mark.parametrize(("value", "renewed"), [(FIRST, True), (stored(state=OLD), False)])
def test_opening_a_store_renews_an_outdated_view(tmp_path, own_store, monkeypatch, value, renewed):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrackingConfig(root=str(tmp_path / "mlruns"))
    own_store.client.set_experiment_tag(own_store.experiment_id, view.TAG, value)
    again = store.open_store(config).client.get_experiment(own_store.experiment_id)
    assert (again.tags[view.TAG] == view.VALUE) is renewed
