"""Recommends models of a sweep by use; `rule` chooses the model of the headline.

The best of many models looks too good on the samples that chose it. A sweep with selection samples
(`experiment.samples`) therefore chooses the best, the smallest and the fastest models on these.
These models are assessed as a separate family, without a correction for the other models. For
speed, FP32 is a candidate too.

The samples that choose are the selection samples; without them, the reported samples.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import invocation
from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import no_such_name, or_nearest, printable
from resnet8ptq.evaluation.paired_latency import Blocks, PairedLatency, Ratio, ratio, typical
from resnet8ptq.evaluation.worth import MOST_BYTES, saves
from resnet8ptq.report import rule, timing, verdicts
from resnet8ptq.report.families import Cell, Family, by_run_id, with_verdict
from resnet8ptq.report.rule import SAME_SIZE, SAME_SPEED, Headline, up_to
from resnet8ptq.report.table import VOID, say_size, show_interval
from resnet8ptq.report.verdicts import FAIL, PASS, UNDECIDED, least_of
from resnet8ptq.tasks.scoring.metric import BASELINE, CHOICE, Metric
from resnet8ptq.tasks.scoring.statistics import ROUNDING
from resnet8ptq.tracking.record import RunRecord

# Settings with which a run tunes itself on the selection samples.
TUNED = {"nodes_to_exclude": "auto", "precision.plan": "auto", "method": "qat"}
HALVED = "of the test samples"  # the end of `RunRecord.chosen_by` if test samples choose
CLOSE = 0.05  # sizes, latencies and values of a criterion within 5% count as close
NEAR = 2.0  # paired standard errors; the criterion chooses among models this near to the best
FAMILIAR = 0.02  # FP32 was probably trained on samples where its metric is better by more than this
FINALISTS = 3  # number of the fastest models to time, for one sample and for batches
ALL_TIMED = 8  # up to this number of models, all are timed against each other
RECOMMENDED = "recommended"
BEST = "best"
BALANCED = "balanced"
USES = (RECOMMENDED, BEST, BALANCED, "smallest", "fastest", "fastest_batch")
SINGLE = "fastest, one sample at a time"


@dataclass(frozen=True)
class Recommendation:
    """The choice for one use, and its alternatives.

    Attributes:
        title: the use in words, such as `best accuracy`.
        label: the model in words; for FP32, its name in a timing.
        because: the reason in words.
        choice: the model, with its verdict on the reported samples, see `_assess`; None for FP32,
            which only the uses for speed choose.
        equals: the alternatives to the model.
        equals_mean: the property that makes them alternatives, such as `size within 5%`.
        unknown: models that may be as good as the model; the samples do not decide.
        use: recommended, best, balanced, smallest, fastest, fastest_batch, or best_NAME for a
            backend.
    """

    title: str
    label: str
    because: str
    # Excluded, because arrays do not compare
    choice: Cell | None = field(default=None, compare=False)
    equals: tuple[Cell, ...] = field(default=(), compare=False)
    equals_mean: str = ""
    unknown: tuple[Cell, ...] = field(default=(), compare=False)
    use: str = ""

    @property
    def run(self) -> RunRecord | None:
        """The run of the model, see `choice`; None for FP32."""
        if self.choice is None:
            return None
        return self.choice.record

    @property
    def verdict(self) -> str:
        """The verdict as text; empty for FP32."""
        if self.run is None:
            return ""
        return self.run.verdict_text

    @property
    def command(self) -> str:
        """The deploy command; empty for FP32, and if `RunRecord.deploy_command` is None."""
        if self.run is None:
            return ""
        return self.run.deploy_command or ""


@dataclass(frozen=True)
class ModelSelection:
    """The choice of recommended models among the assessed runs of a family."""

    family: Family  # the assessed runs
    timing: PairedLatency | None = None  # the timing of the finalists, if they were timed

    @property
    def limits(self) -> ReportConfig:
        """The limits by which the models are assessed."""
        return self.family.limits

    @cached_property
    def candidates(self) -> list[Cell]:
        """The models of `_ran` that may be recommended; empty if all of them fail.

        With selection samples, these are all models of `_ran`, because the selection samples judge
        them. Without selection samples, these are only models that do not fail.
        """
        kept = _without_failed(self._ran)
        if kept and self.apart:
            return self._ran
        return kept

    @cached_property
    def apart(self) -> bool:
        """Whether all models of `_ran` were also scored on separate selection samples."""
        return all(cell.choice is not None for cell in self._ran)

    @cached_property
    def _ran(self) -> list[Cell]:
        """The models that this program ran without simulation; if there are none, files for NPUs.

        The list has no model whose FP32 is in doubt, or with an output that no longer depends on
        the sample. It has no steps of a search if the family has other measured runs.
        """
        ran = []
        for_npus = []
        reported = by_run_id(self.family.reported)
        for cell in self.family.models:
            record = cell.record
            is_step = bool(reported) and record.run_id not in reported
            if record.doubt or record.silent or is_step:
                continue
            if record.execution != "simulated":
                ran.append(cell)
            elif record.is_for_npu:
                for_npus.append(cell)
        return ran or for_npus

    @property
    def for_npus(self) -> bool:
        """Whether the candidates are files for NPUs, whose speed is unknown."""
        return any(cell.record.is_for_npu for cell in self.candidates)

    @cached_property
    def passing(self) -> list[Cell]:
        """The candidates that pass on the samples that choose.

        On selection samples, only the loss of each is tested, without a correction for the others.
        """
        if not self.apart:
            return with_verdict(self.candidates, PASS)
        passes = partial(verdicts.passes_to_choose, self.family.metric, limits=self.limits)
        return list(filter(passes, self.candidates))

    @cached_property
    def shown(self) -> list[Cell]:
        """The candidates that are shown to keep the limit.

        These are the models of `passing`, and those of `measured_within` that pass on the reported
        samples, corrected for all models. The selection samples may be too few to decide these.
        """
        shown = by_run_id(self.passing)
        shown.update(by_run_id(with_verdict(self.measured_within, PASS)))
        return _among(shown, self.candidates)

    @cached_property
    def within(self) -> list[Cell]:
        """The models of `shown`; if there are none, those of `measured_within`."""
        return self.shown or self.measured_within

    @cached_property
    def others(self) -> list[Cell]:
        """The undecided models of `measured_within` that save bytes and are not in `within`.

        The list is empty if an undecided model of `within` saves bytes, because then the headline
        does not need others.
        """
        if any(map(_saves_bytes, with_verdict(self.within, UNDECIDED))):
            return []
        within = by_run_id(self.within)
        others = []
        for cell in with_verdict(self.measured_within, UNDECIDED):
            if cell.record.run_id not in within and _saves_bytes(cell):
                others.append(cell)
        return others

    @cached_property
    def measured_within(self) -> list[Cell]:
        """The candidates with a measured loss within the limit, on the samples that choose."""
        loss = partial(_loss, by_selection=self.apart)
        most = self.family.metric.limit(self.limits)
        return up_to(most, self.candidates, loss)

    @cached_property
    def headline(self) -> Headline | None:
        """The choice of `rule`; None if no model of `within` or `others` passes or is undecided.

        The rule chooses among the models of `within` that pass on the reported samples, where
        verdicts are corrected for all models. If none passes, the rule chooses among the undecided
        ones. If it then finds none, or would keep FP32, it chooses again, also among the `others`.
        With selection samples, the reported samples did not choose the undecided model. It is
        therefore also assessed by itself, and a pass in this test counts.
        """
        chosen = self._choose(with_verdict(self.within, PASS))
        if chosen is not None:
            return chosen
        undecided = with_verdict(self.within, UNDECIDED)
        chosen = self._choose(undecided)
        if chosen is None or chosen.advice == "keep":
            chosen = self._choose([*undecided, *self.others])
        if chosen is None or not self.apart:
            return chosen

        # No model passes with the correction for all; the chosen model may pass by itself
        alone = verdicts.assess_losses(Family((chosen.cell,), self.limits)).cells
        if alone[0].record.verdict != PASS:
            return chosen
        return self._choose(alone, alone=True)

    def _choose(self, cells: Sequence[Cell], alone: bool = False) -> Headline | None:
        """Return the choice of `rule` among the cells, or among their finalists, if any.

        Args:
            alone: whether the verdict is that of a model assessed by itself, which the reason says.
        """
        kept = list(cells)
        if self.timing is not None:
            kept = _among(self.timing.single, cells) or kept

        # Convert the cells into the numbers that the rule reads
        fp32_ms = min(map(_baseline_latency, _timed(kept)), default=math.nan)
        ranked = self._rank(kept)
        options = [self._option(cell, ranked, fp32_ms) for cell in kept]
        error = verdicts.margin_of(self.family.metric, self.limits)
        headline = rule.choose(options, self.limits.prefer, error)
        if headline is None or not alone:
            return headline
        reason = f"{headline.reason}; passes by itself, not corrected for the other models"
        return replace(headline, reason=reason, alone=True)

    def _option(self, cell: Cell, ranked: Sequence[Cell], fp32_ms: float) -> rule.Candidate:
        """Return a cell as a candidate of `rule`.

        Args:
            ranked: all cells among which the rule chooses, the best first.
            fp32_ms: latency of the fastest FP32, for runs that were not timed in turns.
        """
        record = cell.record
        ms = record.latency_ms
        passes = record.verdict == PASS
        speed = None
        if self.timing is not None:
            speed = timing.speed(record, self.timing, len(ranked))
        elif ms is not None:  # latencies of separate runs differ by chance
            value = fp32_ms / ms
            speed = Ratio(value, value * (1 - SAME_SPEED), value * (1 + SAME_SPEED))
        # The reported loss may not choose a model that is then assessed by itself.
        loss = _loss(cell, by_selection=self.apart and not passes)
        return rule.Candidate(
            key=record.run_id,
            cell=cell,
            passes=passes,
            loss=_or_worst(loss),
            rank=ranked.index(cell),
            size_bytes=_or_worst(_bytes(cell)),
            fp32_bytes=cell.metric(f"{BASELINE}size_bytes"),
            latency_ms=ms,
            speed=speed,
        )

    def _rank(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells in the order in which `best` chooses them."""
        # No sort, because the criterion may make the best model depend on the others
        left = list(cells)
        ranked = []
        while left:
            ranked.append(self.best(left))
            left.remove(ranked[-1])
        return ranked

    @cached_property
    def recommendations(self) -> "list[Recommendation]":
        """The result of `recommend`."""
        return recommend(self)

    @property
    def on_selection(self) -> bool:
        """Whether the family has steps of a search, and no model in `Family.reported`."""
        is_step = any(cell.record.split == "choice" for cell in self.family.cells)
        return is_step and not self.family.reported

    @cached_property
    def criterion(self) -> Metric | None:
        """The task's criterion; None unless all models have its value on selection samples.

        See `Task.criterion`.
        """
        criterion = self.family.task.criterion
        if criterion is None or not self.apart:
            return None
        for cell in self._ran:
            if CHOICE + criterion.name not in cell.record.metrics:
                return None
        return criterion

    def best(self, cells: Sequence[Cell], reported: bool = False) -> Cell:
        """Return the best of `cells` by the metric on the samples that choose.

        On the selection samples, the `criterion`, if any, chooses among the models near the best
        one. Among equal models, those slower than the fastest by more than `SAME_SPEED` drop out,
        and the smallest of the others is chosen. A model without a latency does not drop out.

        Args:
            reported: whether to choose on the reported samples, even if there are selection
                samples.
        """
        metric = self.family.metric
        name = metric.ranked_by
        if self.apart and not reported:
            name = CHOICE + name

        def cost(cell: Cell) -> float:
            return _or_worst(metric.cost(cell.metric(name)))

        # Find the best ones
        least = min(map(cost, cells))
        equals = up_to(least + ROUNDING, cells, cost)
        if self.criterion and not reported:
            equals = self._best_by_criterion(self.criterion, equals[0], cells)

        # Choose the smallest of those that are not slower
        slowest = min(map(_latency, _timed(equals)), default=math.inf) * (1 + SAME_SPEED)
        # Keep runs without a latency, which are not known to be slower
        fast = [cell for cell in equals if not _latency(cell) > slowest]
        return min(fast, key=_bytes)

    def _best_by_criterion(
        self, criterion: Metric, first: Cell, cells: Sequence[Cell]
    ) -> list[Cell]:
        """Return the models near the best one, `first`, with about the least criterion.

        A near model is at most `NEAR` standard errors worse than the best one. The least criterion
        is taken over the best model and the near ones.
        """
        metric = self.family.metric
        near = [first]
        for cell in cells:
            if cell is not first and verdicts.is_near(first, cell, metric, errors=NEAR):
                near.append(cell)

        def value(cell: Cell) -> float:
            return _or_worst(cell.metric(CHOICE + criterion.name))

        least = min(map(value, near))
        return up_to(least * (1 + CLOSE) + ROUNDING, near, value)


