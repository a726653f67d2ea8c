"""The search run by made-up jobs: time, errors, confirmation; then once in earnest."""

import shlex
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hydra_plugins.resnet8ptq_sweepers.search_steps import read_experiment
from resnet8ptq.config import words
from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core.alarm import AlarmError
from resnet8ptq.core.errors import ConfigError, DataError, QuantizationError, UnsupportedError
from resnet8ptq.exploration.search import searching
from resnet8ptq.exploration.search.searching import CONFIRM, DIAGNOSIS, Asked, Tried
from resnet8ptq.report.selection import select
from resnet8ptq.shipping import to_run
from resnet8ptq.sweeps.budget import Budget
from resnet8ptq.sweeps.delivery import Delivery
from resnet8ptq.sweeps.search import (
    SettingsSearch,
    TimeLimits,
    check_step,
    find_varied,
    measure,
    noise,
)
from resnet8ptq.sweeps.winner import announce, to_yaml
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.calling import NO_REAL_FILES, call
from tests.helpers.cells import amend_record, predictions, sweep
from tests.helpers.configs import compose_whole, make_config


def record(loss: float, half_width: float = 0.002, **more: Any) -> RunRecord:
    metrics = {"accuracy": 0.9 - loss, "baseline/accuracy": 0.9, "drop": loss, "size_bytes": 1e5}
    metrics |= {"paired/p_within": 0.01 if loss + half_width <= 0.01 else 0.5}
    metrics |= {"ci95/delta_low": -loss - half_width, "ci95/delta_high": -loss + half_width}
    metrics |= {"kl_divergence": loss, **more}
    return RunRecord.of("id", {"dtype": "u8s8"}, metrics, {"status": "ok"})


@dataclass
class Jobs:
    """Jobs that take time and return what `outcome` says; `at` is the clock."""

    outcome: Any
    seconds: Any = lambda step: step.cost
    at: float = 0.0
    steps: list[Any] = field(default_factory=list)

    def launch(self, steps: Any, limits: TimeLimits) -> list[Any]:
        self.steps += steps
        for step in steps:
            needed = self.seconds(step)
            self.at += min(needed, limits.soft_s) if step.part < 1 else needed
        return [self.outcome(step) for step in steps]

    def run(self, seconds: float = 1000, goal: str = "fastest", **more: Any) -> SettingsSearch:
        asked = Asked(goal, ("onnx",), 0.0)
        limits = ReportConfig(confirmations=2)
        budget = Budget(seconds)
        search = SettingsSearch(asked, self.launch, limits, budget, clock=lambda: self.at, **more)
        search.run()
        return search

    @property
    def kinds(self) -> list[str]:
        return [step.kind for step in self.steps]


def test_a_first_model_that_passes_is_confirmed_at_once():
    jobs = Jobs(lambda step: record(0.001))
    jobs.run()
    assert jobs.kinds == ["start", CONFIRM]
    assert "evaluate.split=test" in jobs.steps[-1].overrides


@pytest.mark.parametrize(
    ("reported", "fixed", "confirmed"),
    [(400, {}, 1), (500, {}, 2), (0, {}, 2), (400, {"report.confirmations": ""}, 2)],
)
def test_a_second_confirmation_is_planned_only_if_the_samples_are_enough(
    reported, fixed, confirmed
):
    """Corrected for two, 400 samples could not prove a loss of at most 1 point."""
    asked = Asked("fastest", ("onnx",), 0.0, fixed, reported=reported)
    jobs = Jobs(lambda step: record(0.02 if step.kind == CONFIRM else 0.001))
    limits = ReportConfig(confirmations=2)
    SettingsSearch(asked, jobs.launch, limits, Budget(1000), clock=lambda: jobs.at).run()
    assert jobs.kinds.count(CONFIRM) == confirmed
    first = next(step for step in jobs.steps if step.kind == CONFIRM)
    assert ("report.confirmations=1" in first.overrides) == (confirmed == 1)


def test_a_model_below_the_least_accuracy_does_not_pass():
    jobs = Jobs(lambda step: record(0.001))
    asked = Asked("fastest", ("onnx",), 0.0)
    SettingsSearch(
        asked, jobs.launch, ReportConfig(min_accuracy=0.95), Budget(1000), clock=lambda: jobs.at
    ).run()
    assert "calibrations" in jobs.kinds


