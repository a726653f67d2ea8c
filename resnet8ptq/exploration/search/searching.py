"""The search: chooses the next steps from the results of earlier ones; runs nothing itself.

`next_steps` depends only on its arguments, so an interrupted search continues from its finished
runs.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hydra.core.override_parser.types import Override

from resnet8ptq.config import limits, words
from resnet8ptq.core.descriptor import find_search
from resnet8ptq.evaluation.worth import saves
from resnet8ptq.experiment.network_properties import BESIDE, PRODUCTS, RECURRENT
from resnet8ptq.exploration.search import step_table
from resnet8ptq.exploration.search.changes import Change, change
from resnet8ptq.exploration.search.step_table import ANSWERS, FALLBACKS, START, Proposal, Seen

SKIPPED = "skipped"  # the status of a step without time, or with settings in conflict
# The kinds of steps that are not in `step_table`
DIAGNOSIS = "diagnosis"
FEWER_BITS = "fewer bits"
CONFIRM = "confirm"
SAME_SIZE = 1.03  # largest ratio of sizes that count as equal
SAME_NOISE = 1.25  # largest ratio of noises that count as equal
FEWEST = 0.35  # least budget, as a share of the bytes with 8 bits: about 3 bits for each weight
_EXCLUDE = "nodes_to_exclude"
_MIXED = "method=mixed"
# Keys of a step, and the user's settings that would have no effect beside these keys
_OVERRULED = {"op_types": ("attention",), "calib": ("calib.table",)}


@dataclass(frozen=True)
class Asked:
    """The request to the search: goal, limit, and what is known beforehand.

    Attributes:
        goal: `fastest` takes the first models that pass, and ranks them by latency. `smallest`
            ranks by bytes, and tries fewer than 8 bits. `best` looks for the least loss.
        backends: the values of `backend=`.
        limit: the largest loss that passes, in the unit of the loss; 0 until a model is measured.
        fixed: the user's settings by key, see `find_fixed`; no step changes them.
        exact_sums: whether this CPU sums 8-bit products exactly.
        properties: properties of the network, see `network_properties`; empty if none is known.
        nodes: names of the network's nodes, which an error may name.
        reported: largest number of samples on which a model is confirmed; 0 if unknown.
        untuned: the reason why no step can tune on training samples, see `preparation.tunes`; empty
            if steps can, or if unknown.
    """

    goal: str
    backends: tuple[str, ...]
    limit: float
    fixed: Mapping[str, str] = field(default_factory=dict)
    exact_sums: bool = True
    properties: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    reported: int = 0
    untuned: str = ""


@dataclass(frozen=True)
class Step:
    """A configuration to try.

    Attributes:
        kind: a name in `step_table`, or `DIAGNOSIS`, `FEWER_BITS` or `CONFIRM`.
        settings: the step's settings by key, as typed, without the user's settings.
        why: the reason for the step, in one line.
        words: the settings to print, in one line.
        cost: expected time, relative to the plain run.
    """

    backend: str
    kind: str
    settings: Mapping[str, str]
    why: str
    words: str
    cost: float = 1.0

    @property
    def part(self) -> float:
        """The fraction of its expected time that must be left for the step to begin.

        Only a step that stops at the deadline with the best result so far has less than 1.
        """
        rows = step_table.find_rows(self.kind)
        return min((row.part for row in rows), default=1.0)

    @property
    def is_static(self) -> bool:
        """Whether calibration gives activation ranges, so that steps for calibration apply."""
        return self.settings.get("method") in (None, "method=static", _MIXED, "method=qat")

    @property
    def is_mixed(self) -> bool:
        """Whether the step sets `method=mixed`.

        The search does not diagnose such models, nor does it search for the bits of their layers.
        """
        return self.settings.get("method") == _MIXED

    @property
    def overrides(self) -> list[str]:
        """The settings of the step's job, in addition to those of the user."""
        return list(self.settings.values())