def _or_worst(cost: float) -> float:
    """Return a cost, with infinity in place of NaN, so that the model ranks last."""
    return math.inf if math.isnan(cost) else cost


def _saves_bytes(cell: Cell) -> bool:
    return saves(_bytes(cell), cell.metric(f"{BASELINE}size_bytes"))


def finalists(selected: ModelSelection) -> list[Cell]:
    """Return the models to time against each other and FP32.

    The list is empty if no model of `within` or `others` has a latency, because only these can be
    recommended as the fastest or in the headline. If at most `ALL_TIMED` candidates have a latency,
    all of these are timed, to fill the table's column.
    """
    timed = _timed([*selected.within, *selected.others])
    if not timed:
        return []
    for models in (_timed(selected.candidates), timed):
        if len(models) <= ALL_TIMED:
            return models

    # Of many models, time those that a use or the rule may choose
    least = min(map(_bytes, timed))
    smallest = up_to(least * (1 + SAME_SIZE), timed, _bytes)
    small = up_to(least / MOST_BYTES, timed, _bytes)
    chosen = [selected.best(timed), selected.best(smallest)]  # `_smallest` may choose
    chosen.append(min(small, key=_latency))  # `rule` may choose it
    chosen += sorted(timed, key=_latency)[:FINALISTS]
    chosen += sorted(timed, key=_batch_latency)[:FINALISTS]
    return list(by_run_id(chosen).values())


