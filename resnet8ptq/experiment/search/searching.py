"""The search: chooses the next steps from the results of earlier ones; runs nothing itself.

`next_steps` depends only on its arguments, so an interrupted search continues from its finished
runs.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from resnet8ptq.core.descriptor import find_search
from resnet8ptq.experiment.search import changes, step_kinds
from resnet8ptq.experiment.search.changes import Change
from resnet8ptq.experiment.search.step_kinds import Proposal, Seen

GOALS = ("fastest", "smallest", "best")
SKIPPED = "skipped"  # the status of a step that did not fit into the time
START, DIAGNOSIS, FEWER_BITS, CONFIRM = "start", "diagnosis", "fewer bits", "confirm"
# Steps that end in time with the best so far -> the part of them that has to fit.
ENDS_IN_TIME = {
    **dict.fromkeys(("float_layers", "learned_rounding", "learned_blocks"), 0.25),
    "fine_tuning": 0.5,  # whole epochs
}
SAME_SIZE = 1.03  # sizes that differ by less are not told apart
SAME_NOISE = 1.25
FEWEST = 0.35  # of the bytes of 8 bits: 2 or 3 bits a weight
# Steps whose models have the bytes and the speed of the first one.
COST_NOTHING = ("equalization", "calibrations", "quick_corrections", "learned_rounding")
_EXCLUDE = "nodes_to_exclude"


@dataclass(frozen=True)
class Asked:
    """The request to the search.

    Attributes:
        goal: `fastest`: the first models that pass, by latency; `smallest`: by bytes, with fewer
            than 8 bits; `best`: the least loss.
        backends: the values of `backend=`.
        limit: the largest loss that passes, in the unit of the loss.
        fixed: the user's settings by key, as typed; no step changes them.
        exact_sums: whether this CPU sums 8-bit products exactly.
    """

    goal: str
    backends: tuple[str, ...]
    limit: float
    fixed: Mapping[str, str] = field(default_factory=dict)
    exact_sums: bool = True


@dataclass(frozen=True)
class Step:
    """A configuration to try.

    Attributes:
        kind: the kind of step.
        settings: the step's settings by key, as typed, without the user's settings.
        why: the reason for the step, in one line.
        words: the change to the best configuration so far, to print.
        cost: expected time, relative to the plain run.
    """

    backend: str
    kind: str
    settings: Mapping[str, str]
    why: str
    words: str
    cost: float = 1.0

    @property
    def overrides(self) -> list[str]:
        """The settings of the step's job, in addition to the user's."""
        return list(self.settings.values())


@dataclass(frozen=True)
class Tried:
    """A step that has run, measured on the selection samples.

    Attributes:
        status: ok, unsupported, failed or skipped, with `reason`.
        doubt: the reason if FP32 itself is broken, so that every verdict is void; else empty.
        loss: loss against FP32, in the unit of the limit.
        error: half of the loss's 95% interval; 0 if unknown.
        within: whether the samples prove that the loss is within the limit.
        refuted: whether the reported samples do not prove it.
        noise: distance of the outputs from FP32's, the criterion between models of equal loss.
        properties, findings: those that the job reported, see `step_kinds.Seen`; findings as JSON.
        classifies: see `step_kinds.Seen`.
        named: nodes that `nodes_to_exclude=auto` left in float.
        seconds: seconds of the job.
        own_seconds: seconds of its quantization and evaluation.
        weights_db, activations_db: SQNR with only weights or only activations rounded.
        cut_short: the work that the time limit cut short, to print.
        show_loss: returns a loss as text, in the unit of the metric.
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
    size_bytes: float = math.inf
    latency_ms: float | None = None
    seconds: float = 0.0
    own_seconds: float = 0.0
    properties: tuple[str, ...] = ()
    findings: str = "[]"
    classifies: bool = True
    weights_db: float | None = None
    activations_db: float | None = None
    named: str = ""
    cut_short: str = ""
    show_loss: Callable[[float], str] = str

    @property
    def measured(self) -> bool:
        """Whether the step has a model to compare."""
        return self.status == "ok" and not math.isnan(self.loss)

    @property
    def searches(self) -> bool:
        """Whether the step searches for layers to leave in float."""
        return self.step.settings.get(_EXCLUDE) == f"{_EXCLUDE}=auto"

    @property
    def found(self) -> Step:
        """The step with the layers that its search found, so that the search does not run again."""
        if not self.searches:
            return self.step
        settings = {**self.step.settings, _EXCLUDE: f"{_EXCLUDE}={self.named or '[]'}"}
        settings.pop("max_drop", None)  # not the step's if the user has set it
        return replace(self.step, settings=settings)

    @property
    def distance(self) -> float:
        """The noise, increased for layers in float because they cost speed."""
        in_float = self.found.settings.get(_EXCLUDE, f"{_EXCLUDE}=[]") != f"{_EXCLUDE}=[]"
        return SAME_NOISE * self.noise if in_float else self.noise

    @property
    def passes(self) -> bool:
        """Whether the step has a model that is proven to be within the limit."""
        return self.measured and self.within and not self.refuted


