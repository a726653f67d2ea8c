"""A saved view for MLflow's UI: the runs as a flat table with the columns that matter.

By default the UI shows a sweep as one folded row without figures. It stores saved views as tags of
the experiment: JSON with a `state` that is JSON again. Missing entries keep their defaults. A later
MLflow that cannot read the tag opens its default page.
"""

import json

KEY = "comparison"
TAG = f"mlflow.sharedViewState.{KEY}"

COLUMNS = (
    *("tags.`status`", "params.`dataset`"),
    *(f"metrics.`{name}`" for name in ("accuracy", "drop", "size_bytes", "latency_p50_ms")),
    *(f"params.`{name}`" for name in ("backend", "dtype", "calib", "per_channel")),
    *("metrics.`speedup`", "metrics.`paired/p_value`"),
)
_STATE = {
    # Unless sorted by time, the UI unfolds sweeps and lists every run.
    "orderByKey": "metrics.`accuracy`",
    "orderByAsc": False,
    "selectedColumns": COLUMNS,
    "columnOrder": COLUMNS,
}
VALUE = json.dumps({"name": "Comparison", "createdAt": 0, "state": json.dumps(_STATE)})  # of TAG


def path(experiment_id: str) -> str:
    """Return the path of the view's page, to append to the server's address."""
    return f"/#/experiments/{experiment_id}/runs?viewStateShareKey={KEY}"