def families_of(chosen: Iterable[ModelSelection]) -> list[Family]:
    """Return the family of each selection."""
    return [selected.family for selected in chosen]


def why_none(selected: ModelSelection) -> list[str]:
    """Return sentences on why no model is recommended, and on remedies."""
    if selected.on_selection:
        return ["These are the selection samples; only the reported samples can recommend a model."]
    family = selected.family
    limits = selected.limits
    metric = family.metric
    measured = family.measured
    least = least_of(metric, limits)
    if all(cell.record.doubt for cell in measured):
        return [
            "FP32 is not shown to be better than chance, or is below report.expected_accuracy. "
            "Every verdict is void, and no model is recommended. Check preprocess, the order of "
            "the classes and model.path."
        ]

    # Name the limits, and say whether FP32 keeps the smallest accepted value
    asked = metric.show_limit(limits)
    if least is not None:
        asked += f", report.{metric.least}={least:g}"
    lines = [f"No deployable model is within the limits ({asked}); simulated runs do not count."]
    fp32_values = {cell.metric(f"{BASELINE}{metric.name}") for cell in measured}
    for value in sorted(fp32_values):
        if least is not None and metric.cost(value) > metric.cost(least):
            lines.append(f"FP32 itself has {metric.show(value)}, less than report.{metric.least}.")

    remedy = say_remedy(measured)
    if remedy:
        lines.append(remedy)
    return lines


