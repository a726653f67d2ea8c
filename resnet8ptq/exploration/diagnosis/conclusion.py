"""The result of a diagnosis: measurements, findings, and the outcomes of changed settings."""

import json
import math
from dataclasses import dataclass

from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.exploration.diagnosis.outcomes import Outcome
from resnet8ptq.exploration.tensors.comparing import TensorComparison
from resnet8ptq.exploration.tensors.findings import Finding, to_entries
from resnet8ptq.tasks.scoring.metric import Metric

WEIGHTS = "weights"
ACTIVATIONS = "activations"
MORE_DB = 3.0  # twice the noise power


@dataclass(frozen=True)
class Halves:
    """The outcomes of rounding only the weights, and of rounding only the activations."""

    weights: Outcome
    activations: Outcome
    per_channel: bool  # the diagnosed setting

    @property
    def costs_more(self) -> str:
        """`WEIGHTS` or `ACTIVATIONS`; empty if they cost about the same."""
        apart = self.activations.sqnr_db - self.weights.sqnr_db
        if apart >= MORE_DB:
            return WEIGHTS
        if apart <= -MORE_DB:
            return ACTIVATIONS
        return ""

    def say(self) -> str:
        """Return a sentence on the larger cost and its remedies."""
        alone = (
            f"rounding the weights alone leaves {self.weights.sqnr_db:.1f} dB, the activations "
            f"alone {self.activations.sqnr_db:.1f} dB"
        )
        if self.costs_more == WEIGHTS:
            finer = "" if self.per_channel else "per_channel=true and "
            return f"larger cost: the weights: {alone}; {finer}corrections may win that back"
        if self.costs_more == ACTIVATIONS:
            return (
                f"larger cost: the activations: {alone}; learned rounding does not change that; "
                "calib=, equalization, layers in float or method=qat may win it back"
            )
        return f"larger cost: none, both cost alike: {alone}"


@dataclass(frozen=True, kw_only=True)
class DiagnosisResult(RunResult):
    """Measurements, findings, and the outcomes of the changes to try.

    Attributes:
        compared: the tensors of the file, compared with those of the network before quantization.
        findings: all findings, including those without an effect on accuracy.
        outcomes: the outcomes of the changes, the best first, see `outcomes.attempt`. The removal
            of outlying calibration samples comes first if it helps, else last.
        before: the outcome of the unchanged settings.
        halves: the outcomes with only weights or only activations rounded; None if the file does
            not give its weights.
        metric: the task's metric; `fp32_value` is its value for FP32.
        samples: number of scored held-out samples.
        notes: notes on the format of the diagnosed file.
    """

    compared: TensorComparison
    findings: tuple[Finding, ...]
    outcomes: tuple[Outcome, ...]
    before: Outcome
    halves: Halves | None
    metric: Metric
    fp32_value: float
    samples: int
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Outcome | None:
        """The first outcome of a change that helps; None if none helps."""
        for outcome in self.outcomes:
            if outcome.helps:
                return outcome
        return None

    def answer(self, finding: Finding) -> Outcome | None:
        """Return the best outcome of a finding's changes; None if none of them was tried."""
        words = {change.words for change in finding.changes}
        for outcome in self.outcomes:
            if outcome.words in words and not outcome.reason:
                return outcome
        return None

    def costs(self, finding: Finding) -> bool:
        """Return whether a finding costs accuracy: it is certain, or one of its changes helps."""
        answer = self.answer(finding)
        return finding.certain or (answer is not None and answer.helps)

    @property
    def reasons(self) -> list[Finding]:
        """The findings that cost accuracy: certain ones first, then by gain, the largest first."""

        def rank(finding: Finding) -> float:
            answer = self.answer(finding)
            if finding.certain or answer is None:
                return -math.inf
            return -answer.won_db

        return sorted(filter(self.costs, self.findings), key=rank)

    @property
    def conclusion(self) -> list[str]:
        """The faults, the cost of weights and activations, and the best change, in lines."""
        lines = []
        for finding in self.reasons:
            lines.append(f"fault: {finding.say()}{self._say_answer(finding)}")
        if not lines:
            lines.append(self._nothing())
        if self.halves:
            lines.append(self.halves.say())
        lines.append(self._help())
        return lines

    def _say_answer(self, finding: Finding) -> str:
        answer = self.answer(finding)
        if answer is None or not answer.helps:
            return ""
        return f"; {answer.words} fixes it ({answer.won_db:+.1f} dB)"

    def _nothing(self) -> str:
        metric = self.metric
        before = self.before
        return (
            f"no single cause: no tensor stands out; {metric.title} {metric.show(before.value)}, "
            f"FP32 {metric.show(self.fp32_value)}, SQNR {before.sqnr_db:.1f} dB"
        )

    def _help(self) -> str:
        where = f"{self.samples:,} held-out samples"
        if self.best is None:
            return f"best change: none of the {len(self.outcomes)} changes tried helps on {where}"
        gain = self.best.say(self.before, self.metric)
        title = "best change" if self._best_gains_most else "change to make first"
        return f"{title}: {self.best.words} (measured: {gain}; {where})"

    @property
    def _best_gains_most(self) -> bool:
        """Whether no other change that helps gains more dB than `best`.

        Another may gain more, because the removal of outliers comes first if it helps.
        """
        assert self.best is not None
        helping = [outcome.won_db for outcome in self.outcomes if outcome.helps]
        return self.best.won_db == max(helping)

    def to_json(self) -> str:
        """Return the findings as JSON, with the changes that may help."""
        return json.dumps(to_entries(self.findings))

    def summary(self) -> str:
        """Return the faults and the best change in one line.

        Without outcomes of changes, the line names all findings, and the costs of `halves`.
        """
        if not self.outcomes:
            names = ", ".join(finding.name for finding in self.findings) or "no single cause"
            if self.halves is None:
                return names
            return f"{names}; {self.halves.say()}"
        faults = ", ".join(f"{finding.name} in {finding.tensors[0]}" for finding in self.reasons)
        helps = "no change that was tried helps"
        if self.best is not None:
            rank = "helps most" if self._best_gains_most else "comes first"
            helps = f"{self.best.words} {rank}"
        return f"{faults or 'no single cause'}; {helps}"

    def to_metrics(self) -> dict[str, float]:
        """Return every finite metric under its MLflow name."""
        name = self.metric.name
        before = self.before
        metrics: dict[str, float] = {
            "images": self.samples,
            "findings": len(self.reasons),
            name: before.value,
            f"fp32_{name}": self.fp32_value,
            "sqnr_db": before.sqnr_db,
        }
        if self.halves is not None:
            metrics["weights_alone_sqnr_db"] = self.halves.weights.sqnr_db
            metrics["activations_alone_sqnr_db"] = self.halves.activations.sqnr_db
        for outcome in self.outcomes[:1]:
            metrics |= {f"best_{name}": outcome.value, "best_sqnr_db": outcome.sqnr_db}

        # The SQNR of an output that did not change is infinite, which no store can keep.
        finite = {}
        for key, value in metrics.items():
            if math.isfinite(value):
                finite[f"diagnosis/{key}"] = float(value)
        return finite
