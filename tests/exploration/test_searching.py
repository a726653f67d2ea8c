"""The search's choice of steps, without running anything: tried steps in, next steps out."""

import json
import math
from dataclasses import replace
from functools import cache, reduce
from itertools import cycle, product

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser

from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.config import limits, words
from resnet8ptq.experiment import network_properties as properties
from resnet8ptq.exploration.search import searching, step_table
from resnet8ptq.exploration.search.changes import Change, calibrate_with
from resnet8ptq.exploration.search.searching import DIAGNOSIS, FEWER_BITS, Asked, Tried, next_steps
from resnet8ptq.sweeps import search as sweep_search
from tests.helpers.configs import make_config
from tests.helpers.factories import quantizer_of
from tests.helpers.frameworks import QUANTIZING

NARROWER = [name for name, one in BACKENDS.items() if one.search.fewer_bits is not None]
ASKED = Asked("fastest", ("onnx",), limit=0.01)
LOST = Tried(step=None, loss=0.1, error=0.002, noise=1.0, size_bytes=100_000, seconds=1.0)
PASSED = replace(LOST, loss=0.001, within=True, noise=0.1)


def run_search(asked, outcome, most=60):
    """Run a search to its end; `outcome` returns the `Tried` of a step."""
    tried = []
    while steps := next_steps(asked, tried):
        tried += [replace(outcome(step), step=step) for step in steps]
        assert len(tried) < most
    return tried


def kinds_of(tried):
    return list(dict.fromkeys(item.step.kind for item in tried))


def test_the_first_model_that_passes_ends_the_search():
    [only] = run_search(ASKED, lambda step: PASSED)
    assert only.step.kind == "start"
    assert {"backend=onnx", "dtype=u8s8", "per_channel=true"} <= set(only.step.overrides)


def test_cheap_steps_come_first_and_each_changes_the_best_so_far():
    def outcome(step):
        return replace(LOST, loss=0.05) if "calib=mse" in step.overrides else LOST

    tried = run_search(ASKED, outcome)
    assert kinds_of(tried) == [
        *("start", "calibrations", DIAGNOSIS, "bias_correction", "learned_rounding"),
        *("float_layers", "weights_in_8_bits", "weights_in_16_bits", "fine_tuning"),
    ]
    assert "calib=mse" in tried[-1].step.overrides


FREE = ["start", "calibrations", "bias_correction", "learned_rounding"]


def test_where_nothing_is_lost_but_samples_are_too_few_no_step_costs_bytes_or_speed():
    def outcome(step):
        noise = 0.001 if step.kind == "learned_rounding" else 0.009
        return replace(LOST, loss=0.0, noise=noise)

    tried = run_search(ASKED, outcome)
    assert kinds_of(tried) == FREE
    assert searching.rank(ASKED, tried)[0].step.kind == "learned_rounding"


@pytest.mark.parametrize(("loss", "ends"), [(0.004, True), (0.006, False)])
def test_samples_that_can_show_no_loss_end_the_search_at_half_of_the_limit(loss, ends):
    tried = run_search(ASKED, lambda step: replace(LOST, loss=loss, error=0.015, noise=0.001))
    assert (kinds_of(tried) == FREE) == ends


@pytest.mark.parametrize("within", [False, True])
def test_items_that_hardly_change_may_be_too_few(within):
    """Their loss is far below the limit, and still not shown to be."""
    known = replace(LOST, loss=0.001, error=0.001, noise=0.001, within=within)
    tried = run_search(ASKED, lambda step: known)
    assert kinds_of(tried) == (["start"] if within else FREE)


def test_outputs_far_from_fp32s_are_no_luck_of_few_samples():
    tried = run_search(ASKED, lambda step: replace(LOST, loss=0.0, error=0.015, noise=0.02))
    assert kinds_of(tried)[-4:] == [
        "float_layers",
        "weights_in_8_bits",
        "weights_in_16_bits",
        "fine_tuning",
    ]