def say_remedy(measured: Sequence[Cell]) -> str:
    """Return sentences with settings that may reduce the loss.

    The text is empty if the loss of any model passes or is undecided, or if all files come from
    other programs.
    """
    losses = set()
    has_settings = False
    finer = "per_channel=true, "
    for cell in measured:
        losses.add(cell.record.loss_verdict)
        if not cell.record.combination.path:
            has_settings = True
        if cell.record.combination.per_channel:  # scales per channel were tried already
            finer = ""

    # Only a sweep in which no model may pass needs a remedy
    if not has_settings or not losses <= {FAIL, VOID}:
        return ""
    return (
        f"To reduce the loss, try {finer}another calibration (calib=), or nodes_to_exclude=auto, "
        "which keeps layers in float. To find the cause, run +analysis=diagnose."
    )


def recommend(selected: ModelSelection) -> list[Recommendation]:
    """Return a recommendation for each use that has one; empty without candidates.

    The list is also empty for steps of a search without a reported run. The uses balanced,
    smallest, fastest and fastest_batch choose among the models of `ModelSelection.within`, and are
    left out without them.
    """
    candidates = selected.candidates
    if not candidates or selected.on_selection:
        return []

    # Recommend the headline's model and the best one; the first model in the list leads the report
    title = selected.family.metric.title
    best = _best(selected, f"best {title}", candidates)
    uses = {}
    chosen = selected.headline
    if chosen:
        uses[RECOMMENDED] = _to_recommendation(RECOMMENDED, chosen.cell, chosen.reason)
    uses[BEST] = best

    # Recommend for the other uses among the models within the limit
    if selected.within:
        balanced = _balanced(selected, best)
        if balanced:
            uses[BALANCED] = balanced
        uses["smallest"] = _smallest(selected)
        timed = selected.timing
        if timed is not None and _among(timed.single, selected.within):
            uses["fastest"] = _fastest(selected, SINGLE, timed.single)
            if timed.batch:
                batches = f"fastest, {timed.batch_size} samples at a time"
                uses["fastest_batch"] = _fastest(selected, batches, timed.batch)
        elif _timed(selected.within):
            uses["fastest"] = _fastest_of_runs(selected)

    # Recommend the best model of each backend, if there are several
    by_backend: dict[str, list[Cell]] = {}
    for cell in candidates:
        by_backend.setdefault(cell.record.backend, []).append(cell)
    if len(by_backend) > 1:
        for backend, members in sorted(by_backend.items()):
            uses[f"best_{backend}"] = _best(selected, f"best {title} in {backend}", members)
    named = [replace(recommended, use=use) for use, recommended in uses.items()]
    return _assess(selected, named)


