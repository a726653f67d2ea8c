"""Pass, fail and undecided, from sweeps made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import equal_files, notes, table, verdicts
from resnet8ptq.report.families import Cell
from resnet8ptq.report.pages import page
from resnet8ptq.report.selection import select
from resnet8ptq.report.verdicts import FAIL, PASS, UNDECIDED, VOID, Verdict
from resnet8ptq.tasks.classification import ACCURACY
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.values import Paired
from tests.helpers.cells import judged_of, predictions, record, sweep


def judged(*cells: object, max_drop: float = 0.01) -> dict[str, str]:
    result = verdicts.assess(sweep(*cells), ReportConfig(max_drop=max_drop))
    return {record.run_id: record.verdict for record in result.records}


def test_a_loss_is_within_beyond_or_neither():
    result = judged(
        ("kept", predictions(), {}),
        ("lost", predictions(lost=40), {"calib": "entropy"}),
        ("near", predictions(lost=8), {"calib": "percentile"}),
    )
    assert result == {"kept": PASS, "lost": FAIL, "near": UNDECIDED}


def test_a_limit_that_all_keep_and_one_that_none_does():
    cells = (("a", predictions(lost=60), {}), ("b", predictions(lost=70), {"calib": "entropy"}))
    assert set(judged(*cells, max_drop=0.2).values()) == {PASS}
    assert set(judged(*cells, max_drop=0.02).values()) == {FAIL}


def test_what_one_run_shows_many_may_not():
    """Of 100 models the luckiest is within any bound that holds for one."""
    near = predictions(lost=4, won=0)
    assert judged(("a", near, {})) == {"a": PASS}
    many = [(str(n), near, {"seed": str(n)}) for n in range(100)]
    assert set(judged(*many).values()) == {UNDECIDED}


def test_runs_with_equal_files_are_corrected_as_one_model():
    near, digest = predictions(lost=4), {"artifact_sha256": "e" * 64}
    many = sweep(*((str(n), near, {"seed": str(n), **digest}) for n in range(100)))
    judged = judged_of(many)
    assert {*judged.values()} == {PASS} and len(judged) == 100
    assert set(equal_files.adjusted_p(many.records).values()) == {many.records[0].p_alone}
    messages = notes.collect(verdicts.assess(many, ReportConfig()))
    assert not any("corrected for 100" in line for line in messages)
    other = ("other", near, {"artifact_sha256": "f" * 64})  # on the same samples, another file
    engine = ("engine", near, {"engine": "qnnpack", **digest})  # the same file, other kernels
    three = sweep(("a", near, digest), ("b", near, {"seed": "7", **digest}), other, engine)
    assert set(equal_files.adjusted_p(three.records).values()) == {3 * three.records[0].p_alone}
    messages = notes.collect(verdicts.assess(three, ReportConfig()))
    assert any("corrected for 3 models (Holm)" in line for line in messages)


def test_one_dynamic_file_at_two_batch_sizes_is_two_models():
    """Its ranges are those of a batch, and its predictions may differ."""
    near, changed, batch = predictions(lost=1), predictions(lost=40), "system/evaluate_batch_size"
    same = {"artifact_sha256": "e" * 64, "method": "dynamic"}
    family = sweep(("a", near, {batch: 256.0, **same}), ("b", changed, {batch: 1.0, **same}))
    outcomes = [*judged_of(family).values()]
    assert (outcomes, equal_files.count_models(family.records)) == ([PASS, FAIL], 2)
    static = sweep(*((n, near, {batch: float(n), **same, "method": "static"}) for n in "12"))
    assert equal_files.count_models(static.records) == 1


def test_a_model_that_was_confirmed_alone_is_corrected_for_the_one_that_could_follow():
    near = predictions(lost=4, won=0)
    for text, outcome in (("2", UNDECIDED), ("1", PASS), ("x", PASS), ("9" * 99, PASS)):
        assert judged(("a", near, {"report.confirmations": text})) == {"a": outcome}
    confirmed = sweep(("a", near, {"report.confirmations": "2"}))
    note = notes.collect(verdicts.assess(confirmed, ReportConfig()))
    assert any("corrected for 2 models (Holm)" in line for line in note)


def test_undecided_says_how_many_samples_would_tell():
    (few,) = verdicts.assess(sweep(("a", predictions(lost=8, won=4), {})), ReportConfig()).records
    assert few.verdict == UNDECIDED
    assert few.verdict_text == f"undecided (needs {few.samples_needed:,} samples)"
    assert 1000 < few.samples_needed < 3000
    (verge,) = verdicts.assess(sweep(("a", predictions(lost=10), {})), ReportConfig()).records
    assert (verge.samples_needed, verge.verdict_text) == (None, "undecided")  # at the limit
    assert str(Verdict(UNDECIDED, 1234)) == "undecided (needs 1,200 samples)"
    assert str(Verdict(UNDECIDED, 3e7)) == "undecided"  # beyond reason
    assert str(Verdict(PASS)) == "pass"


def test_the_wanted_accuracy_is_reported_beside():
    result = sweep(("a", predictions(), {}))
    judged = judged_of(result, ReportConfig(min_accuracy=0.95))
    assert judged == {"a": "fail, accuracy < 95.00%"}


def test_grouped_samples_decide_nothing():
    result = sweep(("a", predictions(), {"grouped": "true"}))
    assert judged_of(result) == {"a": "undecided"}
    texts = notes.collect(verdicts.assess(result, ReportConfig()))
    assert notes.GROUPED_NOTE in texts


DOUBT = "FP32 ACCURACY NEAR CHANCE, 10.01% (1001 of 10000, 10 classes)"


def test_beside_a_broken_fp32_all_is_void():
    """Neither a pass nor a recommendation; sound runs of the family are judged by themselves."""
    broken = sweep(("a", predictions(won=9), {"doubt": DOUBT}))
    (selected,) = select([broken], ReportConfig())
    assert {record.verdict_text for record in selected.family.records} == {VOID}
    assert (selected.recommendations, selected.within) == ([], [])
    text = page.to_markdown([selected], {})
    for part in (DOUBT.replace("(", "(")[:20], "1 void", "Every verdict is void", notes.VOID_NOTE):
        assert part.replace("_", "\\_") in text
    assert "## Recommendation" not in text
    mixed = sweep(
        ("a", predictions(), {"doubt": DOUBT}),
        ("b", predictions(lost=4), {"backend": "torch"}),  # alone it passes, of two it would not
    )
    assert judged_of(mixed) == {"a": VOID, "b": PASS}


def test_the_column_says_void():
    result = sweep(("a", predictions(), {"doubt": DOUBT}))
    rows = table.make(verdicts.assess(result, ReportConfig(min_accuracy=0.99)).records).lines
    assert VOID in rows[-1]


def simulate(loss: float, random: np.random.Generator, images: int = 2000) -> Cell:
    """Return a model of 87% accuracy that loses `loss` against the best, with 3% flips."""
    labels = np.zeros(images, np.int64)
    lost, won = 0.015 + loss / 2, 0.015 - loss / 2
    draws = random.random(images)
    best = random.random(images) < 0.87
    flips = np.where(best, draws < lost / 0.87, draws < won / 0.13)
    values = [Hits((~right).astype(np.int64), labels) for right in (best ^ flips, best)]
    about = record("run", predictions(), **{"counts/total": float(images)})
    return Cell(about, "model", Paired(*values))


def share_listed(loss: float, images: int = 2000, sweeps: int = 400) -> float:
    """Return the share of simulated sweeps that list a model with this loss as good as the best."""
    random = np.random.default_rng(7)
    listed = 0
    for _ in range(sweeps):
        cell = simulate(loss, random, images)
        assert cell.paired is not None
        best = replace(cell, paired=Paired(cell.paired.baseline, cell.paired.baseline))
        listed += bool(verdicts.as_good_as(best, [cell], ACCURACY, ReportConfig())[0])
    return listed / sweeps


@pytest.mark.parametrize("images", [500, 2000, 10_000])
def test_a_model_that_is_a_point_worse_than_the_best_is_hardly_ever_listed(images):
    assert share_listed(0.01, images) <= 0.05


def test_a_model_at_the_margin_is_listed_in_at_most_a_twentieth_of_sweeps():
    assert share_listed(0.005, 10_000) <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5


def test_an_equal_model_is_listed_if_the_samples_suffice():
    assert share_listed(0.0, 10_000) > 0.8