def test_findings_decide_the_next_steps():
    result = '[{"name": "outlier weight", "tensor": "w", "changes": [["nodes_to_exclude=[a]"]]}]'

    def outcome(step):
        if step.kind == DIAGNOSIS:
            return replace(LOST, findings=result, weights_db=30.0, activations_db=20.0)
        better = replace(LOST, loss=0.05, named="[b,c]")
        return better if step.kind == "float_layers" else LOST

    tried = run_search(ASKED, outcome)
    assert kinds_of(tried)[3:] == [
        *("answers", "bias_correction", "float_layers", "weights_in_8_bits"),
        *("learned_rounding", "weights_in_16_bits", "fine_tuning"),
    ]
    by_kind = {item.step.kind: item.step for item in tried}
    assert "nodes_to_exclude=[a]" in by_kind["answers"].overrides
    assert "outlier weight in w" in by_kind["answers"].why
    assert "nodes_to_exclude=[b,c]" in by_kind["learned_rounding"].overrides  # no second search
    assert not any(word.startswith("max_drop=") for word in by_kind["learned_rounding"].overrides)


def test_the_rows_of_a_kind_are_alike():
    """The search reads these attributes from the first row of a kind."""
    first: dict[str, tuple[bool, bool, bool]] = {}
    for row in step_table.STEPS:
        alike = (row.is_start, row.free, row.plain)
        assert first.setdefault(row.name, alike) == alike, row.name


@pytest.mark.parametrize(
    ("name", "word"),
    [
        (properties.BESIDE, "method=mixed"),
        (properties.ATTENTION, "corrections.smooth_quant=true"),
        (properties.POOLS, step_table.find_rows("operators")[0].change.words),
    ],
)
def test_a_property_of_the_network_brings_its_answer(name, word):
    def all_words(tried):
        return {word for item in tried for word in item.step.overrides}

    assert word in all_words(run_search(ASKED, lambda step: replace(LOST, properties=(name,))))
    assert word not in all_words(run_search(ASKED, lambda step: LOST))


def test_fine_tuning_is_last_without_corrections_and_needs_classes():
    def outcome(step):
        return replace(LOST, loss=0.05) if step.kind == "learned_rounding" else LOST

    last = run_search(ASKED, outcome)[-1].step
    assert last.kind == "fine_tuning"
    config = make_config(*last.overrides)
    assert config.method == "qat"
    assert not any((config.corrections.adaround, config.corrections.bias_correction))
    other = run_search(ASKED, lambda step: replace(LOST, classifies=False))
    assert "fine_tuning" not in kinds_of(other)


@pytest.mark.parametrize("goal", step_table.GOALS)
def test_16_bit_activations_are_the_users_wish_and_hold_in_every_step(goal):
    known = (properties.POOLS, properties.SILU)
    asked = replace(ASKED, goal=goal, fixed={"dtype": "dtype=w8a16"})
    first, *rest = run_search(asked, lambda step: replace(LOST, properties=known))
    assert first.step.why == "8-bit weights, 16-bit activations"
    assert set(first.step.overrides) >= {"calib=minmax", "per_channel=true"}
    for item in (first, *rest):
        config = make_config("dtype=w8a16", *item.step.overrides)
        if item.step.kind != DIAGNOSIS:
            quantizer_of(config).resolve()  # nothing that 16 bits do not take
    assert {"operators", "fine_tuning"}.isdisjoint(kinds_of(rest))


@pytest.mark.parametrize(
    ("backend", "goal", "tried"),
    [("tflite", "smallest", True), ("tflite", "fastest", False), ("onnx", "best", False)],
)
def test_16_bit_activations_are_a_step_where_they_run_on_integers(backend, goal, tried):
    """They are slow on a CPU, and ONNX files with them are simulated."""
    steps = run_search(replace(ASKED, backends=(backend,), goal=goal), lambda step: LOST)
    wide = [item.step for item in steps if "dtype=w8a16" in item.step.overrides]
    assert bool(wide) == tried
    for step in wide:
        quantizer_of(make_config(*step.overrides)).resolve()


def test_layers_in_float_have_to_lower_the_noise_clearly():
    first, *_ = next_steps(ASKED, [])
    plain = replace(LOST, step=first, noise=1.0)
    search = {"nodes_to_exclude": "nodes_to_exclude=auto", "max_drop": "max_drop=0.005"}
    auto = replace(first, settings={**first.settings, **search})
    some = replace(plain, step=auto, named="[a]", noise=0.9)
    assert searching.closest([plain, some]) is plain
    quiet, none = replace(some, noise=0.7), replace(some, named="[]")
    assert searching.closest([plain, quiet]) is quiet
    assert searching.closest([plain, none]) is none