def find_use(
    use: str, recommended: Sequence[Recommendation], sweep_id: str, nothing: str = ""
) -> tuple[RunRecord, str]:
    """Return the run that a sweep recommends for a use, and the reason.

    Args:
        sweep_id: the id of the sweep, for messages.
        nothing: the reason why the sweep recommends no run at all, with the mend.

    Raises:
        ConfigError: for the use, the sweep recommends no run, FP32 itself, or several runs.
    """
    uses = []  # the uses with a run, for messages
    chosen = []
    for model in recommended:
        if model.run is not None and model.use not in uses:
            uses.append(model.use)
        if model.use == use:
            chosen.append(model)

    # Refuse a use without exactly one run
    if len(chosen) > 1:
        raise ConfigError(
            f"use: sweep {sweep_id} recommends a run for each of {len(chosen)} sets of samples; "
            "try run_id="
        )
    if not uses:
        check_use(use)
        raise ConfigError(f"use: sweep {sweep_id} recommends no run: {nothing}")
    if not chosen:
        raise ConfigError(
            f"use: got {use!r}, for which sweep {sweep_id} recommends no run; try "
            f"{or_nearest(use, uses)}"
        )
    run = chosen[0].run
    if run is None:
        raise ConfigError(
            f"use: for {use!r} sweep {sweep_id} recommends {printable(chosen[0].label)}, the "
            f"network itself, and no quantized run; try {' | '.join(uses)}"
        )
    return run, chosen[0].because


def check_use(use: str) -> None:
    """Raise `ConfigError` if no sweep could have a recommendation for a use."""
    of_backends = [f"best_{name}" for name in find_backends()]
    known = [*USES, *of_backends]
    if use not in known:
        raise ConfigError(no_such_name("use", use, known))


