"""`task=agreement`: without labels, the share of samples with FP32's top-1 class."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from resnet8ptq.core.errors import ModelError
from resnet8ptq.tasks import classification
from resnet8ptq.tasks.classification import KL, OfClasses
from resnet8ptq.tasks.deviation import SQNR, summarize
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Array, Outputs, Targets, TaskContext, describe
from resnet8ptq.tasks.scoring.values import PairedTest
from resnet8ptq.tasks.task import Joining, Reference, Task, TaskFiles, TaskType

AGREEMENT_RATE = Metric("agreement", "agreement", percent=True)
# An answer is lost only if the class changes, so the accuracy lost is at most 1 - agreement.
NOTE = (
    "Without labels: the accuracy lost is at most the share of changed classes, so a pass also "
    "proves that loss of accuracy. The bound is conservative, because a changed class may have "
    "been wrong before. The accuracy of FP32 itself was not measured."
)
TEST = PairedTest(
    "exact McNemar test of the samples that agree with FP32, between two runs",
    "95% Wilson score intervals",
    partial(Hits.read, labels="baseline_predictions"),
    sequential=True,
)


@dataclass(frozen=True)
class AgreementScores(OfClasses):
    """The classes of one model, with FP32's classes as labels."""

    @property
    def per_sample(self) -> Hits:
        """The class of each sample, which is right if it agrees with the class of FP32."""
        return self.classes.per_sample

    @property
    def value(self) -> float:
        """The fraction of samples that agree with FP32."""
        return self.classes.value


def _score(outputs: Outputs, targets: Targets) -> AgreementScores:
    """Use the classes as their own labels; `_rescore` replaces the labels by FP32's classes."""
    classes = classification.score(outputs, Targets(np.zeros(len(outputs), np.int64)))
    return AgreementScores(replace(classes, labels=classes.per_sample.predictions))


def _rescore(model: AgreementScores, baseline: AgreementScores) -> AgreementScores:
    return AgreementScores(replace(model.classes, labels=baseline.classes.per_sample.predictions))


def _pair_metrics(comparison: Comparison) -> Metrics:
    kl_divergence = comparison.model.classes.kl_divergence(comparison.baseline.classes)
    return {"kl_divergence": kl_divergence, "sqnr_db": comparison.sqnr_db}


def _keep(comparison: Comparison) -> dict[str, Array]:
    return {name: array for name, array in comparison.paired.arrays().items() if name != "labels"}


def _make(context: TaskContext) -> Task:
    if (context.classes or 0) < 2:
        raise ModelError(
            f"returns {describe(context.outputs)}; task=agreement takes one output, a value for "
            "each class; task=deviation compares values of any kind"
        )
    return build()


def build() -> Task:
    """Return the task for a network with a value for each class."""
    return Task(
        "agreement",
        AGREEMENT_RATE,
        _score,
        TEST,
        criterion=KL,
        beside=(KL, SQNR),
        pair_metrics=_pair_metrics,
        reference=Reference(_rescore, NOTE),
        files=TaskFiles(arrays=_keep),
        joining=Joining(classification.to_probabilities, classification.vote),
        summary=summarize,
    )


AGREEMENT = TaskType(
    make=lambda config, context: _make(context), recall=lambda config, class_names: build()
)