def test_settings_of_the_user_are_never_changed():
    fixed = {"calib": "calib=minmax", "per_channel": "per_channel=false"}
    asked = replace(ASKED, goal="best", fixed=fixed)
    tried = run_search(asked, lambda step: LOST)
    assert not any(
        word.startswith(("calib=", "per_ch")) for t in tried for word in t.step.overrides
    )
    assert "calibrations" not in kinds_of(tried)


@pytest.mark.parametrize(
    ("word", "dropped"),
    [
        ("attention=all", "op_types="),
        ("calib.table=a.json", "calib="),
        ("dtype.name=uint8", "dtype="),
        ("++calib.name='mse'", "calib="),
    ],
)
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_no_step_overrules_a_setting_of_the_user(backend, word, dropped):
    fixed = searching.find_fixed([words.parse(word)])
    asked = replace(ASKED, goal="best", backends=(backend,), fixed=fixed)
    tried = run_search(asked, lambda step: replace(LOST, properties=(properties.POOLS,)))
    typed = [one for item in tried for one in item.step.overrides]
    assert not any(one.startswith(dropped) for one in typed)
    assert "learned_rounding" in kinds_of(tried)


@pytest.mark.parametrize("backend", QUANTIZING)
def test_plain_8_bits_come_first_whatever_the_user_has_set(backend):
    for word in step_table.start(step_table.Seen(backend, exact_sums=True, limit=0.01)).settings:
        fixed = searching.find_fixed([words.parse(word)])
        first, *_ = next_steps(replace(ASKED, backends=(backend,), fixed=fixed), [])
        assert first.kind == step_table.START, word
        assert not first.settings.keys() & fixed.keys()


@pytest.mark.parametrize("word", ["dtype.name=w8a16", "++dtype='w8a16'"])
def test_every_spelling_of_a_setting_counts_as_the_users(word):
    fixed = searching.find_fixed([words.parse(word)])
    first, *_ = next_steps(replace(ASKED, fixed=fixed), [])
    assert first.why == "8-bit weights, 16-bit activations"


def test_a_backend_that_cannot_is_left_and_the_other_goes_on():
    asked = replace(ASKED, backends=("tflite", "torch"))
    refused = replace(LOST, status="unsupported", loss=float("nan"))
    tried = run_search(asked, lambda step: refused if step.backend == "tflite" else LOST)
    left = [item for item in tried if item.step.backend == "tflite"]
    assert kinds_of(left) == ["start", "weights_in_8_bits", "weights_in_16_bits"]  # plain ones
    assert kinds_of(item for item in tried if item.step.backend == "torch")[-1] == "fine_tuning"


def test_smallest_narrows_the_budget_between_pass_and_fail():
    """Budgets of at least 60 kB pass: the search ends within 3% of that."""

    def outcome(step):
        if step.kind != FEWER_BITS:
            return PASSED
        budget = searching._budget(step)
        return replace(PASSED if budget >= 60_000 else LOST, size_bytes=budget)

    tried = run_search(replace(ASKED, goal="smallest"), outcome)
    winner = searching.rank(replace(ASKED, goal="smallest"), tried)[0]
    assert 60_000 <= winner.size_bytes <= 60_000 * searching.SAME_SIZE
    assert len(tried) < 8


def test_models_of_equal_loss_are_ranked_by_noise_and_passing_ones_by_the_goal():
    first, *_ = next_steps(ASKED, [])
    a = replace(PASSED, step=first, loss=0.001, noise=0.3, size_bytes=9, latency_ms=3.0)
    b = replace(a, loss=0.002, noise=0.1, size_bytes=8, latency_ms=4.0)
    c = replace(a, loss=0.02, within=False, noise=0.01, size_bytes=1, latency_ms=1.0)
    assert searching.closest([a, b, c]) is b  # the loss of c is more by more than luck
    half = replace(b, noise=0.12, size_bytes=4)
    assert searching.closest([a, b, half]) is half  # twice the bytes for little less noise

    def order(goal):
        return searching.rank(replace(ASKED, goal=goal), [a, b, c])

    assert order("fastest") == [a, b]
    assert order("smallest") == [b, a]
    assert order("best") == [b, a]