def find_recommendation(use: str, recommended: Sequence[Recommendation]) -> Recommendation | None:
    """Return the first recommendation for a use; None without one."""
    for model in recommended:
        if model.use == use:
            return model
    return None


def own_family(selected: ModelSelection, chosen: Sequence[Recommendation]) -> Family:
    """Return the recommended models that the selection samples chose; empty without such samples.

    A verdict on these models needs a correction for them only, because the reported samples did
    not choose them.
    """
    if not selected.apart:
        return Family((), selected.limits)
    cells = {}
    for recommended in chosen:
        cell = recommended.choice
        # Whether the reported samples chose
        is_reported = recommended.use in (RECOMMENDED, BALANCED)
        if cell is not None and not is_reported:
            cells[cell.record.run_id] = cell
    return Family(tuple(cells.values()), selected.limits)


def _assess(selected: ModelSelection, chosen: Sequence[Recommendation]) -> list[Recommendation]:
    """Return the recommendations; models of `own_family` get verdicts corrected for them only.

    The verdict of another model stays corrected for all models, because the reported samples chose
    it. The verdict of `RECOMMENDED` stays that of `ModelSelection.headline`.
    """
    own = verdicts.assess_losses(own_family(selected, chosen))
    assessed = by_run_id(own.cells)
    result = []
    for recommended in chosen:
        cell = recommended.choice
        if cell is not None and recommended.use != RECOMMENDED:
            recommended = replace(recommended, choice=assessed.get(cell.record.run_id, cell))
        result.append(recommended)
    return result


def other_choice(selected: ModelSelection) -> list[str]:
    """Return sentences on the samples that choose, and on the choice by the reported samples.

    The list is empty without candidates.
    """
    metric = selected.family.metric
    if not selected.candidates:
        return []
    if not selected.apart:
        return [
            "The best models are chosen on the reported samples; their results are probably too "
            "good."
        ]

    # Name the samples that choose, and how the criterion decides
    ours = selected.best(selected.candidates)
    theirs = selected.best(selected.candidates, reported=True)
    samples = ours.record.chosen_by or "other samples"
    lines = [f"The best are chosen on {samples}, which the reported figures do not use."]
    criterion = selected.criterion
    if criterion:
        lines.append(
            f"Among the models within {NEAR:g} paired standard errors of the best {metric.title}, "
            f"the one with the outputs closest to FP32's is chosen (lowest {criterion.title}), "
            f"because {criterion.title} varies less from sample to sample."
        )

    # Compare FP32 on the two sets of samples
    chosen = ours.metric(f"{CHOICE}{BASELINE}{metric.name}")
    reported = ours.metric(f"{BASELINE}{metric.name}")
    if metric.bounded and metric.cost(reported) - metric.cost(chosen) > FAMILIAR:
        lines.append(
            f"FP32 has {metric.show(chosen)} on the selection samples and "
            f"{metric.show(reported)} on the reported ones. It was probably trained on the "
            "selection samples, so the loss on them may be smaller or larger."
        )
    if any(_is_tuned(cell.record) for cell in selected.candidates):
        lines.append(
            "Runs with nodes_to_exclude=auto, precision.plan=auto or method=qat tuned their "
            "settings on the selection samples, so these samples favour those runs."
        )
    if selected.family.stopped:
        return lines

    # Name the choice that the reported samples would make
    if ours is theirs:
        lines.append("The reported samples would give the same choice.")
    else:
        lines.append(
            f"On the reported samples the best is {theirs.label}: {_show(metric, theirs)}. This "
            "result is probably too good, because the same samples would choose the model and "
            "score it."
        )
    return lines


def _is_tuned(record: RunRecord) -> bool:
    """Return whether a run tuned its settings on the selection samples."""
    if record.chosen_by.endswith(HALVED):  # a run tunes its settings on training samples
        return False
    return not TUNED.items().isdisjoint(record.params.items())