def closest(tried: Sequence[Tried]) -> Tried:
    """Return the model with the lowest noise among those with the smallest loss.

    The error of a loss is half of its interval. Among models whose loss is within the error of the
    smallest loss, the noise decides, because it varies far less from sample to sample. Among models
    of about equal noise, the smaller file wins. Layers in float must lower the noise clearly.
    """
    least = min(tried, key=lambda trial: trial.loss)
    near = [trial for trial in tried if trial.loss <= least.loss + least.error]
    quietest = min(trial.distance for trial in near)
    quiet = [trial for trial in near if trial.distance <= SAME_NOISE * quietest]
    smallest = min(trial.size_bytes for trial in quiet)
    small = [trial for trial in quiet if trial.size_bytes <= SAME_SIZE * smallest]
    return min(small, key=lambda trial: (trial.distance, trial.loss))


def passing(tried: Sequence[Tried]) -> list[Tried]:
    """Return the models that pass, without those about as noisy as a model that was refuted.

    Chance on the selection samples lets several models pass that lose about the same.
    """
    return [trial for trial in tried if trial.passes and _is_quieter(trial, tried)]


def rank(asked: Asked, tried: Sequence[Tried]) -> list[Tried]:
    """Return the models in the order of confirmation.

    Models that pass on the selection samples come first, ordered by the goal. If none passes,
    because the samples are too few or all models lose too much, the closest to FP32 come first. A
    refuted model is left out, and a noisier one that does not pass either.
    """
    left = [trial for trial in tried if trial.measured and not trial.refuted]
    left = [trial for trial in left if trial.passes or _is_quieter(trial, tried)]
    first = passing(tried)
    if not first or asked.goal == "best":
        return _by_closeness(first or left)
    if asked.goal == "smallest":
        return sorted(first, key=lambda trial: (trial.size_bytes, trial.noise))
    return sorted(first, key=lambda trial: (trial.latency_ms or math.inf, trial.noise))


def _is_quieter(trial: Tried, tried: Sequence[Tried]) -> bool:
    refuted = [other.noise for other in tried if other.refuted]
    return not refuted or SAME_NOISE * trial.noise < min(refuted)


def _by_closeness(tried: Sequence[Tried]) -> list[Tried]:
    left, ordered = list(tried), []
    while left:
        ordered.append(closest(left))
        left.remove(ordered[-1])
    return ordered


def next_steps(asked: Asked, tried: Sequence[Tried]) -> list[Step]:
    """Return the steps to run next, of each backend; empty at the end of the search.

    No step fixes a broken FP32 network.
    """
    steps: list[Step] = []
    if any(trial.doubt for trial in tried):
        return steps
    for backend in asked.backends:
        own = [trial for trial in tried if trial.step.backend == backend]
        steps += _next_of_backend(asked, backend, own)
    return steps


