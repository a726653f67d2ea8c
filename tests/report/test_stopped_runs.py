"""The report on runs that stopped when decided, and on earlier runs on the same samples."""

from dataclasses import replace

import numpy as np
import pytest

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.evaluation.sequential import StoppingPlan
from resnet8ptq.evaluation.stopped_hits import StoppedHits
from resnet8ptq.report import families, naming, notes, table, verdicts
from resnet8ptq.report.families import Cell, Family, make_family
from resnet8ptq.report.pages import page
from resnet8ptq.report.selection import select
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.values import Paired
from resnet8ptq.tracking.ledger import EarlierRuns
from tests.helpers.cells import (
    BASELINE,
    LABELS,
    amend,
    amend_family,
    amend_record,
    predictions,
    sweep,
)

DIGEST = {"test_digest": "a" * 64}
PLAN = StoppingPlan(1000, 0.01, 0.025)
STOPS = (400, 700)


@pytest.fixture
def stopped() -> Family:
    """Two models that stopped after 400 and 700 of 1,000 samples; the second is the better one."""
    models = predictions(won=1), predictions(won=2)
    family = sweep(
        *((str(seen), model, {}) for seen, model in zip(STOPS, models, strict=True)),
        choices=(predictions(lost=5), predictions()),
    )
    return make_family([_stop(cell, seen) for cell, seen in zip(family.cells, STOPS, strict=True)])


def _stop(cell: Cell, seen: int) -> Cell:
    paired = cell.paired
    assert paired is not None and isinstance(paired.model, Hits)
    order = np.random.default_rng(0).permutation(len(LABELS))[:seen]
    model, baseline = (
        Hits(values.predictions[order], LABELS[order])
        for values in (paired.model, Hits(BASELINE, LABELS))
    )
    low_high = {"stopping/loss_low": -0.009, "stopping/loss_high": 0.004}
    stop = {"stopping/planned": 1000.0, "stopping/loss": -0.002, "counts/total": float(seen)}
    cell = amend(cell, metrics=stop | low_high)
    return replace(cell, paired=Paired(StoppedHits(model, PLAN), baseline))


def test_the_place_of_the_stop_and_the_corrected_loss_are_shown(stopped):
    judged = verdicts.assess(stopped, ReportConfig())
    for seen, record in zip(STOPS, judged.records, strict=True):
        assert record.verdict_text.endswith(f" after {seen} of 1,000")
    lines = notes.collect(judged)
    assert sum("loss -0.20 points (95%: -0.90 to +0.40), corrected" in line for line in lines) == 2
    assert any(line.startswith("after N of M") for line in lines)
    assert naming.title(stopped.records).endswith("up to 1,000 test samples")


def test_runs_are_ranked_by_the_samples_that_choose_and_no_class_is_judged(stopped):
    assert families.best_first(stopped.records) == [1, 0]
    [selected] = select([stopped], ReportConfig())
    text = page.to_markdown([selected], [])
    assert "Classes that lose accuracy" not in text
    assert "would give the same choice" not in text and "On the reported samples" not in text
    assert selected.recommendations[0].equals == ()  # different samples prove nothing between runs
    baseline, *_ = table.make(stopped.records).lines
    assert "90.00%" not in baseline  # it has another value on the samples of each run


def test_the_verdicts_are_those_of_the_corrected_p_values(stopped):
    for max_drop in (0.004, 0.01, 0.03):  # also other limits than that of the stop
        margins = [
            PLAN.margin(*cell.paired.model.hits.changes(cell.paired.baseline), max_drop)
            for cell, seen in zip(stopped.cells, STOPS, strict=True)
        ]
        expected = verdicts.decide(list(zip(margins, STOPS, strict=True)))
        judged = verdicts.assess(stopped, ReportConfig(max_drop=max_drop)).records
        pairs = [(record.verdict, record.samples_needed) for record in judged]
        assert pairs == [(verdict.outcome, verdict.samples) for verdict in expected]


def test_stopped_and_whole_runs_are_two_families():
    records = sweep(*((str(n), predictions(), {}) for n in range(2))).records
    stopped = [
        amend_record(record, tags=DIGEST, params={"evaluate.stop": stop})
        for record, stop in zip(records, ("all", "decided"), strict=True)
    ]
    assert [len(family) for family in families.group_by_samples(stopped)] == [1, 1]


def test_added_samples_are_judged_alone():
    """The model lost nothing on 900 samples that it was judged by before, and 30 on the others."""
    family, added = sweep(("a", predictions(lost=0), {})), np.arange(1000) >= 900
    [cell] = family.cells
    labels = np.arange(1000) % 2
    worse = np.where(np.arange(1000) >= 970, 1 - labels, labels)
    pair = Paired(Hits(worse, labels), Hits(labels, labels))
    cell = amend(cell, tags=DIGEST)
    family = replace(
        family, cells=(replace(cell, paired=pair),), added=added, earlier_runs=EarlierRuns(1)
    )
    limits = ReportConfig(max_drop=0.05)
    judged = verdicts.assess(family, limits)
    assert [record.verdict_text for record in judged.records] == ["pass"]
    [(_, alone)] = verdicts.assess_added(judged)
    assert alone.outcome == "fail"
    lines = notes.collect(judged)
    [line] = [line for line in lines if line.startswith("900 of these 1,000 samples")]
    assert "100 added samples alone" in line and line.endswith(f"{cell.label}: fail.")
    stopped = Paired(StoppedHits(pair.model, StoppingPlan(1000, 0.05, 0.05)), pair.baseline)
    family = replace(family, cells=(replace(cell, paired=stopped),))
    assert (
        verdicts.assess_added(verdicts.assess(family, limits)) == []
    )  # the plan has looked at all of them


@pytest.mark.parametrize(
    ("earlier", "begin"),
    [
        (EarlierRuns(1), "1 earlier run was scored"),
        (EarlierRuns(12), "12 earlier runs were scored"),
        (EarlierRuns(49, more=True), "at least 49 earlier runs were scored"),
    ],
)
def test_earlier_runs_are_reported(earlier, begin):
    family = amend_family(sweep(("a", predictions(), {})), tags=DIGEST)
    judged = verdicts.assess(family, ReportConfig())
    assert any(
        line.startswith(begin) for line in notes.collect(replace(judged, earlier_runs=earlier))
    )
    assert not any("earlier" in line for line in notes.collect(judged))