def test_a_step_that_an_earlier_sweep_has_run_counts_with_its_own_time():
    step = Jobs(lambda step: record(0.1)).run().tried[-1].step
    done = amend_record(record(0.1), metrics={"system/prepare_s": 90.0})
    assert measure(step, done, 0.1).seconds == 90


@pytest.mark.parametrize(("excluded", "named"), [("[]", ""), ("[conv1]", "[conv1]")])
def test_a_search_that_leaves_no_layer_in_float_names_none(excluded, named):
    step = searching.Step("onnx", "exclude", {}, "", "")
    done = amend_record(record(0.0), params={"excluded_nodes": excluded})
    assert measure(step, done, 0.1).named == named


def test_a_step_that_conflicts_with_a_setting_of_the_user_is_skipped_with_a_line(capsys):
    def check(step):
        make_config("corrections.equalization=true", *step.overrides)  # method=qat refuses it

    jobs = Jobs(lambda step: record(0.1))
    search = jobs.run(check=check)
    [skipped] = [trial for trial in search.tried if trial.status == searching.SKIPPED]
    assert skipped.step.kind == "fine_tuning" and "fine_tuning" not in jobs.kinds
    lines = [line for line in capsys.readouterr().err.splitlines() if "not tried" in line]
    assert len(lines) == 1 and "corrections.equalization: got true" in lines[0]


def test_settings_of_the_user_that_conflict_are_an_error_before_any_job():
    jobs = Jobs(lambda step: record(0.1))
    with pytest.raises(ConfigError, match=r"precision\.max_bytes"):
        jobs.run(check=lambda step: make_config("precision.max_bytes=1", *step.overrides))
    assert not jobs.steps


@pytest.mark.parametrize("word", ["op_types=[Conv]", "nodes_to_quantize=[a]"])
def test_a_step_that_ignores_the_users_nodes_is_refused(word):
    typed = [words.parse(word)]
    check_step(make_config(word), typed)
    with pytest.raises(ConfigError, match=f"{word.split('=')[0]}: has no effect with dtype=fp16"):
        check_step(make_config(word, "dtype=fp16", "method=weight_only"), typed)


@pytest.mark.parametrize(
    ("word", "is_idle"),
    [
        ("qat.epochs=1", False),
        ("calib.percentile=99", False),
        ("corrections.adaround_iterations=5", False),
        ("weight_only.block_size=64", False),
        ("max_drop=0.02", False),
        ("calib.averaging_constant=0.1", True),  # no step calibrates by moving_average
    ],
)
def test_a_setting_that_some_step_reads_has_an_effect(word, is_idle):
    composed = compose_whole("experiment=auto", word)
    assert bool(words.find_idle(composed, [words.parse(word)], find_varied())) == is_idle


def test_an_experiment_of_the_user_that_builds_on_auto_keeps_its_settings(tmp_path):
    (tmp_path / "experiment").mkdir()
    lines = [
        "# @package _global_",
        "defaults: [auto, {override /dtype: uint8}]",
        "per_channel: false",
        "corrections: {bias_correction: true}",
        "op_types: [Conv, Gemm]",
        "hydra: {sweeper: {minutes: 3}}",
    ]
    (tmp_path / "experiment" / "mine.yaml").write_text("\n".join(lines))
    (tmp_path / "experiment" / "auto.yaml").write_text("dtype: {name: int8}")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        repository = GlobalHydra.instance().config_loader().repository
        typed = read_experiment(repository, "mine")
        assert read_experiment(repository, "auto") == []
    assert sorted(typed) == [
        *("corrections.bias_correction=true", "dtype=uint8", "op_types=[Conv, Gemm]"),
        "per_channel=false",
    ]
    first, *_ = searching.next_steps(
        Asked("fastest", ("onnx",), 0.0, searching.find_fixed(map(words.parse, typed))), []
    )
    assert {"dtype", "per_channel"}.isdisjoint(first.settings)


def test_ship_takes_no_other_experiment():
    with pytest.raises(ConfigError, match=r"experiment: got qat, expected auto \| npu"):
        to_run(["experiment=qat"])