def _show(metric: Metric, cell: Cell) -> str:
    value = metric.show(cell.metric(metric.name))
    fair = metric.show(cell.metric(metric.ranked_by))
    if fair != value:
        value += f" ({fair} with ties at the top broken at random)"
    return value


def _best(selected: ModelSelection, use: str, cells: Sequence[Cell]) -> Recommendation:
    metric = selected.family.metric
    best = selected.best(cells)
    why = _show(metric, best)
    delta = best.record.delta(metric)
    if delta is not None:
        why += f", against FP32 {metric.say_change(delta)}"
        interval = show_interval(metric, best.record)
        if interval:
            why += f", 95% interval {interval}"
    if selected.apart:
        why += f"; {metric.show(best.metric(CHOICE + metric.name))} on the selection samples"
        criterion = selected.criterion
        if criterion:
            why += f", {criterion.title} {criterion.show(best.metric(CHOICE + criterion.name))}"

    # Find models that may replace the best one
    others = _without(best, cells)
    good, unknown = verdicts.as_good_as(best, others, metric=metric, limits=selected.limits)
    recommended = _to_recommendation(
        use, cell=best, why=why, equals=good, equals_mean=f"shown to be {say_margin(selected)}"
    )
    return replace(recommended, unknown=tuple(unknown))


def say_margin(selected: ModelSelection) -> str:
    """Return the non-inferiority margin against the best model as text, see `Metric.say_margin`."""
    metric = selected.family.metric
    return metric.say_margin(verdicts.margin_of(metric, selected.limits))


def _balanced(selected: ModelSelection, best: Recommendation) -> Recommendation | None:
    """Choose the smallest of the best model and those proven to be as good, within the limit.

    Among equally small models, the fastest is chosen. Returns None if `ModelSelection.within` has
    none of them, or only models that fail. The test of being as good uses the reported samples. It
    is corrected for all models, so it also holds for the chosen model.
    """
    assert best.choice is not None  # only the fastest use may choose FP32
    within = by_run_id(_without_failed(selected.within))
    members = _among(within, [best.choice, *best.equals])
    if not members:
        return None

    # Choose the fastest of the smallest models
    least = min(map(_bytes, members))
    small = up_to(least * (1 + SAME_SIZE), members, _bytes)
    chosen = min(small, key=lambda cell: cell.record.latency_ms or math.inf)
    if chosen is best.choice:
        why = f"no model more than {SAME_SIZE:.1%} smaller is shown to be {say_margin(selected)}"
    else:
        metric = selected.family.metric
        value = metric.show(chosen.metric(metric.name))
        best_kb = _bytes(best.choice) / 1000
        why = f"{_bytes(chosen) / 1000:.1f} kB, the best has {best_kb:.1f} kB; "
        why += f"{value}, shown to be {say_margin(selected)}"
    return _to_recommendation(
        BALANCED,
        cell=chosen,
        why=why,
        equals=_without(chosen, members),
        equals_mean=f"shown to be {say_margin(selected)}",
    )


def _smallest(selected: ModelSelection) -> Recommendation:
    metric = selected.family.metric
    least = min(map(_bytes, selected.within))
    best = selected.best(up_to(least * (1 + SAME_SIZE), selected.within, _bytes))
    value = metric.show(best.metric(metric.name))
    why = f"{say_size(_bytes(best), best.record.size_reduction)}, at {value}"

    # Name smaller models that are not within the limit
    left_out = []
    for cell in selected.candidates:
        if _bytes(cell) < _bytes(best) and cell not in selected.within:
            left_out.append(cell)
    if left_out:
        smaller = min(left_out, key=_bytes)
        samples = "selection" if selected.apart else "reported"
        fault = "its loss exceeds the limit"
        if smaller in selected.measured_within:
            fault = "does not pass"
        smaller_kb = _bytes(smaller) / 1000
        why += f"; {smaller.label} is smaller ({smaller_kb:.1f} kB), but {fault} on the {samples} "
        why += "samples"
    close = up_to(_bytes(best) * (1 + CLOSE), _without(best, selected.within), _bytes)
    return _to_recommendation(
        "smallest", cell=best, why=why, equals=close, equals_mean=f"size within {CLOSE:.0%}"
    )