@dataclass(frozen=True)
class Tried:
    """A step with its outcome and measurements.

    A confirmation is measured on the reported samples, a diagnosis on training samples, and other
    steps on the selection samples.

    Attributes:
        status: ok, unsupported, failed, killed or skipped, with `reason`.
        doubt: the reason to doubt FP32 itself, which makes every verdict void; empty without doubt.
        loss: loss against FP32, in the unit of the limit; NaN if it was not measured.
        error: half of the width of the loss's 95% interval; 0 if unknown.
        within: whether the samples prove that the loss is within the limit, and the model has no
            fault, see `verdicts.find_fault`.
        refuted: whether a run on the reported samples failed to prove that the model passes.
        noise: distance of the outputs from those of FP32, the criterion between models of equal
            loss.
        noise_unit: the unit of the noise, to print.
        properties, findings: the properties and, as JSON, the findings that the job reported, see
            `step_table.Seen`.
        classifies: see `step_table.Seen`.
        named: list of the nodes that `nodes_to_exclude=auto` left in float, as text.
        fp32_bytes: size of the FP32 file; 0 if unknown.
        speedup: speed relative to FP32; None if it was not measured.
        seconds: seconds of the job; jobs that ran at once get equal shares; for a measured model,
            at least the time that the run itself recorded.
        own_seconds: seconds of quantization and evaluation.
        evaluate_s: seconds of the evaluation.
        samples: number of samples of the evaluation; 0 if unknown.
        same_samples: whether the evaluated samples are also the reported ones.
        weights_db, activations_db: SQNR in dB with only weights or only activations rounded, from
            a diagnosis; None if unknown.
        cut_short: the work that the time limit cut short, to print.
        state_loss: returns a loss as text, with its name and unit.
    """

    step: Step
    status: str = "ok"
    reason: str = ""
    doubt: str = ""
    loss: float = math.nan
    error: float = 0.0
    within: bool = False
    refuted: bool = False
    noise: float = math.inf
    noise_unit: str = ""
    run_id: str = ""
    size_bytes: float = math.inf
    fp32_bytes: float = 0.0
    speedup: float | None = None
    latency_ms: float | None = None
    seconds: float = 0.0
    own_seconds: float = 0.0
    evaluate_s: float = 0.0
    samples: int = 0
    same_samples: bool = False
    properties: tuple[str, ...] = ()
    findings: str = "[]"
    classifies: bool = True
    weights_db: float | None = None
    activations_db: float | None = None
    named: str = ""
    cut_short: str = ""
    state_loss: Callable[[float], str] = str

    @property
    def measured(self) -> bool:
        """Whether the step has a model to compare."""
        return self.status == "ok" and not math.isnan(self.loss)

    def say_noise(self) -> str:
        """Return the noise with its unit, such as `noise 0.0016 (KL divergence)`."""
        return f"noise {self.noise:.2g} {self.noise_unit}".rstrip()

    @property
    def searches(self) -> bool:
        """Whether the step searches for layers to leave in float."""
        return self.step.settings.get(_EXCLUDE) == f"{_EXCLUDE}=auto"

    @property
    def settled_step(self) -> Step:
        """The step, with the result in place of a search for layers, which need not run again."""
        if not self.searches:
            return self.step
        settings = {**self.step.settings, _EXCLUDE: f"{_EXCLUDE}={self.named or '[]'}"}
        settings.pop("max_drop", None)  # only the search uses this setting
        return replace(self.step, settings=settings)

    @property
    def distance(self) -> float:
        """The noise, increased by a quarter for layers in float because they cost speed."""
        none_excluded = f"{_EXCLUDE}=[]"
        if self.settled_step.settings.get(_EXCLUDE, none_excluded) == none_excluded:
            return self.noise
        return SAME_NOISE * self.noise

    @property
    def passes(self) -> bool:
        """Whether the step has a model that is `within` the limit and not `refuted`."""
        return self.measured and self.within and not self.refuted

    @property
    def saves(self) -> bool:
        """Whether the model is clearly smaller or faster than FP32, or FP32's size is unknown."""
        return saves(self.size_bytes, self.fp32_bytes, self.speedup)