def test_a_misspelt_key_of_ship_names_the_closest_key():
    with pytest.raises(ConfigError, match="minute: no such key; try minutes=2"):
        to_run(["minute=2", "data=shapes"])


@pytest.mark.parametrize(("key", "values"), [("goal", "fastest,best"), ("minutes", "2,5")])
def test_a_sweep_of_goals_is_refused_by_its_key(key, values):
    first = values.partition(",")[0]
    with pytest.raises(ConfigError, match=f"{key}: got several values, .*; try {key}={first}"):
        to_run([f"{key}={values}"])


@pytest.mark.parametrize("word", ["model.inputs={mask: 1}", "seed=1", "memory_gb=2"])
def test_ship_takes_the_keys_of_run(word):
    assert to_run([word]) == ["experiment=auto", word]


def test_ship_for_an_npu_takes_the_settings_of_its_preset():
    experiment, *words = to_run(["experiment=npu"])
    first, *_ = searching.next_steps(
        Asked("fastest", ("onnx",), 0.0, {w.partition("=")[0]: w for w in words}), []
    )
    ours, preset = make_config(*words, *first.overrides), make_config("experiment=npu")
    assert experiment == "experiment=auto"
    assert replace(ours, evaluate=preset.evaluate) == preset


def test_the_time_of_a_job_that_all_steps_share_is_expected_once(capsys):
    """On a busy machine most of a small job; thirty times it would not fit."""
    times = {"system/quantize_s": 0.2, "system/evaluate_s": 0.3}
    quick = amend_record(record(0.05), metrics=times)
    jobs = Jobs(lambda step: quick, seconds=lambda step: 10.0)
    jobs.run(seconds=120)
    assert "learned_rounding" in jobs.kinds and jobs.kinds[-1] == CONFIRM


def test_a_step_that_is_not_expected_to_fit_is_not_started(capsys):
    jobs = Jobs(lambda step: record(0.05))
    jobs.run(seconds=5)
    assert DIAGNOSIS not in jobs.kinds and jobs.kinds[-1] == CONFIRM
    assert jobs.at <= 5
    assert "+analysis=diagnose (" in capsys.readouterr().err


def test_a_long_step_starts_where_a_part_of_it_fits_and_leaves_time_to_confirm(capsys):
    """It keeps the best so far; the confirmation takes learned layers from the cache."""
    cut = {"cut_short": "learned rounding: 9 of 28 layers"}
    cut = amend_record(record(0.05), params=cut)
    jobs = Jobs(lambda step: cut if step.kind == "learned_rounding" else record(0.05))
    jobs.run(seconds=20)
    assert "learned_rounding" in jobs.kinds and jobs.kinds[-1] == CONFIRM
    assert jobs.at <= 20
    assert "kB; the time was up: learned rounding: 9 of 28" in capsys.readouterr().err


def test_the_next_finalist_is_confirmed_where_the_first_does_not_pass():
    def outcome(step):
        lucky = step.kind != CONFIRM or "calib=mse" in step.overrides
        return record(0.001 if lucky else 0.02)

    jobs = Jobs(outcome)
    jobs.run(goal="best")
    confirmed = [step for step in jobs.steps if step.kind == CONFIRM]
    assert len(confirmed) == 2


def test_the_search_goes_on_where_the_reported_samples_do_not_show_a_pass(capsys):
    """No other model passes on the selection samples yet."""

    def outcome(step):
        better = "calib=mse" in step.overrides
        return record(0.001 if better else 0.006 if step.kind != CONFIRM else 0.009)

    jobs = Jobs(outcome)
    search = jobs.run()
    assert jobs.kinds == ["start", CONFIRM, "calibrations", "calibrations", CONFIRM]
    assert search.confirmed[-1].passes
    assert "the search goes on" in capsys.readouterr().err


def test_the_last_confirmation_does_not_say_that_the_search_goes_on(capsys):
    search = Jobs(lambda step: record(0.006 if step.kind != CONFIRM else 0.009)).run()
    assert [done.passes for done in search.confirmed] == [False, False]
    assert capsys.readouterr().err.count("the search goes on") == 1


