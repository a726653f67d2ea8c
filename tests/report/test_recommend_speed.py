"""The choices by speed, from sweeps made by hand."""

from dataclasses import replace

from resnet8ptq.evaluation.paired_latency import PairedLatency
from resnet8ptq.report import notes, timing
from resnet8ptq.report import recommend as recommending
from resnet8ptq.report.recommend import finalists, recommend
from resnet8ptq.tracking.journal import CARRIED_TAG
from tests.helpers.cells import amend, predictions, sweep
from tests.helpers.selections import by_use, chosen, select

SINGLE = "fastest, one sample at a time"
BATCHES = "fastest, 64 samples at a time"


def turns(**times: float) -> PairedLatency:
    """Blocks that differ by a hundredth, of models twice as slow with 64 images."""
    blocks = {
        name.replace("_", " "): [block * (1 + 0.01 * (n % 2)) for n in range(10)]
        for name, block in times.items()
    }
    return PairedLatency(blocks, {k: [2 * t for t in block] for k, block in blocks.items()}, 64, 1)


TIMED = {"latency_p50_ms": 0.2, "latency_batch_p50_ms": 9.0, "baseline/latency_p50_ms": 0.3}


def test_a_run_measured_elsewhere_by_hand_is_not_timed_in_turns():
    """Its turns are of the machine before, and its own latency is of no turn."""
    cells = (("a", predictions(), TIMED), ("b", predictions(), {**TIMED, "calib": "entropy"}))
    family = sweep(*cells)
    times = turns(a=0.2, b=0.1, onnx_fp32=0.3)
    elsewhere = amend(family.cells[1], tags={CARRIED_TAG: "ARM"})
    selected = select(replace(family, cells=(family.cells[0], elsewhere)), times)
    fastest = {one.title: one for one in recommend(selected)}[SINGLE]
    assert chosen(fastest) == "a"
    assert selected.family.cells[1].record.latency_ms == TIMED["latency_p50_ms"]
    alone = select(replace(family, cells=(elsewhere,)), turns(b=0.1, onnx_fp32=0.3))
    assert alone.timing is None


def test_a_family_timed_in_turns_keeps_no_latency_of_separate_runs():
    """Else runs.csv would have a 95th percentile below the median."""
    names = ("latency_p95_ms", "latency_batch_p95_ms")
    own = dict.fromkeys((*names, *(f"baseline/{name}" for name in names)), 0.25)
    selected = select(sweep(("a", predictions(), TIMED | own)), turns(a=0.5, onnx_fp32=0.6))
    metrics = selected.family.cells[0].record.metrics
    assert own.keys().isdisjoint(metrics)
    assert "latency_p50_ms" in metrics


def test_the_fastest_is_that_of_the_turns_fp32_included():
    cells = (("a", predictions(), TIMED), ("b", predictions(), {**TIMED, "calib": "entropy"}))
    result = by_use(*cells, timing=turns(a=0.2, b=0.1, onnx_fp32=0.15))
    assert chosen(result[SINGLE]) == chosen(result[BATCHES]) == "b"
    assert "1.50 times as fast (95% interval 1.50 to 1.50) as onnx fp32" in result[SINGLE].because
    assert result[SINGLE].because.endswith("the fastest FP32")
    assert result[SINGLE].equals == ()
    fp32 = by_use(*cells, timing=turns(a=0.2, b=0.18, onnx_fp32=0.15))[SINGLE]
    assert (fp32.choice, fp32.label, fp32.verdict, fp32.command) == (None, "onnx fp32", "", "")
    assert "the fastest model within the limit is onnx int8 entropy" in fp32.because
    assert "0.83 times as fast" in fp32.because
    assert "; try python -m resnet8ptq advise, " in fp32.because
    assert (fp32.equals, fp32.equals_mean) == ((), "")


def test_the_fastest_of_the_selection_samples_is_called_so():
    """A faster one of the table may pass on the reported samples alone."""
    cells = (("a", predictions(), TIMED), ("b", predictions(), {**TIMED, "calib": "mse"}))
    timed = turns(a=0.2, b=0.18, onnx_fp32=0.15)
    choices = [predictions(), predictions(lost=90)]
    fp32 = by_use(*cells, timing=timed, choices=choices)[SINGLE]
    assert "within the limit on the selection samples is onnx int8 minmax" in fp32.because


def test_a_model_as_fast_as_fp32_is_chosen_over_it():
    result = by_use(("a", predictions(), TIMED), timing=turns(a=0.15, onnx_fp32=0.15))[SINGLE]
    assert chosen(result) == "a"
    assert result.because.endswith("the fastest FP32: not significantly faster")