def find_fixed(typed: Iterable[Override]) -> dict[str, str]:
    """Return the user's settings by key; keys, texts and booleans are spelled as in the steps.

    A group has several spellings: `calib=mse`, `calib.name=mse`, `++calib='mse'`.

    >>> find_fixed([words.parse("calib.name=mse"), words.parse("+per_channel=True")])
    {'calib': 'calib=mse', 'per_channel': 'per_channel=true'}
    """
    fixed = {}
    for override in typed:
        key = override.key_or_group
        group = key.removesuffix(".name")
        if words.is_group(group):
            key = group
        value = override.get_value_string()
        if not override.is_sweep_override():
            read = override.value()
            if isinstance(read, str | bool | None):
                value = limits.shown(read)
        fixed[key] = f"{key}={value}"
    return fixed


def closest(tried: Sequence[Tried]) -> Tried:
    """Return the model that is closest to FP32, by loss, then noise, then size.

    Among models whose loss is within the error of the smallest loss, the noise decides, because it
    varies far less from sample to sample. Among models of about equal noise, the smaller file wins.
    The noise of a model with layers in float is increased, see `Tried.distance`.
    """
    # Losses within half of the interval count as equal
    least = min(tried, key=lambda trial: trial.loss)
    near = [trial for trial in tried if trial.loss <= least.loss + least.error]

    quietest = min(near, key=lambda trial: trial.distance)
    quiet = [trial for trial in near if trial.distance <= SAME_NOISE * quietest.distance]

    smallest = min(quiet, key=lambda trial: trial.size_bytes)
    small = [trial for trial in quiet if trial.size_bytes <= SAME_SIZE * smallest.size_bytes]
    return min(small, key=lambda trial: (trial.distance, trial.loss))


def passing(tried: Sequence[Tried]) -> list[Tried]:
    """Return the models that pass and save bytes or time, see `Tried.saves`.

    A model that is not clearly quieter than each refuted one is left out, because it may also pass
    on the selection samples only by chance.
    """
    winners = []
    for trial in tried:
        if trial.passes and trial.saves and _is_quieter(trial, tried):
            winners.append(trial)
    return winners


def rank(asked: Asked, tried: Sequence[Tried]) -> list[Tried]:
    """Return the models in the order of confirmation.

    These are the models of `passing`, ordered by the goal. If there are none, these are the models
    that may still pass on the reported samples, with the closest to FP32 first. Those that save
    neither bytes nor time come last.
    """
    first = passing(tried)
    if not first:
        return _by_saving(_find_hopeful(tried))
    if asked.goal == "best":
        return _by_closeness(first)
    if asked.goal == "smallest":
        return sorted(first, key=lambda trial: (trial.size_bytes, trial.noise))
    return sorted(first, key=lambda trial: (trial.latency_ms or math.inf, trial.noise))


def _find_hopeful(tried: Sequence[Tried]) -> list[Tried]:
    """Return the measured models that may pass on the reported samples.

    Refuted models are left out, and those that neither pass nor are clearly quieter than each
    refuted one.
    """
    hopeful = []
    for trial in _measured(tried):
        is_near = trial.passes or _is_quieter(trial, tried)
        if is_near and not trial.refuted:
            hopeful.append(trial)
    return hopeful


def _measured(tried: Sequence[Tried]) -> list[Tried]:
    return [trial for trial in tried if trial.measured]


def _find_diagnosis(tried: Sequence[Tried]) -> Tried | None:
    """Return the diagnosis among a backend's trials, which have at most one; None without one."""
    for trial in tried:
        if trial.step.kind == DIAGNOSIS:
            return trial
    return None


def _by_saving(tried: Sequence[Tried]) -> list[Tried]:
    """Return the models by closeness to FP32; those that save neither bytes nor time come last."""
    saving = []
    others = []
    for trial in tried:
        if trial.saves:
            saving.append(trial)
        else:
            others.append(trial)
    return _by_closeness(saving) + _by_closeness(others)


def _is_quieter(trial: Tried, tried: Sequence[Tried]) -> bool:
    """Return whether a model has clearly less noise than every refuted one."""
    refuted = [other.noise for other in tried if other.refuted]
    return not refuted or SAME_NOISE * trial.noise < min(refuted)


def _of_backend(tried: Sequence[Tried], backend: str) -> list[Tried]:
    return [trial for trial in tried if trial.step.backend == backend]


