"""A saved view for MLflow's UI: the runs as a flat table with the main columns.

By default the UI shows a sweep as one folded row without metrics. It stores saved views as tags of
the experiment: JSON with a `state` that is itself JSON. Missing entries keep their defaults. A
later MLflow that cannot read the tag opens its default page.
"""

import hashlib
import json
from typing import Any

KEY = "comparison"
TAG = f"mlflow.sharedViewState.{KEY}"

COLUMNS = (
    *("tags.`status`", "params.`dataset`"),
    *(f"metrics.`{name}`" for name in ("accuracy", "drop", "size_bytes", "latency_p50_ms")),
    *(f"params.`{name}`" for name in ("backend", "dtype", "calib", "per_channel")),
    *("metrics.`speedup`", "metrics.`paired/p_value`"),
)
_TRADE_OFFS, _LEADING = "Trade-offs", "Model metrics"  # MLflow's name for metrics without a group
# Of the chart view: open first, the groups of metrics folded below.
_SECTIONS = (_TRADE_OFFS, _LEADING, "paired", "ci95", "counts", "baseline")


def _chart(x: str, y: str) -> dict[str, Any]:
    """Return a scatter plot of two metrics, a point for each run."""
    axes = {name: {"key": key, "type": "METRIC"} for name, key in (("xaxis", x), ("yaxis", y))}
    flags = {"isGenerated": False, "deleted": False, "runsCountToCompare": 100}
    own = {"type": "SCATTER", "uuid": f"{x}-{y}", "metricSectionId": _TRADE_OFFS}
    return {**own, **axes, **flags}


_STATE = {
    # Unless sorted by time, the UI unfolds sweeps and lists every run.
    "orderByKey": "metrics.`accuracy`",
    "orderByAsc": False,
    "selectedColumns": COLUMNS,
    "columnOrder": COLUMNS,
    "compareRunCharts": [_chart("size_bytes", "accuracy"), _chart("latency_p50_ms", "accuracy")],
    "compareRunSections": [
        {"uuid": name, "name": name, "display": name in (_TRADE_OFFS, _LEADING)}
        | {"isReordered": True, "deleted": False, "isGenerated": name != _TRADE_OFFS}
        for name in _SECTIONS
    ],
    "isAccordionReordered": True,  # else MLflow sorts them by name, and puts its own last
}


def _digest(state: str) -> str:
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def _value(state: str) -> str:
    return json.dumps(
        {"name": "Comparison", "createdAt": 0, "state": state, "digest": _digest(state)}
    )


VALUE = _value(json.dumps(_STATE))  # of TAG


def is_outdated(value: str | None) -> bool:
    """Return whether a stored view is missing or from an earlier version of this module.

    A view that a user changed stays, because its digest no longer matches its state. The first
    views had no digest.
    """
    if value is None:
        return True
    try:
        view = json.loads(value)
        digest = view.get("digest", "" if view["createdAt"] else _digest(view["state"]))
        return value != VALUE and bool(digest == _digest(view["state"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def path(experiment_id: str) -> str:
    """Return the path of the view's page, relative to the server's address.

    MLflow opens its pages for GenAI unless the address or an earlier visit selects model training.
    """
    return (
        f"/#/experiments/{experiment_id}/runs?viewStateShareKey={KEY}&workflowType=machine_learning"
    )
