"""Runs the search of `experiment=auto`: its steps within the time limit, then the confirmation.

`exploration.search.searching` chooses the steps. This module runs them with Hydra's launcher, and
converts their records into the input of the next choice.
"""

import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from resnet8ptq.config import limits, words
from resnet8ptq.config.schema import ReportConfig, RunConfig
from resnet8ptq.core import console
from resnet8ptq.core.alarm import AlarmError
from resnet8ptq.core.descriptor import FILE, find_backends
from resnet8ptq.core.errors import ConfigError, DataError, ModelError
from resnet8ptq.core.text import printable, unescape_markdown
from resnet8ptq.experiment.preparation import tunes
from resnet8ptq.exploration.search import searching, step_table
from resnet8ptq.exploration.search.changes import Change
from resnet8ptq.exploration.search.searching import Asked, Step, Tried
from resnet8ptq.exploration.search.step_table import FALLBACKS, GOALS
from resnet8ptq.report.verdicts import find_fault
from resnet8ptq.sweeps.budget import Budget, again_s, confirm_s, expect_s
from resnet8ptq.sweeps.delivery import Delivery
from resnet8ptq.tasks.scoring.metric import BASELINE, Metric
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, tango
from resnet8ptq.tracking.journal import NOTE_TAG
from resnet8ptq.tracking.record import RunRecord

if TYPE_CHECKING:
    from resnet8ptq.sweeps.running import RunningSweep


@dataclass(frozen=True)
class TimeLimits:
    """The time limits of a job, in seconds.

    Attributes:
        soft_s: after this time, searches and learning in a job end with the best so far.
        hard_s: after this time, a job in this process is interrupted.
    """

    soft_s: float
    hard_s: float


Launch = Callable[[Sequence[Step], TimeLimits], Sequence[RunRecord | Exception]]
CONFIRMATIONS = "report.confirmations"
LEAST_S = 1.0  # least time limit of a job, whose learned layers may be in the cache
INPUT_ERRORS = (ConfigError, DataError, ModelError)