def _by_closeness(tried: Sequence[Tried]) -> list[Tried]:
    """Return the models in the order in which `closest` chooses them."""
    left = list(tried)
    ordered = []
    while left:
        ordered.append(closest(left))
        left.remove(ordered[-1])
    return ordered


def next_steps(asked: Asked, tried: Sequence[Tried]) -> list[Step]:
    """Return the steps to run next, for each backend; empty at the end of the search.

    The list is also empty if a trial gives a reason to doubt FP32, which no step can mend.
    """
    steps: list[Step] = []
    if any(trial.doubt for trial in tried):
        return steps
    for backend in asked.backends:
        steps += _next_of_backend(asked, backend, _of_backend(tried, backend))
    return steps


def confirm(asked: Asked, step: Step) -> Step:
    """Return the step that measures a model on the reported samples."""
    settings = {**step.settings, "evaluate.split": "evaluate.split=test"}
    if "latency.enabled" not in asked.fixed:
        settings["latency.enabled"] = "latency.enabled=true"
    why = "confirmation: the best so far, on the reported samples"
    return replace(step, kind=CONFIRM, settings=settings, why=why, words=say(step.settings))


def say(settings: Mapping[str, str]) -> str:
    """Return settings in one line, without backend, split and latency.

    >>> say({"backend": "backend=onnx", "calib": "calib=mse", "dtype": "dtype=int8"})
    'calib=mse dtype=int8'
    """
    shown = dict(settings)
    for key in ("backend", "evaluate.split", "latency.enabled"):
        shown.pop(key, None)
    return " ".join(shown.values())


def _next_of_backend(asked: Asked, backend: str, own: Sequence[Tried]) -> list[Step]:
    names = step_table.order(_find_properties(asked, own), asked.goal)

    # First try the starts, or plainer ones if they fail
    starts = [name for name in names if _find_row(name).is_start]
    for name in starts:
        left = _propose(asked, backend, own, name=name, before=())
        if left:
            return left
    plainer = _find_plainer(asked, own, starts)
    if plainer:
        return plainer

    # Once a model passes, only `smallest` and `best` go on
    if asked.goal == "fastest" and passing(own):
        return []
    if asked.goal == "smallest" and passing(own):
        return _find_smaller(asked, backend, own)

    # Change the best model so far, by the first kind with an untried step
    for position, name in enumerate(names):
        if name in starts:
            continue
        later = names[position:]
        before = [trial for trial in own if trial.step.kind not in later]
        left = _propose(asked, backend, own, name=name, before=before)
        if left:
            return left
    return []


def _find_row(name: str) -> step_table.StepKind:
    """Return the first row of a kind; `is_start`, `free` and `plain` are the same in all rows."""
    return step_table.find_rows(name)[0]


def _propose(
    asked: Asked, backend: str, own: Sequence[Tried], name: str, before: Sequence[Tried]
) -> list[Step]:
    """Return the untried steps of a kind; empty if it does not apply after the models `before`.

    For `ANSWERS`, the diagnosis comes first, if one is possible.

    Args:
        before: the trials whose closest static model the steps change; a plain step changes none.
    """
    row = _find_row(name)
    measured = _measured(before)
    may_end = measured and asked.goal != "best" and not row.free
    if may_end and loses_nothing(asked, _closest_that_saves(measured)):
        return []

    # A plain step starts from the default settings; others change the best model
    changed = None
    base: Mapping[str, str] = _base(asked, backend)
    if not row.plain:
        static = [trial for trial in measured if trial.step.is_static]
        if not static:
            return []
        changed = closest(static).settled_step
        base = changed.settings
    seen = _see(asked, backend, own, changed)

    # Make the steps that the user's settings allow; a diagnosis comes before its answers
    steps = []
    for proposal in step_table.propose(name, seen):
        # The start, plain 8 bits, has no main setting that could be fixed
        if name == START or not _is_fixed(asked, proposal):
            steps.append(_step(asked, base, kind=name, proposal=proposal))
    if name == ANSWERS and changed is not None:
        diagnosis = _diagnose(asked, own, changed)
        if diagnosis:
            steps = diagnosis
    return _untried(steps, own)