def confirm(asked: Asked, step: Step) -> Step:
    """Return the step that measures a model on the reported samples."""
    settings = {**step.settings, "evaluate.split": "evaluate.split=test"}
    if "latency.enabled" not in asked.fixed:
        settings["latency.enabled"] = "latency.enabled=true"
    why = "confirmation: the best so far, on the reported samples"
    return replace(step, kind=CONFIRM, settings=settings, why=why, words=say(step.settings))


def say(settings: Mapping[str, str]) -> str:
    """Return settings in one line, without the search's own settings."""
    hidden = ("backend", "evaluate.split", "latency.enabled")
    return " ".join(word for key, word in settings.items() if key not in hidden)


def _next_of_backend(asked: Asked, backend: str, own: Sequence[Tried]) -> list[Step]:
    if not own:
        begun = Seen(backend, asked.exact_sums, asked.limit, settings=asked.fixed)
        why = "8-bit weights, 16-bit activations" if begun.is_wide else "plain 8 bits"
        return [_step(asked, _base(asked, backend), START, Proposal(step_kinds.start(begun), why))]
    if not any(trial.measured for trial in own):
        return []  # the backend or the network cannot
    if asked.goal != "best" and passing(own):
        return _narrow(asked, own) if asked.goal == "smallest" else []
    order = step_kinds.order(_see(asked, own, own), asked.goal)
    above = [kind.__name__ for kind in order]
    for kind in order:
        before = [trial for trial in own if trial.step.kind not in above]
        above.remove(kind.__name__)
        best = closest([trial for trial in before if trial.measured])
        costs_nothing = kind.__name__ in COST_NOTHING
        if asked.goal != "best" and not costs_nothing and loses_nothing(asked, best):
            continue
        seen = kind(_see(asked, own, before))
        proposals = [proposal for proposal in seen if not _is_fixed(asked, proposal)]
        base = best.found.settings
        steps = [_step(asked, base, kind.__name__, proposal) for proposal in proposals]
        if kind is step_kinds.answers:
            steps = _diagnose(asked, own, best.found) or steps
        if left := [step for step in steps if not _is_tried(step, own)]:
            return left
    return []


def loses_nothing(asked: Asked, best: Tried) -> bool:
    """Whether no loss was measured, or at most half of the limit on too few samples.

    No change of settings can decide with too few samples; the confirmation uses other samples. Then
    the search tries only steps that cost neither bytes nor speed, and compares them by noise. Noise
    above the limit is not an effect of few samples (a rule of thumb: 100 samples showed no loss for
    a KL divergence of 0.02, 800 others a loss of 1.1 points).
    """
    kept = best.loss <= 0 or (best.error >= asked.limit and best.loss <= asked.limit / 2)
    return kept and best.noise <= asked.limit and not best.refuted


def _see(asked: Asked, own: Sequence[Tried], before: Sequence[Tried]) -> Seen:
    """Return the state of the search before the next kind; `before` determines the settings."""
    first = next(trial for trial in own if trial.measured)
    diagnosed = next((trial for trial in own if trial.step.kind == DIAGNOSIS), None)
    base = closest([trial for trial in before if trial.measured]).found
    return Seen(
        backend=base.backend,
        exact_sums=asked.exact_sums,
        limit=asked.limit,
        properties=first.properties,
        settings={**base.settings, **asked.fixed},
        findings=() if diagnosed is None else _read_findings(diagnosed.findings),
        costs_more="" if diagnosed is None else _costs_more(diagnosed),
        classifies=first.classifies,
    )


def _read_findings(text: str) -> tuple[tuple[str, Change], ...]:
    """Return the first change for each finding, except other ranges, which are tried anyway."""
    pairs = []
    for finding in json.loads(text):
        for settings in finding["changes"][:1]:
            if not settings[0].startswith("calib="):
                pairs.append((f"{finding['name']} in {finding['tensor']}", Change(tuple(settings))))
    return tuple(pairs[:3])


def _costs_more(diagnosed: Tried) -> str:
    weights, activations = diagnosed.weights_db, diagnosed.activations_db
    if weights is None or activations is None or abs(weights - activations) < 3:  # twice the noise
        return ""
    return step_kinds.WEIGHTS if weights < activations else step_kinds.ACTIVATIONS


