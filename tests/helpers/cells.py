"""Sweeps made by hand: records and cells whose figures follow from a few choices."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import loading, naming, notes, verdicts
from resnet8ptq.report.families import Cell, Family, make_family
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.statistics import flips, mcnemar
from resnet8ptq.tasks.scoring.values import Paired
from resnet8ptq.tracking.record import RunRecord

NAMES = ("cat", "dog")
IMAGES = 1000
LABELS = np.arange(IMAGES) % len(NAMES)
BASELINE = np.where(np.arange(IMAGES) < 900, LABELS, 1 - LABELS)  # right on the first 900


def predictions(lost: int = 0, won: int = 0, label: int | None = None) -> np.ndarray:
    """Return predictions that lose `lost` images (of class `label`) and win `won`."""
    result = BASELINE.copy()
    right = np.flatnonzero(BASELINE == LABELS)
    if label is not None:
        right = right[LABELS[right] == label]
    wrong = np.flatnonzero(BASELINE != LABELS)
    for flipped in (right[:lost], wrong[:won]):
        result[flipped] = 1 - result[flipped]
    return result


def paired(model: np.ndarray) -> Paired:
    """Return the predictions of a model beside those of the baseline."""
    return Paired(Hits(model, LABELS), Hits(BASELINE, LABELS))


def record(run_id: str, model: np.ndarray, **changes: float | str) -> RunRecord:
    """Return a record with the metrics that these predictions have."""
    params = {
        **{"backend": "onnx", "dtype": "int8", "calib": "minmax", "per_channel": "false"},
        **{"data": "pets", "model": "net", "seed": "42", "latency.threads": "1"},
    }
    metrics = {
        "accuracy": float((model == LABELS).mean()),
        "expected_accuracy": float((model == LABELS).mean()),
        "ci95/value_low": 0.8,
        "ci95/value_high": 0.95,
        "drop": float((BASELINE == LABELS).mean() - (model == LABELS).mean()),
        "baseline/accuracy": 0.9,
        "baseline/size_bytes": 300_000.0,
        "paired/p_value": mcnemar(*flips(model == LABELS, BASELINE == LABELS)),
        "size_bytes": 100_000.0,
        "counts/total": float(IMAGES),
    }
    for label, name in enumerate(NAMES):
        members = label == LABELS
        hits, before = (model == LABELS)[members], (BASELINE == LABELS)[members]
        metrics[f"class/{name}/drop"] = float(before.mean() - hits.mean())
    for key, value in changes.items():
        (params if isinstance(value, str) else metrics)[key] = value
    tags = {"status": "ok", "class_names": json.dumps(NAMES)}
    return RunRecord.of(run_id, params, metrics, tags)


def sweep(
    *cells: tuple[str, np.ndarray, dict[str, float | str]], choices: Sequence[np.ndarray] = ()
) -> Family:
    """Compare measured cells given as (run id, predictions, changes of params and metrics).

    `choices` are the predictions of each on the selection samples, which have the same labels.
    """
    records = [record(run_id, model, **changes) for run_id, model, changes in cells]
    made = [
        Cell(value, label, paired(model))
        for value, label, (_, model, _) in zip(records, naming.labels(records), cells, strict=True)
    ]
    for position, model in enumerate(choices):
        accuracy = float((model == LABELS).mean())
        before = float((BASELINE == LABELS).mean())
        measured = {
            "choice/accuracy": accuracy,
            "choice/expected_accuracy": accuracy,
            "choice/baseline/accuracy": before,
            "choice/drop": before - accuracy,
            "choice/counts/total": float(IMAGES),
        }
        made[position] = amend(replace(made[position], choice=paired(model)), metrics=measured)
    return make_family(made)


def judged_of(family: Family, limits: ReportConfig | None = None) -> dict[str, str]:
    """Return the verdicts on the models of a family as texts, by run id."""
    records = verdicts.assess(family, limits or ReportConfig()).records
    return {record.run_id: record.verdict_text for record in records if record.verdict_text}


def notes_on(records: Sequence[RunRecord]) -> list[str]:
    """Return the notes below the table of runs without verdicts."""
    [family] = loading.without_files(records, ReportConfig())
    return notes.collect(family)


def amend(cell: Cell, **logged: Mapping[str, Any]) -> Cell:
    """Return a cell whose run has logged more `params`, `metrics` or `tags`."""
    return replace(cell, record=amend_record(cell.record, **logged))


def amend_record(run: RunRecord, **logged: Mapping[str, Any]) -> RunRecord:
    """Return a run that has logged more `params`, `metrics` or `tags`."""
    return run.changed(**{kind: {**getattr(run, kind), **more} for kind, more in logged.items()})


def amend_family(family: Family, **logged: Mapping[str, Any]) -> Family:
    """Return a family whose runs have logged more `params`, `metrics` or `tags`."""
    return replace(family, cells=tuple(amend(cell, **logged) for cell in family.cells))


def unmeasured(run_id: str, status: str, reason: str) -> Cell:
    """Return a cell without figures."""
    finished = record(run_id, BASELINE)
    bare = RunRecord.of(run_id, finished.params, {}, {"status": status, "reason": reason})
    return Cell(bare, naming.labels([bare])[0])