def _find_plainer(asked: Asked, own: Sequence[Tried], starts: Sequence[str]) -> list[Step]:
    """Return plainer steps for the kinds of start without a measured trial."""
    steps = []
    for name in starts:
        trials = [trial for trial in own if trial.step.kind == name]
        if trials and not _measured(trials):
            steps += _make_plainer(asked, trials[-1])
    return _untried(steps, own)


def _make_plainer(asked: Asked, failed: Tried) -> list[Step]:
    """Return the step with the node in float that an error names, or else with a plainer setting.

    The list is empty if neither exists. If the trial failed, any setting may be at fault.
    Otherwise, such as for an unsupported trial, the reason must name the setting.
    """
    step = failed.step
    kept = dict(step.settings)
    node = _find_named(asked, failed)
    if node:
        listed = [*_excluded(kept), node]
        kept[_EXCLUDE] = f"{_EXCLUDE}={words.as_list(listed)}"
        return [replace(step, settings=kept, words=say(kept), why=f"{node} in float")]

    # Otherwise replace the next setting that may be at fault
    for setting, plainer, why in step_table.PLAINER:
        key = _key(setting)
        is_set = kept.get(key, f"{key}=null") == setting
        to_blame = failed.status == "failed" or key in failed.reason
        if is_set and to_blame and not _keeps(asked, key):
            kept[key] = plainer
            return [replace(step, settings=kept, words=say(kept), why=f"it failed: {why}")]
    return []


def _find_named(asked: Asked, failed: Tried) -> str:
    """Return the first of the network's nodes that an error names and the step does not exclude.

    The result is empty if there is none, the step is not static, or the user sets
    `nodes_to_exclude`.
    """
    if failed.status != "failed" or _EXCLUDE in asked.fixed or not failed.step.is_static:
        return ""
    named = set(re.findall(r"[^\s'\"(),;:]+", failed.reason))
    named |= {name.removesuffix("_quant") for name in named}  # ONNX Runtime's suffix
    left = named.difference(_excluded(failed.step.settings))
    for name in asked.nodes:
        if name in left:
            return name
    return ""


def _excluded(settings: Mapping[str, str]) -> list[str]:
    """Return the nodes that settings list in `nodes_to_exclude`; empty for `auto`."""
    if _EXCLUDE not in settings:
        return []
    value = words.parse(settings[_EXCLUDE]).value()
    if not isinstance(value, list):
        return []
    return list(map(str, value))


def find_fallbacks(asked: Asked, tried: Sequence[Tried], backend: str) -> list[Step]:
    """Return the untried last resorts before FP32.

    The list is empty if the backend has a model of `passing`, or if its closest model loses
    nothing. The closest is chosen among models that save bytes or time, if there are any.
    """
    own = _of_backend(tried, backend)
    if passing(own):
        return []
    measured = _measured(own)
    if measured and loses_nothing(asked, _closest_that_saves(measured)):
        return []
    steps = []
    for name in step_table.order((), asked.goal):
        if name in FALLBACKS:
            steps += _propose(asked, backend, own, name=name, before=())
    return steps


def _find_smaller(asked: Asked, backend: str, own: Sequence[Tried]) -> list[Step]:
    """Return the next step that stores weights in fewer than 8 bits; empty without one."""
    four = _propose(asked, backend, own, name="weights_in_4_bits", before=())
    return four or _narrow(asked, own)


def _closest_that_saves(measured: Sequence[Tried]) -> Tried:
    saving = [trial for trial in measured if trial.saves]
    return closest(saving or measured)


def loses_nothing(asked: Asked, best: Tried) -> bool:
    """Return whether a model loses nothing, or at most half of the limit on too few samples.

    Too few samples cannot show that a change of settings helps. If the closest model loses nothing
    or so little, most steps that cost bytes or speed are therefore left out, unless the goal is
    `best`. A refuted model, or one with noise above the limit, counts as losing more. For example,
    a model with a KL divergence of 0.02 showed no loss on 100 samples, but a loss of 1.1 points on
    800 others.
    """
    is_quiet = best.noise <= asked.limit and not best.refuted
    # Samples that hardly change have a small error, but too few of them prove nothing
    is_below = best.loss + best.error < asked.limit
    has_few_samples = best.error >= asked.limit or (is_below and not best.within)
    loses_little = best.loss <= 0 or (has_few_samples and best.loss <= asked.limit / 2)
    return is_quiet and loses_little