def test_equally_fast_models_are_alternatives():
    cells = [(name, predictions(), {**TIMED, "seed": name}) for name in "abc"]
    result = by_use(*cells, timing=turns(a=0.1, b=0.1, onnx_fp32=0.2, torch_fp32=0.3))
    assert (result[SINGLE].use, result[BATCHES].use) == ("fastest", "fastest_batch")
    assert result[SINGLE].because.endswith("2.00) as onnx fp32, the fastest FP32")
    assert [cell.record.run_id for cell in result[SINGLE].equals] == ["b"]
    assert result[SINGLE].equals_mean == "not significantly slower"


def test_finalists_of_each_use_are_its_fastest(monkeypatch):
    monkeypatch.setattr(recommending, "ALL_TIMED", 0)
    single, batch = (3, 4, 1, 5, 2, 6, 7, 8), (6, 5, 7, 4, 8, 1, 2, 3)
    cells = [
        (name, predictions(), {"seed": name, "latency_p50_ms": a, "latency_batch_p50_ms": b})
        for name, a, b in zip("bacdefgh", single, batch, strict=True)
    ]
    names = {cell.record.run_id for cell in finalists(select(sweep(*cells)))}
    assert names == {"b", *"bce", *"fgh"}  # the first of equal ones, as the best and the smallest


def test_a_speedup_whose_interval_has_1_in_it_is_not_called_faster():
    noisy = PairedLatency({"a": [1.0, 2.0, 1.0, 2.0], "onnx fp32": [2.0, 1.1, 2.0, 1.1]}, {}, 64, 1)
    result = by_use(("a", predictions(), TIMED), timing=noisy)
    assert result[SINGLE].because.endswith("the fastest FP32: not significantly faster")
    assert BATCHES not in result


def test_latencies_of_separate_runs_are_reported_as_such():
    fast = {**TIMED, "latency_p50_ms": 0.1, "calib": "entropy"}
    cells = (("a", predictions(), TIMED), ("b", predictions(), fast))
    result = by_use(*cells)[SINGLE]
    assert chosen(result) == "b"
    assert result.because == (
        "0.100 ms, 3.00 times as fast as onnx fp32 (measured in different runs, at different times)"
    )
    assert SINGLE not in by_use(*cells, timing=turns(gone=0.01, onnx_fp32=0.15))  # of another limit
    slow = {**TIMED, "latency_p50_ms": 0.4}
    assert by_use(("a", predictions(), slow))[SINGLE].label == "onnx fp32"
    assert not any(use.startswith("fastest") for use in by_use(("a", predictions(), {})))


def test_runs_are_held_against_the_fastest_fp32_and_must_be_faster():
    other = {**TIMED, "backend": "torch", "baseline/latency_p50_ms": 0.25}
    cells = (("c", predictions(), {}), ("a", predictions(), TIMED), ("b", predictions(), other))
    result = by_use(*cells)[SINGLE]  # the first was not timed
    assert "1.25 times as fast as torch fp32" in result.because
    assert result.use == "fastest"
    equal = by_use(("a", predictions(), {**TIMED, "baseline/latency_p50_ms": 0.2}))[SINGLE]
    assert (equal.choice, equal.label) == (None, "onnx fp32")


def test_the_fastest_run_names_those_within_a_twentieth_of_its_latency():
    def timed(latency: float) -> dict[str, float | str]:
        both = {"latency_p50_ms": latency, "baseline/latency_p50_ms": 2.0}
        return {**TIMED, **both, "seed": str(latency)}

    cells = [(f"{item:.2f}"[-2:], predictions(), timed(item)) for item in (1.0, 1.05, 1.06)]
    fastest = by_use(*cells)[SINGLE]
    assert chosen(fastest) == "00"
    assert [cell.record.run_id for cell in fastest.equals] == ["05"]
    assert fastest.equals_mean == "latency within 5%"


def test_up_to_eight_models_within_the_limit_are_all_timed():
    cells = [(str(n), predictions(), {**TIMED, "seed": str(n)}) for n in range(8)]
    assert len(finalists(select(sweep(*cells)))) == 8
    assert len(finalists(select(sweep(*cells, ("more", predictions(), TIMED))))) < 8


def test_few_models_are_all_timed_also_beyond_the_limit_on_the_selection_samples():
    """The table shows them all, and a model that passes there has a latency."""
    cells = (("a", predictions(won=9), TIMED), ("b", predictions(won=8), {**TIMED, "seed": "b"}))
    family = sweep(*cells, choices=[predictions(), predictions(lost=90)])
    selected = select(family)
    assert [cell.record.run_id for cell in selected.within] == ["a"]
    assert [cell.record.run_id for cell in finalists(selected)] == ["a", "b"]
    none = select(sweep(*cells, choices=[predictions(lost=90), predictions(lost=90)]))
    assert finalists(none) == []