outcomes = st.sampled_from(
    [LOST, PASSED, replace(LOST, status="failed"), replace(LOST, named="[a]")]
)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.sampled_from(step_table.GOALS), st.lists(outcomes, min_size=1, max_size=20))
def test_every_search_ends_and_tries_nothing_twice(goal, results):
    given_out = cycle(results)
    asked = replace(ASKED, goal=goal, backends=("onnx", "torch"))
    tried = run_search(asked, lambda step: next(given_out))
    steps = [tuple(sorted(item.step.overrides)) for item in tried]
    assert len(set(steps)) == len(steps)


@pytest.mark.parametrize("goal", step_table.GOALS)
@pytest.mark.parametrize("backend", QUANTIZING)
def test_every_step_is_a_valid_configuration(goal, backend):
    known = (properties.ATTENTION, properties.DEPTHWISE, properties.POOLS)
    asked = replace(ASKED, goal=goal, backends=(backend,))
    for item in run_search(asked, lambda step: replace(LOST, properties=known)):
        make_config(*item.step.overrides)


class Improving:
    """Jobs of which each loses less than all before it, so that steps build on each other."""

    def __init__(self, **reported):
        self.loss, self.reported = 0.5, reported

    def __call__(self, step):
        if step.kind == DIAGNOSIS:  # has no model
            return replace(LOST, loss=math.nan, **self.reported)
        self.loss *= 0.9
        kept = replace(LOST, loss=self.loss, noise=self.loss, error=0.0, named="[a]")
        return replace(kept, **self.reported)


def narrowing(step):
    """All models of 8 bits pass, and none of fewer bits."""
    return LOST if step.kind == FEWER_BITS else PASSED


@cache
def every_change():
    """Every change that a finding of a diagnosis may name."""
    named = [value for value in vars(step_table).values() if isinstance(value, Change)]
    return [*named, *step_table.usual(make_config(), ["a"]), calibrate_with(50)]


def searches_steps():
    """Every request with jobs that report every property and finding, and with jobs that pass."""
    reported = [{"name": "f", "tensor": "t", "changes": [c.settings]} for c in every_change()]
    named = {name: value for name, value in vars(properties).items() if isinstance(value, str)}
    known = [value for name, value in named.items() if name.isupper()]
    jobs = (
        lambda: Improving(properties=known, findings=json.dumps(reported)),
        lambda: narrowing,
    )
    for goal, backend, job in product(step_table.GOALS, QUANTIZING, jobs):
        yield replace(ASKED, goal=goal, backends=(backend,)), job()


def words_of_the_search():
    """Every setting of a step as typed, and the default of its key."""
    typed = {word for change in every_change() for word in change.settings}
    for asked, outcome in searches_steps():
        for step in (item.step for item in run_search(asked, outcome)):
            typed |= {*step.overrides, *step.words.split()}
    refused = {"backend", "+analysis", "analysis.try_changes", *sweep_search._OF_SEARCH}
    keys = {word.partition("=")[0] for word in typed} - refused
    for key in keys:
        value = reduce(getattr, key.split("."), make_config())
        typed.add(f"{key}={limits.shown(getattr(value, 'name', value))}")
    return sorted(word for word in typed if word.partition("=")[0] in keys)


@pytest.mark.slow
def test_the_user_may_fix_every_setting_of_the_search():
    for word in words_of_the_search():
        key = word.partition("=")[0]
        for asked, outcome in searches_steps():
            fixed = replace(asked, fixed={key: word})
            for step in run_search(fixed, outcome):
                confirmed = searching.confirm(fixed, step.settled_step)
                assert key not in {**step.step.settings, **confirmed.settings}, word


@pytest.mark.slow
def test_steps_that_build_on_each_other_are_valid_configurations():
    steps = [item for asked, outcome in searches_steps() for item in run_search(asked, outcome)]
    for words_of_step in {
        tuple(step.overrides) for e in steps for step in (e.step, e.settled_step)
    }:
        make_config(*words_of_step)


@pytest.mark.parametrize("backend", NARROWER)
def test_every_budget_of_bytes_is_a_valid_configuration(backend):
    asked = replace(ASKED, goal="smallest", backends=(backend,))
    tried = run_search(asked, lambda step: LOST if step.kind == FEWER_BITS else PASSED)
    assert FEWER_BITS in kinds_of(tried)
    for item in tried:
        make_config(*item.step.overrides)