def _find_properties(asked: Asked, own: Sequence[Tried]) -> tuple[str, ...]:
    """Return the properties of the network and, after a diagnosis, of its loss, if known."""
    known = asked.properties
    measured = _measured(own)
    if not known and measured:
        known = measured[0].properties
    diagnosis = _find_diagnosis(own)
    if diagnosis is None:
        return known
    costs_more = _costs_more(diagnosis)
    return (*known, costs_more) if costs_more else known


def _see(asked: Asked, backend: str, own: Sequence[Tried], changed: Step | None) -> Seen:
    """Return the state of the search before a new step.

    Args:
        changed: the step whose settings the new step changes; None for a plain step.
    """
    # The user's settings come last, because no step changes them
    settings: dict[str, str] = {}
    if changed is not None:
        settings.update(changed.settings)
    settings.update(asked.fixed)

    # Add what the trials so far have shown
    findings: tuple[tuple[str, Change], ...] = ()
    diagnosis = _find_diagnosis(own)
    if diagnosis is not None:
        findings = _read_findings(diagnosis.findings)
    measured = _measured(own)
    return Seen(
        backend=backend,
        exact_sums=asked.exact_sums,
        limit=asked.limit,
        properties=_find_properties(asked, own),
        settings=settings,
        findings=findings,
        classifies=not measured or measured[0].classifies,
    )


def _read_findings(text: str) -> tuple[tuple[str, Change], ...]:
    """Return at most three findings as text, each with the first change against it.

    Findings without a change are left out. So are those whose first change is another calibration
    method, because other steps try these methods.
    """
    pairs = []
    for finding in json.loads(text):
        name = f"{finding['name']} in {finding['tensor']}"
        for settings in finding["changes"][:1]:
            if not settings[0].startswith("calib="):
                pairs.append((name, Change(tuple(settings))))
    return tuple(pairs[:3])


def _costs_more(diagnosed: Tried) -> str:
    """Return `WEIGHTS` or `ACTIVATIONS`, whichever costs more; empty if unknown or about equal."""
    weights = diagnosed.weights_db
    activations = diagnosed.activations_db
    if weights is None or activations is None:
        return ""
    if abs(weights - activations) < 3:  # dB: less than twice the noise
        return ""
    if weights < activations:
        return step_table.WEIGHTS
    return step_table.ACTIVATIONS


def _diagnose(asked: Asked, own: Sequence[Tried], best: Step) -> list[Step]:
    """Return the step that diagnoses the best model so far.

    The list is empty after the backend's first diagnosis, or if none is possible.
    """
    is_possible = find_search(best.backend).diagnoses and not best.is_mixed
    if _find_diagnosis(own) is not None or not is_possible:
        return []

    # Diagnose the settings of the best model, without trying changes
    files = _without_fixed(asked, ("format=qdq", "slim=false"))  # the analysis sets both anyway
    settings = {**best.settings, **files}
    settings.pop("evaluate.split")  # a diagnosis measures on training samples
    for word in ("+analysis=diagnose", "analysis.try_changes=false"):
        settings[_key(word)] = word
    why = "which tensors lose most, and whether by weights or by activations"
    return [
        Step(
            best.backend,
            kind=DIAGNOSIS,
            settings=settings,
            why=why,
            words="+analysis=diagnose",
            cost=3,
        )
    ]


