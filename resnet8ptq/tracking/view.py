"""A saved view for MLflow's UI: the runs as a flat table with the columns that matter.

Out of the box the UI shows a sweep as one folded row without a figure in it. It keeps saved views
as tags of the experiment: JSON with a `state` that is JSON again, deflated, in base64. Where a
later MLflow no longer reads this, its page opens as it would without.
"""

import base64
import json
import zlib

KEY = "comparison"
TAG = f"mlflow.sharedViewState.{KEY}"

COLUMNS = (
    "tags.`status`",
    *(f"params.`{name}`" for name in ("backend", "dtype", "calib", "per_channel")),
    *(f"metrics.`{name}`" for name in ("accuracy", "size_bytes", "delta", "p_value")),
    *("metrics.`size_reduction`", "metrics.`images_per_s`", "params.`data.name`"),
)


def path(experiment_id: str) -> str:
    """Return the page that opens the view, behind the server's address."""
    return f"/#/experiments/{experiment_id}/runs?viewStateShareKey={KEY}"


def tag_value() -> str:
    """Return the value of TAG."""
    state = {
        "searchFilter": "",
        # Sorted by anything but time, the UI unfolds sweeps and lists every run by itself.
        "orderByKey": "metrics.`accuracy`",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": COLUMNS,
        "columnOrder": COLUMNS,
        "columnWidths": {},
        "runsHiddenMode": "FIRST_10_RUNS",
        "viewMaximized": False,
        "runListHidden": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
    }
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    view = {"name": "Comparison", "createdAt": 0, "updatedAt": 0, "state": f"deflate;{packed}"}
    return json.dumps(view)