def test_finalists_are_the_fastest_the_smallest_and_the_best(monkeypatch):
    monkeypatch.setattr(recommending, "ALL_TIMED", 0)

    def timed(number: int, **changes: float | str) -> dict[str, float | str]:
        return {**TIMED, "latency_p50_ms": number, "latency_batch_p50_ms": number, **changes}

    cells = [(str(n), predictions(lost=1), timed(n, seed=str(n))) for n in range(1, 7)]
    cells.append(("best", predictions(), timed(8)))
    cells.append(("small", predictions(lost=1), timed(9, size_bytes=1.0)))
    cells.append(("untimed", predictions(won=5), {"size_bytes": 0.5}))
    result = finalists(select(sweep(*cells)))
    assert {cell.record.run_id for cell in result} == {"1", "2", "3", "best", "small"}
    assert finalists(select(sweep(("a", predictions(), {})))) == []


def test_of_equally_small_models_the_best_is_timed(monkeypatch):
    """It is the one that is recommended as the smallest."""
    monkeypatch.setattr(recommending, "ALL_TIMED", 0)
    monkeypatch.setattr(recommending, "FINALISTS", 0)
    fewest = {**TIMED, "size_bytes": 99_900.0}
    cells = (
        ("large", predictions(won=9), {**TIMED, "seed": "l", "size_bytes": 200_000.0}),
        ("fewest", predictions(), {**fewest, "seed": "f"}),
        ("better", predictions(won=5), {**TIMED, "seed": "b"}),
    )
    assert "better" in {cell.record.run_id for cell in finalists(select(sweep(*cells)))}
    assert chosen(by_use(*cells)["smallest"]) == "better"


def test_the_headline_of_the_turns_is_the_fastest_that_passes():
    cells = (
        ("slow", predictions(won=5), {**TIMED, "size_bytes": 50_000.0}),
        ("quick", predictions(), {**TIMED, "calib": "mse", "size_bytes": 90_000.0}),
        ("fails", predictions(lost=60), {**TIMED, "calib": "entropy"}),
    )
    result = select(sweep(*cells), turns(slow=0.3, quick=0.1, fails=0.01, onnx_fp32=0.2))
    assert (result.headline.cell.record.run_id, result.headline.advice) == (
        "quick",
        "deploy",
    )
    slow = select(sweep(*cells), turns(slow=0.3, quick=0.25, fails=0.01, onnx_fp32=0.2))
    assert slow.headline.cell.record.run_id == "slow"  # the smallest
    assert slow.headline.nothing_faster
    assert "0.67 times as fast as FP32" in slow.headline.reason


def test_latencies_in_turns_and_models_without_are_explained():
    """Each of the two was timed by itself; one was timed in turns."""
    family = sweep(("a", predictions(), TIMED), ("b", predictions(), {**TIMED, "calib": "mse"}))
    timed = timing.put_in(family, turns(a=1.0, onnx_fp32=2.0))
    assert notes.TURNS_NOTE.format(threads="1") in notes.collect(timed)
    assert notes.UNTIMED_NOTE in notes.collect(timed)
    assert notes.UNTIMED_NOTE in notes.collect_warnings(timed)
    assert notes.UNTIMED_NOTE not in notes.collect(family)
    equal = {**TIMED, "artifact_sha256": "1"}
    twins = sweep(("a", predictions(), equal), ("b", predictions(), equal))
    shared = timing.put_in(twins, turns(a=1.0, onnx_fp32=2.0))
    assert notes.UNTIMED_NOTE not in notes.collect(shared)  # one row, with its latency
    all_timed = replace(timed, cells=timed.cells[:1])
    assert notes.UNTIMED_NOTE not in notes.collect(all_timed)


def test_the_fastest_of_about_the_smallest_size_is_timed(monkeypatch):
    """The rule of the headline may choose it."""
    monkeypatch.setattr(recommending, "ALL_TIMED", 0)
    monkeypatch.setattr(recommending, "FINALISTS", 0)
    quick = {**TIMED, "latency_p50_ms": 0.01}
    cells = (
        ("best", predictions(won=9), {**TIMED, "seed": "b", "size_bytes": 200_000.0}),
        ("smallest", predictions(won=5), {**TIMED, "seed": "s", "size_bytes": 100_000.0}),
        ("near", predictions(), {**quick, "seed": "n", "size_bytes": 105_000.0}),
        ("larger", predictions(), {**quick, "seed": "l", "size_bytes": 150_000.0}),
    )
    result = finalists(select(sweep(*cells)))
    assert [cell.record.run_id for cell in result] == ["best", "smallest", "near"]