def test_the_search_ends_where_the_reported_samples_are_too_few_for_any_model():
    jobs = Jobs(lambda s: record(0.004, *([0.02] if s.kind == CONFIRM else [])))
    jobs.run()
    assert jobs.kinds == ["start", CONFIRM]


@pytest.mark.parametrize(("p_value", "passes"), [(0.02, True), (0.04, False)])
def test_each_confirmation_passes_at_its_share_of_the_level(p_value, passes):
    """The first one too, as the search may confirm another one after it."""

    def outcome(step):
        done = record(0.006 if step.kind != CONFIRM else 0.009)
        if step.kind == CONFIRM:
            done = amend_record(done, metrics={"paired/p_within": p_value})
        return done

    search = Jobs(outcome).run()
    assert [done.passes for done in search.confirmed] == [passes] * (1 if passes else 2)


def test_where_nothing_passes_the_closest_is_confirmed_alone():
    jobs = Jobs(lambda step: record(0.02 if "calib=percentile" in step.overrides else 0.05))
    search = jobs.run()
    assert jobs.kinds.count(CONFIRM) == 1
    assert "calib=percentile" in jobs.steps[-1].overrides
    assert not search.confirmed[0].passes


def test_an_error_of_the_input_that_two_steps_share_ends_the_search():
    jobs = Jobs(lambda step: DataError("no such file"))
    with pytest.raises(DataError, match="no such file"):
        jobs.run()
    assert len(jobs.steps) == 2


ERRORS = (MemoryError, RuntimeError, DataError, UnsupportedError, AlarmError)


@settings(max_examples=50, phases=(Phase.explicit, Phase.generate))  # to shrink takes minutes
@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_no_error_of_a_step_ends_the_search(seed, share):
    """Any step may raise any error; a model that was measured is kept."""
    random = np.random.default_rng(seed)
    numbers = count()

    def outcome(step):
        if random.random() >= share:
            return record(0.05)
        kind = ERRORS[random.integers(len(ERRORS))]
        return kind(f"{next(numbers)} {step.words}")  # no error of the input twice

    jobs, delivery = Jobs(outcome), Delivery()
    search = jobs.run(delivery=delivery)
    measured = [trial for trial in (*search.tried, *search.confirmed) if trial.measured]
    assert not measured or delivery.record is not None
    assert {"start", "weights_in_8_bits"} <= {*jobs.kinds}


def test_a_line_shows_the_first_of_many_layers(capsys):
    names = ",".join(f"a_long_name_of_layer_{number}" for number in range(100))
    search = Jobs(lambda step: record(0.05)).run(seconds=1)
    step = replace(search.tried[0].step, words=f"nodes_to_exclude=[{names}]")
    capsys.readouterr()
    search._run([step], 1.0)
    line = capsys.readouterr().err.splitlines()[0]
    assert "100 in all]" in line and len(line) < 300


def test_ctrl_c_keeps_the_best_model_so_far():
    def outcome(step):
        if step.kind == DIAGNOSIS:
            raise KeyboardInterrupt
        return record(0.02 if "calib=mse" in step.overrides else 0.05)

    jobs, delivery = Jobs(outcome), Delivery()
    with pytest.raises(KeyboardInterrupt):
        jobs.run(delivery=delivery)
    assert "loss 2 points" in delivery.outcome and not delivery.is_confirmed


def test_every_job_is_interrupted_at_the_end_of_the_time():
    jobs, limits = Jobs(lambda step: record(0.05)), []
    launch = jobs.launch
    jobs.launch = lambda steps, given: limits.append(given.hard_s) or launch(steps, given)
    jobs.run(seconds=100)
    assert all(seconds <= 110 for seconds in limits)


@pytest.mark.parametrize("error", [AlarmError("the time is up"), KeyboardInterrupt()])
def test_the_file_of_an_interrupted_first_job_is_kept(error, tmp_path, capsys):
    """It had quantized, and was interrupted while it was measured."""

    def outcome(step):
        folder = tmp_path / "0_onnx"
        folder.mkdir()
        (folder / "model.onnx").write_bytes(b"8 bits")
        jobs.at = 100.0
        if isinstance(error, KeyboardInterrupt):
            raise error
        return error

    jobs, delivery = Jobs(outcome), Delivery(tmp_path, fp32=tmp_path / "fp32.onnx")
    with suppress(KeyboardInterrupt):
        jobs.run(seconds=90, delivery=delivery)
    assert jobs.kinds == ["start"]
    assert announce([], delivery, "fastest") == 4
    assert (tmp_path / "winner.onnx").read_bytes() == b"8 bits"
    assert "Not measured" in capsys.readouterr().out