def test_a_setting_of_the_user_leaves_out_the_steps_about_it():
    fixed = {
        "nodes_to_exclude": "nodes_to_exclude=[]",
        "corrections.adaround": "corrections.adaround=false",
        "latency.enabled": "latency.enabled=false",
    }
    tried = run_search(replace(ASKED, fixed=fixed), lambda step: LOST)
    assert {"float_layers", "learned_rounding"}.isdisjoint(kinds_of(tried))
    last = searching.confirm(replace(ASKED, fixed=fixed), tried[-1].step)
    assert not any("latency" in word for item in tried for word in item.step.overrides)
    assert not any("latency" in word for word in last.overrides)


def test_layers_of_any_name_are_left_in_float():
    named = words.as_list(["conv;1", "b=2"])
    tried = run_search(ASKED, lambda step: replace(LOST, named=named))
    [search] = [item for item in tried if item.searches]
    assert make_config(*search.settled_step.overrides).nodes_to_exclude == ["conv;1", "b=2"]


def test_the_flagships_are_presets_of_the_search():
    """The recipes of conf/experiment/ take the same settings as its steps on a CPU without VNNI."""
    seen = step_table.Seen("onnx", exact_sums=False, limit=0.01)
    quick = step_table.start(seen).settings
    learned = (*quick, *step_table.LEARN.settings)
    recipe, ours = make_config("experiment=flagship"), make_config("backend=onnx", *learned)
    for key in map(words.parse, learned):
        part = key.key_or_group.split(".")[0]
        assert getattr(recipe, part) == getattr(ours, part)


def test_a_change_of_settings_applies_its_own_words():
    config = make_config("calib.table=null")
    changed = Change(("calib=mse", "corrections.adaround=true", "op_types=[Conv]")).apply(config)
    assert (changed.calib.name, changed.corrections.adaround) == ("mse", True)
    assert changed.op_types == ["Conv"] and config.op_types is None


def test_properties_of_a_graph():
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        "g (float[1, 2, 4, 4] x) => (float[1, 2, 1, 1] y) "
        "<float[2, 1, 1, 1] w = {1.0, 100.0}> {"
        "c = Conv <group = 2> (x, w) s = Sigmoid(c) m = Mul(c, s) y = GlobalAveragePool(m) }"
    )
    onnx.checker.check_model(proto)
    assert properties.find_properties(proto.graph) == [
        *(properties.DEPTHWISE, properties.POOLS, properties.SILU)
    ]


def test_shared_weights_of_unrolled_steps_count_once():
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        "g (float[1, 1, 2, 2] x) => (float[1, 2] y) "
        "<float[1, 1, 1, 2] k = {1, 1}, int64[2] s = {1, 2}, float[2, 2] w = {1, 1, 1, 1}> {"
        "c = Conv(x, k) r = Reshape(c, s) a = MatMul(r, w) b = MatMul(a, w) y = MatMul(b, w) }"
    )
    assert properties._find_weights(proto.graph) == (2, 4, 0)


@pytest.mark.parametrize(
    ("before", "after", "unequal"),
    [(1.0, 1.0, False), (100.0, 0.01, True), (1e-9, 1.0, False)],
    ids=["equal", "the same function", "nearly dead"],
)
def test_channels_of_unequal_scale_are_equalized_first(before, after, unequal):
    """The second channel has these weights in two layers."""
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        "g (float[1, 1, 2, 2] x) => (float[1, 1, 2, 2] y) "
        f"<float[2, 1, 1, 1] w = {{1.0, {before}}}, float[1, 2, 1, 1] v = {{1.0, {after}}}> {{"
        "[a] c = Conv (x, w) [b] r = Relu(c) [c] y = Conv(r, v) }"
    )
    onnx.checker.check_model(proto)
    result = properties.find_properties(proto.graph)
    assert result == ([properties.UNEQUAL] if unequal else [])
    tried = run_search(ASKED, lambda step: replace(LOST, properties=tuple(result)))
    assert ("equalization" in kinds_of(tried)) == unequal
    assert kinds_of(tried)[1] == ("equalization" if unequal else "calibrations")
