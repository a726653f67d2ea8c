"""A saved view for MLflow's UI: the runs as a flat table with the columns that matter.

Out of the box the UI shows a sweep as one folded row without a figure in it. It keeps saved views
as tags of the experiment: JSON with a `state` that is JSON again; what it leaves out is as usual.
Where a later MLflow no longer reads this, its page opens as it would without.
"""

import json

KEY = "comparison"
TAG = f"mlflow.sharedViewState.{KEY}"

COLUMNS = (
    "tags.`status`",
    *(f"params.`{name}`" for name in ("backend", "dtype", "calib", "per_channel")),
    *(f"metrics.`{name}`" for name in ("accuracy", "size_bytes", "delta", "p_value")),
    *("metrics.`size_reduction`", "metrics.`images_per_s`", "params.`data.name`"),
)
_STATE = {
    # Sorted by anything but time, the UI unfolds sweeps and lists every run by itself.
    "orderByKey": "metrics.`accuracy`",
    "orderByAsc": False,
    "selectedColumns": COLUMNS,
    "columnOrder": COLUMNS,
}
VALUE = json.dumps({"name": "Comparison", "createdAt": 0, "state": json.dumps(_STATE)})  # of TAG


def path(experiment_id: str) -> str:
    """Return the page that opens the view, behind the server's address."""
    return f"/#/experiments/{experiment_id}/runs?viewStateShareKey={KEY}"