def test_time_is_kept_for_the_step_that_loses_next_to_nothing():
    """Too little for the diagnosis, which takes three plain runs."""

    def outcome(step):
        return record(0.001 if "method=weight_only" in step.overrides else 0.05)

    jobs = Jobs(outcome, seconds=lambda step: 10.0 * max(step.cost, 1))
    search = jobs.run(seconds=65)
    assert jobs.kinds[-2:] == ["weights_in_8_bits", CONFIRM]
    assert search.confirmed[0].passes and jobs.at <= 65


def test_a_search_that_ends_in_time_leaves_the_time_of_the_last_resorts():
    """Learned rounding takes all of its time."""

    def outcome(step):
        return record(0.001 if "dtype=fp16" in step.overrides else 0.05)

    jobs = Jobs(outcome, seconds=lambda step: 10.0 * max(step.cost, 1))
    search = jobs.run(seconds=350)
    assert {"learned_rounding", "weights_in_8_bits"} <= {*jobs.kinds}
    assert search.confirmed[0].passes


def test_a_last_resort_is_worth_more_than_the_confirmation_of_a_failure():
    def outcome(step):
        return record(0.001 if "method=weight_only" in step.overrides else 0.05)

    search = Jobs(outcome, seconds=lambda step: 10.0).run(seconds=25)
    assert [trial.step.kind for trial in search.tried if trial.passes] == ["weights_in_8_bits"]


def test_a_first_step_that_fails_is_followed_by_plainer_ones_of_the_same_idea():
    """The file is right only without slim=true and format=auto."""

    def outcome(step):
        if {"slim=true", "format=auto"} & {*step.overrides}:
            return QuantizationError("slim: the slimmed file is invalid")
        return record(0.001)

    jobs = Jobs(outcome)
    search = jobs.run()
    assert jobs.kinds == ["start", "start", "start", CONFIRM]
    assert {"slim=false", "format=qdq"} <= {*jobs.steps[-1].overrides}
    assert search.confirmed[0].passes


def test_a_layer_that_an_error_names_is_left_in_float():
    asked = Asked("fastest", ("onnx",), 0.0, nodes=("conv_1", "conv_2"))
    failed = Tried(
        searching.next_steps(asked, [])[0], "failed", "Node (conv_2_quant) Op (QLinearConv): bad"
    )
    [plainer] = searching.next_steps(asked, [failed])
    assert "nodes_to_exclude=[conv_2]" in plainer.overrides
    again = replace(failed, step=plainer)
    assert "slim=false" in searching.next_steps(asked, [failed, again])[0].overrides


def test_a_confirmation_that_fails_is_followed_by_another_model(capsys):
    def outcome(step):
        if step.kind == CONFIRM and "calib=mse" not in step.overrides:
            return RuntimeError("out of disk")
        return record(0.001)

    search = Jobs(outcome).run(goal="best")
    assert [done.passes for done in search.confirmed] == [True]


def test_a_confirmation_that_the_time_limit_interrupts_ends_the_search():
    def outcome(step):
        return TimeoutError("the time is up") if step.kind == CONFIRM else record(0.001)

    jobs, delivery = Jobs(outcome, seconds=lambda step: 30.0), Delivery()
    jobs.run(seconds=59, delivery=delivery)
    assert jobs.kinds == ["start", CONFIRM]
    assert "loss 0.1 points" in delivery.outcome and not delivery.is_confirmed


def test_after_the_time_is_up_nothing_is_confirmed():
    jobs = Jobs(lambda step: record(0.001), seconds=lambda step: 100.0)
    jobs.run(seconds=90)
    assert jobs.kinds == ["start"]