def _diagnose(asked: Asked, own: Sequence[Tried], best: Step) -> list[Step]:
    """Return the diagnosis of the best so far; empty if one has run, or for other backends."""
    tried = any(trial.step.kind == DIAGNOSIS for trial in own)
    if tried or not find_search(best.backend).diagnoses:
        return []
    files = _without_fixed(asked, ("format=qdq", "slim=false"))  # which the analysis needs anyway
    settings = {**best.settings, **files}
    settings.pop("evaluate.split")  # it measures on training samples
    for word in ("+analysis=diagnose", "analysis.try_changes=false"):
        settings[_key(word)] = word
    why = "which tensors lose most, and whether by weights or by activations"
    return [Step(best.backend, DIAGNOSIS, settings, why, "+analysis=diagnose", 3)]


def _narrow(asked: Asked, own: Sequence[Tried]) -> list[Step]:
    """Return a budget of bytes between the smallest model that passes and the largest that fails.

    The budget determines the bits of each layer; rounding is learned. Empty if the user has set the
    bits or the budget.
    """
    if {"precision.plan", "precision.max_bytes"} & {*asked.fixed}:
        return []
    eight = [trial for trial in own if trial.passes and trial.step.kind != FEWER_BITS]
    backend = own[0].step.backend
    more = find_search(backend).fewer_bits
    if more is None or not eight:
        return []
    best = min(eight, key=lambda trial: trial.size_bytes)
    below = [trial for trial in own if trial.step.kind == FEWER_BITS]
    high = min(e.size_bytes for e in own if e.passes)
    failed = [_budget(trial.step) for trial in below if not trial.passes]
    low = max([FEWEST * best.size_bytes, *failed])
    if high <= low * SAME_SIZE or any(trial.status == SKIPPED for trial in below):
        return []
    budget = round(math.sqrt(low * high), -2)
    words = (
        f"dtype=w4a8 precision.plan=auto precision.max_bytes={budget:.0f} "
        f"{changes.LEARN.words} corrections.reconstruction=false"
    )
    if not _see(asked, own, own).is_wide:
        words = " ".join([words, *more])
    why = f"8 bits pass: fewer bits, {budget / best.size_bytes:.0%} of the bytes"
    proposal = Proposal(changes.change(words), why, 30)
    step = _step(asked, best.found.settings, FEWER_BITS, proposal)
    return [] if _is_tried(step, own) else [step]


def _budget(step: Step) -> float:
    return float(step.settings["precision.max_bytes"].partition("=")[2])


def _base(asked: Asked, backend: str) -> dict[str, str]:
    """Return the settings of every trial, which runs on the selection samples only."""
    settings = {"backend": f"backend={backend}", "evaluate.split": "evaluate.split=choice"}
    compares = asked.goal == "fastest" and len(asked.backends) > 1  # latencies
    if not compares and "latency.enabled" not in asked.fixed:
        settings["latency.enabled"] = "latency.enabled=false"
    return settings


def _step(asked: Asked, base: Mapping[str, str], kind: str, proposal: Proposal) -> Step:
    kept = _without_fixed(asked, proposal.change.settings)
    backend, said = base["backend"].partition("=")[2], " ".join(kept.values())
    return Step(backend, kind, {**base, **kept}, proposal.why, said, proposal.cost)


def _is_fixed(asked: Asked, proposal: Proposal) -> bool:
    """Whether the user has set the first setting of a proposal, its main one."""
    return _key(proposal.change.settings[0]) in asked.fixed


def _without_fixed(asked: Asked, settings: Sequence[str]) -> dict[str, str]:
    """Return settings by key, without those that the user has set."""
    return {_key(word): word for word in settings if _key(word) not in asked.fixed}


def _key(word: str) -> str:
    """Return the key of a setting as the search writes it, without Hydra's slow parser."""
    return word.partition("=")[0]


def _is_tried(step: Step, own: Sequence[Tried]) -> bool:
    return any(dict(step.settings) == dict(trial.step.settings) for trial in own)
