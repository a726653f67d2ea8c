"""The rule of the headline, over made-up families of results."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.evaluation.paired_latency import Ratio
from resnet8ptq.report.rule import PREFERENCES, Candidate, choose, dominates

FP32_BYTES, FP32_MS = 1000.0, 1.0


def model(
    key: str,
    *,
    loss: float = 0.0,
    size: float = 300,
    ms: float | None = 0.5,
    passes: bool = True,
    rank: int = 0,
    error: float = 0.02,
) -> Candidate:
    """Return a candidate that was timed against an FP32 of 1 ms."""
    speed = None
    if ms is not None:
        ratio = FP32_MS / ms
        speed = Ratio(ratio, ratio * (1 - error), ratio * (1 + error))
    return Candidate(key, passes, loss, rank, size, FP32_BYTES, ms, speed)


candidates = st.builds(
    model,
    key=st.text("abc", min_size=1, max_size=3),
    loss=st.floats(-0.02, 0.03),
    size=st.floats(50, 1500),
    ms=st.floats(0.1, 3),
    passes=st.booleans(),
    rank=st.integers(0, 5),
    error=st.floats(0, 0.3),
)
families = st.lists(candidates, min_size=1, max_size=8)
untimed = families.map(lambda family: [replace(m, latency_ms=None, speed=None) for m in family])
preferences = st.sampled_from(PREFERENCES)


@given(st.one_of(families, untimed), preferences, st.floats(0, 0.01))
def test_the_headline_is_never_dominated(family, prefer, loss_error):
    headline = choose(family, prefer, loss_error)
    allowed = [one for one in family if one.passes] or family
    timed = all(one.latency_ms is not None for one in allowed)
    assert not any(dominates(o, headline.candidate, timed, loss_error) for o in allowed)


@given(st.one_of(families, untimed), preferences)
def test_deploy_is_never_said_without_a_pass(family, prefer):
    headline = choose(family, prefer)
    assert headline.advice != "deploy" or headline.candidate.passes
    assert headline.candidate.passes == any(one.passes for one in family)


@given(families, preferences)
def test_a_headline_slower_than_fp32_says_so(family, prefer):
    headline = choose(family, prefer)
    if headline.advice == "keep" or not headline.candidate.is_slower:
        return
    assert f"{headline.candidate.speed.value:.2f} times as fast as FP32" in headline.reason
    assert prefer == "size" or headline.nothing_faster or prefer == "accuracy"


@given(families)
def test_a_model_shown_faster_beats_every_slower_one(family):
    headline = choose(family)
    if not headline.nothing_faster:
        assert headline.candidate.is_faster


@given(families, preferences)
def test_the_order_of_the_runs_does_not_matter(family, prefer):
    unique = {m.key: m for m in family}
    forwards = choose(list(unique.values()), prefer)
    backwards = choose(list(unique.values())[::-1], prefer)
    assert forwards.reason == backwards.reason


def test_the_readmes_sweep_names_the_fastest_passing_model():
    slow = model("onnx uint8", loss=0.006, size=344, ms=1.58)
    fast = model("onnx u8s8", loss=0.005, size=345, ms=0.56)
    headline = choose([slow, fast])
    assert (headline.candidate, headline.advice) == (fast, "deploy")
    assert headline.reason == "the fastest that passes; 66% smaller, 1.79 times as fast as FP32"


def test_without_a_faster_model_the_smallest_is_named_with_its_speed():
    headline = choose([model("a", size=344, ms=1.58), model("b", size=280, ms=1.2)])
    assert headline.candidate.key == "b"
    assert headline.nothing_faster
    assert headline.reason.endswith("72% smaller, 0.83 times as fast as FP32")


def test_a_few_bytes_are_not_worth_twice_the_time():
    slow = model("torch int8", size=197, ms=2.15)
    quick = model("tflite int8", size=202, ms=1.1)
    large = model("onnx int8", size=225, ms=1.05)
    headline = choose([slow, quick, large])
    assert headline.candidate is quick
    assert headline.reason.startswith("the fastest of about the smallest size that passes; ")
    assert choose([slow, quick, large], "size").candidate is slow


def test_a_model_not_shown_to_be_faster_comes_before_one_at_half_of_the_speed():
    """On a busy machine, the interval of a model at 1.2 times FP32's speed contained 1."""
    slow = model("torch int8", size=280, ms=2.0)
    quick = model("onnx u8s8", size=345, ms=0.83, error=0.25)
    headline = choose([slow, quick])
    assert headline.candidate is quick
    assert headline.nothing_faster
    assert headline.reason.startswith("the smallest not slower than FP32 that passes; ")
    large = replace(quick, size_bytes=980.0, speed=Ratio(1.01, 0.9, 1.1))
    assert choose([slow, large]).candidate is slow  # gains nothing over FP32
    assert choose([slow, quick], "size").candidate is slow


def test_a_model_that_gains_nothing_keeps_fp32():
    headline = choose([model("a", size=1200, ms=1.5)])
    assert headline.advice == "keep"


def test_an_undecided_model_is_to_be_tested():
    assert choose([model("a", passes=False)]).advice == "test"


def test_accuracy_decides_among_equals_only():
    good, worse = model("good", rank=0), model("worse", rank=1, size=299)
    assert choose([good, worse]).candidate is good
    assert choose([good, replace(worse, size_bytes=200)]).candidate.key == "worse"


@pytest.mark.parametrize(("prefer", "key"), [("size", "small"), ("accuracy", "exact")])
def test_a_preference_changes_the_choice(prefer, key):
    family = [
        model("quick", ms=0.3, loss=0.008, rank=1),
        model("small", size=100, ms=1.4, loss=0.009, rank=2),
        model("exact", ms=0.6, loss=0.0001, rank=0),
    ]
    assert choose(family).candidate.key == "quick"
    assert choose(family, prefer).candidate.key == key


def test_no_candidate_is_no_headline():
    assert choose([]) is None