@pytest.mark.parametrize("seconds", [90, 150])  # no time to confirm, or too little
@pytest.mark.parametrize("same", [True, False])
def test_a_model_that_the_reported_samples_chose_is_confirmed_by_them(
    seconds, same, tmp_path, capsys
):
    changes = {"evaluate.split": "choice"} | ({"same_samples": "true"} if same else {})
    family = sweep(("a", predictions(won=2), changes))
    [run] = family.records

    def outcome(step):
        measured = amend_record(record(0.001), params=changes)
        own = measured.model_copy(update={"run_id": run.run_id})
        return AlarmError("the time is up") if step.kind == CONFIRM else own

    jobs = Jobs(outcome, seconds=lambda step: 100.0)
    delivery = Delivery(tmp_path)
    jobs.run(seconds=seconds, delivery=delivery)
    assert jobs.kinds in (["start"], ["start", CONFIRM])
    assert announce(select([family], ReportConfig()), delivery, "fastest") == (0 if same else 4)
    shown = capsys.readouterr()
    assert ("Not confirmed" in shown.out) != same
    assert ("the same samples chose and reported it" in shown.out) == same


def test_a_model_that_replaces_a_refuted_one_is_confirmed_by_the_samples_that_chose_it(capsys):
    def outcome(step):
        measured = record(0.0001)
        if "method=weight_only" not in step.overrides:  # passes alone, but not as one of two
            measured = record(0.008, **{"paired/p_within": 0.04})
        measured = amend_record(measured, params={"same_samples": "true"})
        return measured.model_copy(update={"run_id": step.kind})

    jobs, delivery = Jobs(outcome, seconds=lambda step: 100.0), Delivery()
    jobs.run(seconds=320, delivery=delivery)
    assert jobs.kinds == ["start", CONFIRM, "weights_in_8_bits"]
    assert delivery.confirmed_id == "weights_in_8_bits"
    last = capsys.readouterr().err.splitlines()[-1]
    assert "confirmed without another run: method=weight_only" in last


def test_a_model_of_nearly_all_bytes_of_fp32_is_no_winner():
    def outcome(step):
        small = "method=weight_only" in step.overrides
        fp32 = {"baseline/size_bytes": 1.02e5}
        return record(0.005, size_bytes=2e4, **fp32) if small else record(0.001, **fp32)

    search = Jobs(outcome).run()
    assert search.confirmed[-1].saves and search.confirmed[-1].passes


def test_jobs_run_at_once_where_a_launcher_can():
    batches = []
    jobs = Jobs(lambda step: record(0.05))
    launch = jobs.launch
    jobs.launch = lambda steps, *rest: batches.append(len(steps)) or launch(steps, *rest)
    jobs.run(at_once=4)
    assert max(batches) == 2  # the calibrations


def test_fp32_in_doubt_ends_the_search():
    doubtful = amend_record(record(0.0), params={"doubt": "FP32 is near chance"})
    jobs = Jobs(lambda step: doubtful)
    jobs.run(goal="best")
    assert jobs.kinds == ["start", CONFIRM]


@pytest.mark.parametrize("logs_here", [False, True])
def test_an_outcome_does_not_repeat_the_log_of_its_job(logs_here, capsys):
    doubtful = amend_record(record(0.0), params={"doubt": "FP32 is near chance"})
    Jobs(lambda step: doubtful).run(goal="best", logs_here=logs_here)
    printed = capsys.readouterr().err
    assert printed.count("  void: ") == 2  # the first step and the confirmation
    assert printed.count("FP32 is near chance") == (0 if logs_here else 2)


@pytest.mark.parametrize("logs_here", [False, True])
def test_a_diagnosis_is_printed_once(logs_here, capsys):
    diagnosis = RunRecord.of(
        "id",
        {"analysis.name": "diagnose"},
        {},
        {"status": "ok", "mlflow.note.content": "no single cause"},
    )
    jobs = Jobs(lambda step: diagnosis if step.kind == searching.DIAGNOSIS else record(0.1))
    jobs.run(logs_here=logs_here)
    assert searching.DIAGNOSIS in jobs.kinds
    assert capsys.readouterr().err.count("no single cause") == (0 if logs_here else 1)