@dataclass
class SettingsSearch:
    """One search for settings that pass, from its first step to the confirmed model.

    Attributes:
        launch: runs steps as jobs, each with the time limits; returns the record or the error of
            each, in the same order.
        allowed: the limits for a pass, and the number of confirmations.
        check: raises `ConfigError` for a step whose settings conflict, also with those of the user,
            or that needs training samples that are missing or cannot be scored.
        delivery: keeps the best model so far as a file.
        budget: the time limit.
        at_once: the largest number of parallel jobs.
        clock: returns the time in seconds.
        tried: the steps so far with their results, skipped steps included, without confirmations.
        confirmed: the measured confirmations.
        begun_s: when the command began, by the clock; None to use the beginning of the search.
        launched: number of jobs so far.
        logs_here: whether each job prints its log in this process, before its outcome.
        errors: the errors of the jobs so far.
    """

    asked: Asked
    launch: Launch
    allowed: ReportConfig
    budget: Budget
    at_once: int = 1
    check: Callable[[Step], object] = lambda step: None
    delivery: Delivery = field(default_factory=Delivery)
    clock: Callable[[], float] = time.monotonic
    tried: list[Tried] = field(default_factory=list)
    confirmed: list[Tried] = field(default_factory=list)
    begun_s: float | None = None
    launched: int = 0
    logs_here: bool = False
    errors: list[Exception] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)  # steps that take too long, not yet printed

    def run(self) -> None:
        """Try steps until the goal is met, no step is left or the time is up; confirm the best.

        If the best model passes on the selection samples only, the search goes on, up to
        `report.confirmations` models. It also ends if the reported samples show no loss, or only a
        small one on too few samples, see `searching.loses_nothing`. A single step that fails does
        not end the search.

        Raises:
            ConfigError: `check` refuses each first step.
            PtqError: two steps fail with the same error of the input before any is measured.
        """
        if self.begun_s is None:
            self.begun_s = self.clock()
        while len(self.confirmed) < self.allowed.confirmations:
            if not searching.passing(self.tried):
                self._try_steps()
            ranked = searching.rank(self.asked, self.tried)
            if not ranked or (self.confirmed and not ranked[0].saves):
                return

            # Confirm the best so far, if there is time
            if again_s(ranked[0]) > self.budget.until_late_s(self._spent_s()):
                settings = searching.say(ranked[0].settled_step.settings)
                if ranked[0].run_id == self.delivery.confirmed_id:
                    _say(f"confirmed without another run: {settings}; the same samples chose it")
                else:
                    _say(f"not confirmed: {settings}; the time is up")
                return
            done = self._confirm(ranked[0])
            if not done.measured and self._left_s() > 0:
                continue  # confirm the next model
            if not done.measured:  # the time was up, so the best file is kept
                return

            # End, unless another step could still pass
            is_hopeless = not ranked[0].passes or searching.loses_nothing(self.asked, done)
            if done.passes or is_hopeless:
                return
            if len(self.confirmed) < self.allowed.confirmations:
                _say("  not shown to pass on the reported samples: the search goes on")

    def _try_steps(self) -> None:
        while steps := searching.next_steps(self.asked, self.tried):
            if self.tried and self._left_s() == 0:
                _say("the time is up: no further step is tried; try a larger minutes=")
                return
            in_time = [step for step in steps if self._fits(step)]
            fitting = self._without_conflicts(in_time)
            if fitting:
                self._say_unfit()

            # Keep time for the last resorts, and to measure the best model again and confirm it
            later_s = max((self._reserve_s(step) for step in fitting), default=0.0)
            left_s = self._left_s() - later_s - self._confirm_s(twice=True)
            self._run(fitting[: self.at_once], left_s)
        self._say_unfit()

    def _say_unfit(self) -> None:
        """Print the steps that do not fit into the time, in one line."""
        if self.unfit:
            listed = "; ".join(self.unfit)
            _say(f"not tried, with {self._left_s():.0f} s left (try a larger minutes=): {listed}")
        self.unfit = []

    def _without_conflicts(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps with valid settings; skip the others.

        Raises:
            ConfigError: none of the first steps has valid settings.
        """
        valid: list[Step] = []
        conflicts: list[tuple[Step, ConfigError]] = []
        for step in steps:
            try:
                self.check(step)
            except ConfigError as error:
                conflicts.append((step, error))
            else:
                valid.append(step)
        if not self.tried and len(conflicts) == len(steps):
            raise conflicts[0][1]
        for step, conflict in conflicts:
            self._skip(step, printable(str(conflict)))
        return valid

    def _skip(self, step: Step, why: str) -> None:
        self.tried.append(Tried(step, searching.SKIPPED, why))
        _say(f"not tried: {step.words}: {why}")

    def _confirm(self, finalist: Tried) -> Tried:
        """Measure a model on the reported samples; note in `tried` if it does not pass there.

        A model that cannot be measured on these samples is left out of later choices.
        """
        step = searching.confirm(self.asked, finalist.settled_step)
        if self.allowed.confirmations == 1:  # its verdict needs no correction
            settings = {**step.settings, CONFIRMATIONS: f"{CONFIRMATIONS}=1"}
            step = replace(step, settings=settings)
        if finalist.same_samples:
            step = replace(step, why="confirmation: the best so far; the same samples chose it")
        [done] = self._run([step], self._left_s())

        # Later choices must know the result
        position = self.tried.index(finalist)
        if not done.measured:
            self.tried[position] = replace(finalist, status=done.status, reason=done.reason)
            return done
        self.confirmed.append(done)
        if not done.passes:
            self.tried[position] = replace(finalist, refuted=True)
        return done

    @property
    def _has_measured(self) -> bool:
        return any(trial.measured for trial in self.tried)

    def _spent_s(self) -> float:
        assert self.begun_s is not None  # set by `run`
        return self.clock() - self.begun_s

    def _left_s(self) -> float:
        return self.budget.left_s(self._spent_s())

    def _fits(self, step: Step) -> bool:
        """Return whether a step and the steps after it fit into the time left; else skip the step.

        Every step fits until a model is measured. For a step that can end early with the best so
        far, it is enough if a part fits. The steps after it are the confirmation of the best so far
        and the last resorts, see `_reserve_s`. As long as no model passes, a last resort needs no
        time for steps after it.
        """
        expected_s = expect_s(step, self.tried) * step.part
        later_s = self._confirm_s() + self._reserve_s(step)
        if step.kind in FALLBACKS and not searching.passing(self.tried):
            later_s = 0.0  # no model passes, so there is nothing to confirm
        is_first = not self._has_measured
        if is_first or expected_s + later_s <= self._left_s():
            return True

        reason = f"it takes about {expected_s:.0f} s, and the steps after it {later_s:.0f} s"
        self.tried.append(Tried(step, searching.SKIPPED, reason))
        self.unfit.append(f"{step.words} ({expected_s:.0f} s)")
        return False

    def _confirm_s(self, twice: bool = False) -> float:
        """Return the expected seconds to confirm the best so far; 0 without a measured model.

        Args:
            twice: whether to add the time to measure the model again on the selection samples.
        """
        ranked = searching.rank(self.asked, self.tried)
        if not ranked:
            return 0.0
        expected_s = confirm_s(ranked[0], self.asked.reported)
        if twice:
            expected_s += again_s(ranked[0])
        return expected_s

    def _reserve_s(self, step: Step) -> float:
        """Return the seconds kept for the last resorts after a step, see `find_fallbacks`."""
        if step.kind in FALLBACKS:
            return 0.0
        later = searching.find_fallbacks(self.asked, self.tried, step.backend)
        return sum(expect_s(one, self.tried) for one in later)

    def _keep_unmeasured(self, jobs: int) -> None:
        """If no file is kept yet, keep the first file that the current `jobs` jobs have written."""
        for number in range(self.launched, self.launched + jobs):
            self.delivery.keep_unmeasured(number)

    def _run(self, steps: Sequence[Step], seconds_each: float) -> list[Tried]:
        for step in steps:
            line = f"{step.backend}: {step.words}: {step.why}"
            if self.tried:
                line += f" ({self._left_s() / 60:.1f} minutes left)"
            _say(line)

        # Run the jobs; an interrupted job may have left a file
        begun_s = self.clock()
        limits = TimeLimits(max(seconds_each, LEAST_S), self._find_hard_limit(steps))
        results: Sequence[RunRecord | Exception] = []
        try:
            if steps:
                results = self.launch(steps, limits)
        except KeyboardInterrupt:
            self._keep_unmeasured(len(steps))
            raise
        if any(isinstance(result, AlarmError) for result in results):
            self._keep_unmeasured(len(steps))
        self.launched += len(steps)

        # Measure the results, which decide the next steps
        seconds = (self.clock() - begun_s) / max(len(steps), 1)
        done = []
        for step, result in zip(steps, results, strict=True):
            trial = self._measure(step, result, seconds)
            done.append(trial)
            self._say_outcome(trial)
            if step.kind != searching.CONFIRM:
                self.tried.append(trial)
            if not isinstance(result, Exception):
                self._deliver(trial, result)
        self._raise_input_error(results)
        return done

    def _find_hard_limit(self, steps: Sequence[Step]) -> float:
        """Return the seconds after which a job is interrupted; more before a model is kept."""
        if self.delivery.record is None:
            return self.budget.first_s(self._spent_s())
        late_s = max(self.budget.until_late_s(self._spent_s()), LEAST_S)
        if all(step.kind == searching.CONFIRM for step in steps):
            return late_s
        later_s = max(self._reserve_s(step) for step in steps)
        return max(late_s - later_s - self._confirm_s(), LEAST_S)

    def _deliver(self, trial: Tried, record: RunRecord) -> None:
        """Keep the file of a model that is the best so far, or that was confirmed.

        The best so far needs no other run if it was measured on the reported samples.
        """
        if not trial.measured:
            return
        confirms = trial.step.kind == searching.CONFIRM
        if confirms or searching.rank(self.asked, self.tried)[:1] == [trial]:
            is_confirmed = confirms or trial.same_samples
            self.delivery.keep(record, self._outcome(trial), is_confirmed)

    def _raise_input_error(self, results: Sequence[RunRecord | Exception]) -> None:
        """Raise an error of the input that two steps share, before any model was measured."""
        self.errors += [error for error in results if isinstance(error, Exception)]
        if self._has_measured:
            return
        of_input = [error for error in self.errors if isinstance(error, INPUT_ERRORS)]
        texts = Counter(map(str, of_input))
        for error in of_input:
            if texts[str(error)] > 1:
                raise error

    def _measure(self, step: Step, result: RunRecord | Exception, seconds: float) -> Tried:
        if isinstance(result, Exception):
            return Tried(step, "failed", printable(str(result)), seconds=seconds)
        sound = True
        if result.status == "ok" and not result.is_analysis:
            metric = result.task.metric
            self.asked = replace(self.asked, limit=metric.limit(self.allowed))
            self._plan_confirmations(metric)
            sound = not find_fault(metric, result, self.allowed)
        level = SIGNIFICANCE
        if step.kind == searching.CONFIRM:  # correct for several confirmations on the same samples
            level = SIGNIFICANCE / self.allowed.confirmations
        done = measure(step, record=result, seconds=seconds, level=level)
        return replace(done, within=done.within and sound)

    def _plan_confirmations(self, metric: Metric) -> None:
        """Plan one confirmation if the reported samples are too few for a pass corrected for more.

        With more, not even a model that changes no sample could pass. The plan depends on the
        number of samples and on settings, not on a result, so that it keeps the level of the test.
        """
        reported = self.asked.reported
        if not metric.bounded or not reported or CONFIRMATIONS in self.asked.fixed:
            return
        least_p = tango(lost=0, won=0, total=reported, limit=self.asked.limit).p_within
        if least_p > SIGNIFICANCE / self.allowed.confirmations:
            self.allowed = replace(self.allowed, confirmations=1)

    def _say_outcome(self, trial: Tried) -> None:
        """Print a step's outcome, without the sentences that its job has just logged."""
        line = self._outcome(trial)
        if self.logs_here and trial.status == "ok":
            if trial.step.kind == searching.DIAGNOSIS:
                return
            if trial.doubt:
                line = "void: see the warning above"
        _say(f"  {line}")

    def _outcome(self, tried: Tried) -> str:
        if tried.status != "ok":
            return f"{tried.status}: {tried.reason}"
        if tried.step.kind == searching.DIAGNOSIS:
            return tried.reason
        if tried.doubt:
            return f"void: {tried.doubt}"
        shown = tried.state_loss(tried.loss)
        passes = "passes" if tried.passes else "not shown to pass"
        size = f"{tried.size_bytes / 1000:.1f} kB"
        line = f"{shown}: {passes}; {tried.say_noise()}; {size}{tried.cut_short}"
        if tried.searches:
            line += f"; in float: {tried.named or 'none'}"
        return line


def read_network(asked: Asked, config: RunConfig, running: "RunningSweep") -> Asked:
    """Return the request with the properties of the network; keep the FP32 file for the end.

    After an error other than those below, the search goes on without the properties.

    Raises:
        ConfigError, DataError, ModelError: a setting is wrong, or the network or the data cannot be
            read or do not fit each other.
    """
    from resnet8ptq.experiment.settings import resolve
    from resnet8ptq.exploration.search import network_facts

    try:
        facts = network_facts.read_network_facts(resolve(config))
    except INPUT_ERRORS:
        raise
    except Exception as error:
        _say(f"the properties of the network are not known: {printable(str(error))}")
        return asked

    # FP32 is delivered if nothing can be quantized
    assert running.delivery is not None  # a search has set it
    running.delivery.fp32 = facts.onnx_path
    return replace(
        asked,
        properties=facts.properties,
        nodes=facts.nodes,
        reported=facts.reported,
        untuned=facts.untuned,
    )


def check(sweeper: DictConfig, typed: Sequence[Override]) -> None:
    """Check the settings of the search.

    Raises:
        ConfigError: the goal or the time is wrong, a setting other than `backend` has several
            values, or the search cannot use a value or sets the setting itself.
    """
    limits.require("goal", got=sweeper.goal, ok=sweeper.goal in GOALS, expected=" | ".join(GOALS))
    minutes = sweeper.minutes
    is_time = isinstance(minutes, int | float) and 0 < minutes < math.inf
    limits.require("minutes", got=minutes, ok=is_time, expected="a number > 0")

    # Refuse the user's settings that leave the search no choice
    for override in typed:
        key = override.key_or_group
        several = override.is_sweep_override()
        if several and key != "backend":
            raise ConfigError(f"{key}: got several values, expected one with experiment=auto")
        if key == "backend" and FILE in words.values(override):
            raise ConfigError(f"backend: got {FILE}, which quantizes nothing; try resnet8ptq judge")
        value = override.value()
        mend = None
        if isinstance(value, str):
            mend = _REFUSED.get((key, value))
        if mend is not None:
            raise ConfigError(f"{key}: got {value} with experiment=auto; {mend}")
        if key in _OF_SEARCH:
            raise ConfigError(f"{key}: got {value}, but experiment=auto sets it itself")


def check_step(config: RunConfig, typed: Sequence[Override], untuned: str = "") -> None:
    """Raise `ConfigError` if a step ignores the user's nodes, or tunes without usable samples.

    Args:
        untuned: the reason why no step can tune on training samples; empty if steps can.
    """
    if untuned and tunes(config):
        raise ConfigError(untuned)
    chosen = [override for override in typed if override.key_or_group in _CHOOSE_NODES]
    for line in words.find_idle(config, chosen):
        raise ConfigError(line)


def find_varied() -> list[Override]:
    """Return the settings that steps vary, as a sweep over their values.

    Values that the search fills in later, such as that of `max_drop`, are left out.
    """
    changes = [row.change for row in step_table.STEPS]
    for backend in find_backends().values():
        changes.append(Change(backend.search.start))
    values: dict[str, list[str]] = {}
    for word in itertools.chain.from_iterable(one.settings for one in changes):
        key, is_set, value = word.partition("=")
        is_gap = value.startswith("{")  # filled in from the state of the search
        if is_set and not is_gap:
            values.setdefault(key, []).append(value)
    varied = []
    for key, all_values in values.items():
        varied.append(words.parse(f"{key}={','.join(dict.fromkeys(all_values))}"))
    return varied


_CHOOSE_NODES = ("op_types", "nodes_to_quantize")
_TIMES = ("quantize_s", "evaluate_s")
_REFUSED = {
    ("method", "dynamic"): "try resnet8ptq run method=dynamic",
    ("method", "weight_only"): "try resnet8ptq run method=weight_only",
    ("nodes_to_exclude", "auto"): "it searches for layers itself; leave the setting out",
}
_OF_SEARCH = ("evaluate.split", "evaluate.choice", "evaluate.stop", "analysis")


def measure(step: Step, record: RunRecord, seconds: float, level: float = SIGNIFICANCE) -> Tried:
    """Return a step's measurements for the next choice; a pass must be significant at `level`.

    The job of a step that was run before returns at once; its time is that of the earlier run.
    """
    shared = Tried(step, record.status, record.reason, run_id=record.run_id, seconds=seconds)
    if record.is_analysis:
        return replace(
            shared,
            reason=unescape_markdown(record.tags.get(NOTE_TAG, "")),
            findings=record.params.get("findings", "[]"),
            weights_db=record.metrics.get("diagnosis/weights_alone_sqnr_db"),
            activations_db=record.metrics.get("diagnosis/activations_alone_sqnr_db"),
        )
    if record.loss is None:
        return shared
    metric = record.task.metric

    # Sum the time that the run itself took, here or in an earlier sweep
    own_s = 0.0
    for key in _TIMES:
        own_s += record.metrics.get(f"system/{key}", 0.0)
    spent_s = own_s + record.metrics.get("system/prepare_s", 0.0)
    properties = record.params.get("properties", "").split(", ")
    cut_short = record.params.get("cut_short", "")
    if cut_short:
        cut_short = f"; the time was up: {cut_short}"
    named = record.params.get("excluded_nodes", "")
    if named == "[]":  # a search that left no layer in float
        named = ""

    # Put the record's values into the words of the search
    return replace(
        shared,
        seconds=max(seconds, spent_s),
        doubt=record.doubt,
        loss=record.loss,
        state_loss=metric.state_loss,
        error=_error(record, metric),
        within=record.p_within is not None and record.p_within <= level,
        noise=noise(record),
        noise_unit=_find_noise_unit(record),
        own_seconds=own_s,
        evaluate_s=record.metrics.get("system/evaluate_s", 0.0),
        samples=record.samples or 0,
        same_samples=record.same_samples,
        size_bytes=record.size_bytes or shared.size_bytes,
        fp32_bytes=record.fp32_size_bytes or 0.0,
        speedup=record.speedup,
        latency_ms=record.latency_ms,
        properties=tuple(filter(None, properties)),
        classifies=record.scored_as == "classification",
        named=named,
        cut_short=cut_short,
    )


def noise(record: RunRecord) -> float:
    """Return the distance of a model's outputs from those of FP32, to choose between equal losses.

    The distance is the KL divergence if the run has logged it, else noise divided by signal. It is
    0 if neither is known.
    """
    divergence = record.metrics.get("kl_divergence")
    if divergence is not None:
        return divergence
    sqnr_db = record.metrics.get("sqnr_db")
    if sqnr_db is None:  # equal outputs, with rare exceptions such as NaN
        return 0.0
    return float(10 ** (-sqnr_db / 10))


def _find_noise_unit(record: RunRecord) -> str:
    if "kl_divergence" in record.metrics:
        return "(KL divergence)"
    return "of the signal"


def _error(record: RunRecord, metric: Metric) -> float:
    """Return half of the width of the loss's 95% interval, in the loss's unit; 0 if unknown."""
    ends = record.interval("drop")  # already in the unit of the loss
    if ends is not None:
        return (ends[1] - ends[0]) / 2

    # Otherwise convert the interval of the metric
    ends = record.interval("delta")
    baseline = record.value_of(metric, BASELINE)
    if ends is None and metric.bounded:  # deviation has FP32 as its reference
        ends = record.interval("value")
    if ends is None:
        return 0.0
    return abs(metric.loss_of(ends[1] - ends[0], baseline or 0.0)) / 2


def _say(line: str) -> None:
    """Print a line; shorten long lists, such as of layers in float, to the first names."""
    console.say(console.stderr(), _LIST.sub(_shorten, line))


_LIST = re.compile(r"\[([^\[\]]{200,})\]")


def _shorten(match: re.Match[str]) -> str:
    names = match[1].split(",")
    return f"[{','.join(names[:3])},... {len(names)} in all]"
