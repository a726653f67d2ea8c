"""The result of a profile: time by operator, cost of conversions, and a conclusion."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resnet8ptq.backends.contract import NodeTime
from resnet8ptq.evaluation.latency import ModelLatency
from resnet8ptq.evaluation.result import RunResult


@dataclass(frozen=True)
class OperatorTimes:
    """An operator's nodes in the model and in FP32: their number and total ms for a batch."""

    name: str
    fp32_ms: float = 0
    fp32_count: int = 0
    ms: float = 0
    count: int = 0


@dataclass(frozen=True)
class Breakdown:
    """The node times of a model and of its FP32 baseline, in order of execution.

    Attributes:
        batch_size: batch size; all times are milliseconds for a batch.
        ms, fp32_ms: medians of whole runs without the profiler, which itself takes time.
    """

    batch_size: int
    model: Sequence[NodeTime]
    fp32: Sequence[NodeTime]
    ms: float
    fp32_ms: float

    def operators(self) -> list[OperatorTimes]:
        """Return the time of each operator, the longest first."""
        fp32 = _times_by_operator(self.fp32)
        model = _times_by_operator(self.model)
        operators = []
        for name in fp32 | model:
            times = OperatorTimes(
                name,
                fp32_ms=sum(fp32.get(name, [])),
                fp32_count=len(fp32.get(name, [])),
                ms=sum(model.get(name, [])),
                count=len(model.get(name, [])),
            )
            operators.append(times)
        return sorted(operators, key=lambda operator: -max(operator.ms, operator.fp32_ms))

    def total_ms(self, *kinds: str) -> float:
        """Return the time of the model's nodes of these kinds; without arguments, of all nodes."""
        if not kinds:
            return sum_ms(self.model)
        return sum_ms(node for node in self.model if node.kind in kinds)

    def count(self, kind: str) -> int:
        """Return the number of the model's nodes of a kind."""
        return sum(node.kind == kind for node in self.model)

    @property
    def conversions_ms(self) -> float:
        """Time of the nodes that only change the type or the layout of a tensor."""
        return self.total_ms("conversion")

    @property
    def saved_ms(self) -> float:
        """Time of FP32's nodes minus that of the model's, both without conversions."""
        fp32 = sum_ms(node for node in self.fp32 if node.kind != "conversion")
        return fp32 - (self.total_ms() - self.conversions_ms)

    def conclude(self) -> str:
        """Return two sentences about the model's speed and its causes."""
        ratio = self.fp32_ms / self.ms
        first = (
            f"Batch {self.batch_size}: {self.ms:.3f} ms quantized, {self.fp32_ms:.3f} ms in FP32: "
            f"{ratio:.2f} times FP32's speed."
        )

        # Compare the gain of the operators with the cost of conversions
        saved = self.saved_ms
        cost = self.conversions_ms
        if saved <= 0:
            second = (
                f"Even without conversions the operators take {-saved:.3f} ms more, and "
                f"conversions cost {cost:.3f} ms"
            )
        else:
            share = "more than" if cost > saved else f"{cost / saved:.0%} of"
            second = (
                f"Without conversions the operators take {saved:.3f} ms less; conversions cost "
                f"{cost:.3f} ms, {share} that gain"
            )

        # Name the nodes that stay in float between conversions
        unfused = Counter(node.operator for node in self.model if node.kind == "unfused")
        if unfused:
            listed = ", ".join(f"{name} {count}" for name, count in unfused.items())
            second += (
                f"; {self.total_ms('unfused'):.3f} ms are spent in float between conversions, "
                f"where integer kernels were expected: {listed}"
            )
        return f"{first} {second}."

    def to_metrics(self, infix: str) -> dict[str, float]:
        """Return the times of conversions, of integer and float nodes, and of each operator.

        The saved time is a metric, too. All keys are metric names without the prefix `profile/`.

        Args:
            infix: part of each name, which tells batch sizes apart.
        """
        metrics = {
            f"conversions{infix}_ms": self.conversions_ms,
            f"integer{infix}_ms": self.total_ms("integer"),
            f"float{infix}_ms": self.total_ms("float", "unfused"),
            f"saved{infix}_ms": self.saved_ms,
        }
        for operator in self.operators():
            name = re.sub(r"[^\w.-]+", "_", operator.name)  # MLflow allows only these characters
            if operator.count:
                metrics[f"operator{infix}_ms/{name}"] = operator.ms
            if operator.fp32_count:
                metrics[f"fp32_operator{infix}_ms/{name}"] = operator.fp32_ms
        return metrics


@dataclass(frozen=True, kw_only=True)
class ProfileResult(RunResult):
    """The time of each operator at batch 1 and, if the network allows it, in batches.

    Attributes:
        latency: latency of whole runs, without the profiler.
    """

    breakdowns: tuple[Breakdown, ...]
    latency: ModelLatency

    def summary(self) -> str:
        """Return the conclusion at batch 1."""
        return self.breakdowns[0].conclude()

    def to_metrics(self) -> dict[str, float]:
        """Return every metric under its MLflow name."""
        metrics = self.latency.to_metrics()
        for infix, breakdown in zip(("", "_batch"), self.breakdowns, strict=False):
            metrics |= breakdown.to_metrics(infix)
        metrics["unfused_nodes"] = self.breakdowns[0].count("unfused")
        return {f"profile/{key}": float(value) for key, value in metrics.items()}


def sum_ms(nodes: Iterable[NodeTime]) -> float:
    """Return the total time of the nodes, in ms for a batch."""
    return sum(node.ms for node in nodes)


def _times_by_operator(nodes: Sequence[NodeTime]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for node in nodes:
        times.setdefault(node.operator, []).append(node.ms)
    return times