@pytest.mark.parametrize(
    ("metrics", "unit"), [({}, "(KL divergence)"), ({"kl_divergence": None}, "of the signal")]
)
def test_noise_has_its_unit(metrics, unit):
    step = searching.Step("onnx", "start", {}, "", "")
    done = record(0.1)
    kept = {key: value for key, value in done.metrics.items() if key not in metrics}
    trial = measure(step, done.changed(metrics=kept), 1.0)
    assert trial.say_noise().endswith(f" {unit}")


def test_a_record_is_measured_by_its_interval_and_its_divergence():
    step = searching.next_steps(Asked("best", ("onnx",), 0.0), [])[0]
    done = measure(step, record(0.004), 1.0)
    assert (done.loss, round(done.error, 6), done.passes) == (0.004, 0.002, True)
    assert done.noise == 0.004
    assert noise(RunRecord.of("id", {}, {"sqnr_db": 20.0}, {})) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("goal", "speedup", "messages"),
    [("fastest", 0.72, True), ("fastest", 0.999, False), ("smallest", 0.72, False)],
)
def test_a_fastest_winner_that_is_slower_than_fp32_is_reported(
    goal, speedup, messages, tmp_path, capsys
):
    family = sweep(("a", predictions(won=2), {"speedup": speedup, "size_reduction": 0.7}))
    assert announce(select([family], ReportConfig()), Delivery(tmp_path), goal) == 0
    assert ("FP32 is faster on this machine" in capsys.readouterr().out) == messages


def test_a_void_fp32_ends_without_a_command_that_deploy_refuses(tmp_path, capsys):
    family = sweep(("a", predictions(won=2), {"doubt": "FP32 ACCURACY NEAR CHANCE"}))
    assert announce(select([family], ReportConfig()), Delivery(tmp_path), "fastest") == 4
    printed = capsys.readouterr().out
    assert "FP32 itself is void" in printed and "task=deviation" in printed
    assert "NEAR CHANCE" not in printed  # the table's notes have just said it
    assert "deploy run_id" not in printed


def test_settings_become_a_config_of_conf_experiment():
    settings = ["data=shapes", "backend=torch", "calib=mse", "calib.num_bins=512"]
    settings += ["corrections.bias_correction=true", "op_types=[Conv,Gemm]", "threads=1"]
    loaded = OmegaConf.create(to_yaml(settings))
    assert {"override /calib": "mse"} in loaded.defaults
    assert loaded.corrections.bias_correction is True and loaded.op_types == ["Conv", "Gemm"]
    assert loaded.calib == {"num_bins": 512}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("goal=fast",), "goal: got 'fast', expected fastest | smallest | best"),
        (("minutes=0",), "minutes: got 0, expected a number > 0"),
        (("seed=1,2",), "seed: got several values, expected one with experiment=auto"),
        (("backend=file",), "backend: got file, which quantizes nothing; try resnet8ptq judge"),
        (
            ("nodes_to_exclude=auto",),
            "nodes_to_exclude: got auto with experiment=auto; it searches for layers itself; leave "
            "the setting out",
        ),
        (("evaluate.split=test",), "evaluate.split: got test, but experiment=auto sets it itself"),
    ],
)
def test_wrong_settings_are_one_line_before_any_work(tmp_path, words, message):
    done = call(tmp_path, *to_run(words))
    assert (done.code, done.errors) == (2, [f"error: {message}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ship_ends_with_a_verdict_and_a_line_that_makes_the_winner_again(tmp_path):
    """A goal that the first job meets; the exit code is the verdict's."""
    quick = ("data=shapes", "latency.repeats=3", "latency.batch_repeats=1", "threads=1")
    limits = ("report.max_drop=0.05", "hydra.sweep.dir=sweep", "calib.samples_per_class=20")
    done = call(tmp_path, *to_run([*quick, *limits]), **NO_REAL_FILES)
    assert done.code == 0, done.err
    assert [run.data.params.get("evaluate.split", "test") for run in done.children] == [
        "choice",
        "test",
    ]
    assert "Winner: onnx u8s8 minmax per channel." in done.out
    [line] = [line for line in done.out.splitlines() if "reproduce it" in line]
    again = shlex.split(line.partition(": ")[2])[2:]  # python run.py
    assert make_config(*again).calib.samples_per_class == 20
    winner = OmegaConf.load(tmp_path / "sweep" / "winner.yaml")
    assert winner.calib.samples_per_class == 20 and winner.float_output
