"""A saved view for MLflow's UI: the runs as a flat table with the main columns.

By default, the UI shows a sweep as one folded row without metrics. A saved view is a tag of the
experiment: JSON with a `state`, which is itself JSON as text. Entries that are missing in the state
keep their defaults. A version of MLflow that cannot read the tag opens its default page. The UI
ignores a view if the address also has a filter or an order, so a link to the view has neither.
"""

import hashlib
import json
from typing import Any

KEY = "comparison"
TAG = f"mlflow.sharedViewState.{KEY}"

# Primary metrics of the tasks; the UI leaves out columns that no run has.
_SCORES = (
    "accuracy_percent",
    "top5_accuracy_percent",
    "auc",
    "ap",
    "spearman",
    "mae",
    "rmse",
    "custom_metric",
    "custom_metric_percent",
)
_NUMBERS = (
    *_SCORES,
    "loss_points",
    "loss",
    "loss_percent",
    "size_kb",
    "latency_ms",
    "speedup",
    "agreement_percent",
    "sqnr_db",
    "timed_alone/latency_ms",
)
COLUMNS = (
    "tags.`verdict`",
    *(f"metrics.`{name}`" for name in _NUMBERS),
    "params.`dataset`",
    "params.`model`",
)
# The widths of columns in pixels. The run's name is wide, because it holds backend, dtype,
# calibration and varying settings.
_WIDTHS = {
    "attributes.`Run Name`": 340,
    "runDateAndNestInfo": 150,
    **{column: max(90, 9 * len(column) - 60) for column in COLUMNS},
    COLUMNS[0]: 120,  # fits the word "unsupported"
}
_TRADE_OFFS = "Trade-offs"
_LEADING = "Model metrics"  # MLflow's name for metrics without a group
# Sections of the chart view: the open ones first, then folded groups of metrics.
_SECTIONS = (_TRADE_OFFS, _LEADING, "unquantized", "test", "timed_alone")


def _chart(x: str, y: str) -> dict[str, Any]:
    """Return a scatter plot of two metrics, with a point for each of at most 100 runs."""
    return {
        "type": "SCATTER",
        "uuid": f"{x}-{y}",
        "metricSectionId": _TRADE_OFFS,
        "xaxis": {"key": x, "type": "METRIC"},
        "yaxis": {"key": y, "type": "METRIC"},
        "isGenerated": False,
        "deleted": False,
        "runsCountToCompare": 100,
    }


def _section(name: str) -> dict[str, Any]:
    """Return a section of the chart view; trade-offs and leading metrics are open."""
    return {
        "uuid": name,
        "name": name,
        "display": name in (_TRADE_OFFS, _LEADING),
        "isReordered": True,
        "deleted": False,
        "isGenerated": name != _TRADE_OFFS,
    }


_STATE = {
    # Show the newest sweep first, above its own runs. If sorted by the start, the UI would fold
    # sweeps.
    "orderByKey": "attributes.`end_time`",
    "orderByAsc": False,
    "selectedColumns": COLUMNS,
    "columnOrder": [*_WIDTHS],
    "columnWidths": _WIDTHS,
    "compareRunCharts": [
        _chart("size_kb", "accuracy_percent"),
        _chart("latency_ms", "accuracy_percent"),
    ],
    "compareRunSections": [_section(name) for name in _SECTIONS],
    "isAccordionReordered": True,  # otherwise MLflow sorts sections by name
}


def _digest(state: str) -> str:
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def _value(state: str) -> str:
    return json.dumps(
        {"name": "Comparison", "createdAt": 0, "state": state, "digest": _digest(state)}
    )


VALUE = _value(json.dumps(_STATE))  # the value of TAG


def is_outdated(value: str | None) -> bool:
    """Return whether the tag's value is missing, or from another version of this module.

    A view that a user changed stays, because its digest no longer matches its state. A view without
    a digest is from an early version if its `createdAt` is 0.
    """
    if value is None:
        return True
    try:
        view = json.loads(value)
        own = _digest(view["state"])
        without_digest = "" if view["createdAt"] else own
        digest = view.get("digest", without_digest)
        return value != VALUE and bool(digest == own)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


# MLflow opens its pages for GenAI unless the address or an earlier visit selects model training.
_TRAINING = "workflowType=machine_learning"
HOME = f"/#/experiments?{_TRAINING}"  # the list of the experiments


def path(experiment_id: str) -> str:
    """Return the path of the view's page, relative to the server's address."""
    return f"/#/experiments/{experiment_id}/runs?viewStateShareKey={KEY}&{_TRAINING}"