def _fastest(selected: ModelSelection, use: str, times: Mapping[str, Blocks]) -> Recommendation:
    """Choose the fastest model within the limit, or FP32, by latencies measured in turns.

    Args:
        use: the title of the recommendation.
        times: the latencies of models by run id, and of FP32 by name.
    """
    cells = by_run_id(_among(times, selected.within))
    ms = {name: typical(blocks) for name, blocks in times.items()}
    fp32 = timing.fastest_fp32(times)
    model = min(cells, key=ms.__getitem__)
    speedup = ratio(times[model], times[fp32], len(cells))  # the model is the best of several

    # FP32 itself may be the fastest
    if speedup.value < 1:
        samples = " on the selection samples" if selected.apart else ""
        why = (
            f"{ms[fp32]:.3f} ms, timed in turns; the fastest model within the limit{samples} is "
            f"{cells[model].label}, {speedup}; {_to_try()}"
        )
        return Recommendation(use, fp32, why)
    why = f"{ms[model]:.3f} ms, timed in turns; {speedup} as {fp32}, the fastest FP32"
    if not speedup.faster:
        why += ": not significantly faster"

    # Find models that may be as fast
    equals = []
    for name, cell in cells.items():
        is_slower = ratio(times[model], times[name], len(cells)).faster
        if name != model and not is_slower:
            equals.append(cell)
    return _to_recommendation(
        use, cell=cells[model], why=why, equals=equals, equals_mean="not significantly slower"
    )


def _fastest_of_runs(selected: ModelSelection) -> Recommendation:
    """Choose the fastest model within the limit, or FP32, by the latencies of separate runs."""
    timed = _timed(selected.within)
    best = min(timed, key=_latency)
    fp32 = min(timed, key=_baseline_latency)
    apart = "measured in different runs, at different times"

    # FP32 itself may be the fastest
    if _baseline_latency(fp32) <= _latency(best):
        why = f"{_baseline_latency(fp32):.3f} ms; no model within the limit is faster; {_to_try()}"
        return Recommendation(SINGLE, timing.fp32_name(fp32.record), f"{why} ({apart})")
    times = _baseline_latency(fp32) / _latency(best)
    name = timing.fp32_name(fp32.record)
    why = f"{_latency(best):.3f} ms, {times:.2f} times as fast as {name} ({apart})"
    close = up_to(_latency(best) * (1 + CLOSE), _without(best, timed), _latency)
    return _to_recommendation(
        SINGLE, cell=best, why=why, equals=close, equals_mean=f"latency within {CLOSE:.0%}"
    )


def _without(left_out: Cell, cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells except `left_out`."""
    return [cell for cell in cells if cell is not left_out]


def _to_recommendation(
    use: str, cell: Cell, why: str, equals: Sequence[Cell] = (), equals_mean: str = ""
) -> Recommendation:
    """Return the recommendation of a model, with its alternatives."""
    return Recommendation(
        use, cell.label, because=why, choice=cell, equals=tuple(equals), equals_mean=equals_mean
    )


def _without_failed(cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.record.verdict != FAIL]


def _among(run_ids: Collection[str], cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells of these runs."""
    return [cell for cell in cells if cell.record.run_id in run_ids]


def _timed(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.record.latency_ms is not None]


def _loss(cell: Cell, by_selection: bool) -> float:
    """Return the loss against FP32 in the unit of the limit; NaN if it was not measured."""
    name = "drop"
    if by_selection:
        name = f"{CHOICE}drop"
    return cell.metric(name)


def _bytes(cell: Cell) -> float:
    return cell.metric("size_bytes")


def _latency(cell: Cell) -> float:
    return cell.metric("latency_p50_ms")


def _batch_latency(cell: Cell) -> float:
    return cell.metric("latency_batch_p50_ms")


def _baseline_latency(cell: Cell) -> float:
    return cell.metric(f"{BASELINE}latency_p50_ms")


def _to_try() -> str:
    advise = invocation.command("advise")
    return f"try {advise}, +analysis=profile, another framework, format or dtype"