def _narrow(asked: Asked, own: Sequence[Tried]) -> list[Step]:
    """Return the step with the next budget of bytes; empty if there is none.

    `precision.plan=auto` finds the bits of each layer for the budget, and rounding is learned.
    There is no such step if the user sets a plan or a budget. It also needs a backend that stores
    weights below 8 bits, and a passing static model of 8 bits.
    """
    if {"precision.plan", "precision.max_bytes"} & {*asked.fixed}:
        return []

    # The smallest static model of 8 bits that passes
    eight = []
    for trial in own:
        is_plain = trial.step.is_static and not trial.step.is_mixed
        if is_plain and trial.passes and trial.step.kind != FEWER_BITS:
            eight.append(trial)
    more = find_search(own[0].step.backend).fewer_bits
    if more is None or not eight:
        return []
    best = min(eight, key=lambda trial: trial.size_bytes)
    budget = _find_budget(own, best)
    if budget is None:
        return []

    # Choose bits by layer within this budget, from the smallest 8-bit model
    typed = (
        f"dtype=w4a8 precision.plan=auto precision.max_bytes={budget:.0f} "
        f"{step_table.LEARN.words} corrections.reconstruction=false"
    )
    base = best.settled_step.settings
    dtype = base.get("dtype", asked.fixed.get("dtype"))
    if dtype != "dtype=w8a16":
        typed = " ".join([typed, *more])
    why = f"8 bits pass: fewer bits, {budget / best.size_bytes:.0%} of the bytes"
    proposal = Proposal(change(typed), why, 30)
    step = _step(asked, base, kind=FEWER_BITS, proposal=proposal)
    return _untried([step], own)


def _find_budget(own: Sequence[Tried], best: Tried) -> float | None:
    """Return the next budget of bytes; None if a budget was skipped, or the bounds about meet.

    The upper bound is the size of the smallest model that passes. The lower bound is the largest
    budget without a passing model, and at least `FEWEST` times the size of `best`.

    Args:
        best: the smallest static model of 8 bits that passes.
    """
    low = FEWEST * best.size_bytes
    high = best.size_bytes
    for trial in own:
        is_budget = trial.step.kind == FEWER_BITS
        if is_budget and trial.status == SKIPPED:
            return None
        if trial.passes:
            high = min(high, trial.size_bytes)
        elif is_budget:
            low = max(low, _budget(trial.step))
    if high <= low * SAME_SIZE:
        return None
    return round(math.sqrt(low * high), -2)


def _untried(steps: Sequence[Step], own: Sequence[Tried]) -> list[Step]:
    """Return the steps whose settings no trial had."""
    tried = [dict(trial.step.settings) for trial in own]
    untried = []
    for step in steps:
        if dict(step.settings) not in tried:
            untried.append(step)
    return untried


def _budget(step: Step) -> float:
    return float(step.settings["precision.max_bytes"].partition("=")[2])


def _base(asked: Asked, backend: str) -> dict[str, str]:
    """Return the settings that the plain steps of a backend share."""
    settings = {"backend": f"backend={backend}", "evaluate.split": "evaluate.split=choice"}

    # Latencies matter only with several backends or starts, which these properties may add
    has_starts = not {PRODUCTS, RECURRENT, BESIDE}.isdisjoint(asked.properties)
    several = len(asked.backends) > 1 or has_starts
    compares = asked.goal == "fastest" and several  # the confirmation compares latencies
    if not compares and "latency.enabled" not in asked.fixed:
        settings["latency.enabled"] = "latency.enabled=false"
    return settings


def _step(asked: Asked, base: Mapping[str, str], kind: str, proposal: Proposal) -> Step:
    kept = _without_fixed(asked, proposal.change.settings)
    backend = base["backend"].partition("=")[2]
    said = " ".join(kept.values())
    return Step(
        backend, kind, settings={**base, **kept}, why=proposal.why, words=said, cost=proposal.cost
    )


def _is_fixed(asked: Asked, proposal: Proposal) -> bool:
    """Return whether `_keeps` holds for the first setting of a proposal, its main one."""
    return _keeps(asked, _key(proposal.change.settings[0]))


def _without_fixed(asked: Asked, settings: Sequence[str]) -> dict[str, str]:
    """Return settings by key, without those that would change or overrule a user's setting."""
    by_key = {}
    for word in settings:
        key = _key(word)
        if not _keeps(asked, key):
            by_key[key] = word
    return by_key


def _keeps(asked: Asked, key: str) -> bool:
    """Return whether the user has set a key, or a setting that this key would overrule."""
    kept = {key, *_OVERRULED.get(key, ())}
    return not kept.isdisjoint(asked.fixed)


def _key(word: str) -> str:
    """Return the key of a setting as the search writes it, without Hydra's slow parser."""
    return word.partition("=")[0]
