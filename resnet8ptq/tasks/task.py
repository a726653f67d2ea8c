"""A task: a metric, a score, a paired test, and additions to the record and files of a run.

    outputs, targets --score--> Scores;  Scores of model and baseline --compare--> Comparison

Evaluation, report, search and sensitivity analysis use this interface, so that they work with any
metric. `registry` finds a task by name; `top5` is a small example of a task.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resnet8ptq.config.schema import TaskConfig
from resnet8ptq.core import files
from resnet8ptq.tasks.scoring.comparison import Comparison, Scores, summarize
from resnet8ptq.tasks.scoring.distortion import is_silent, split_units
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.metric import BASELINE, TOTAL, Metric, Metrics, name_ends
from resnet8ptq.tasks.scoring.outputs import Array, Outputs, Reduction, Targets, TaskContext
from resnet8ptq.tasks.scoring.values import PairedTest

if TYPE_CHECKING:  # a run imports matplotlib only when it draws
    from matplotlib.figure import Figure

MANY_CLASSES = 50  # with more, metrics of single classes are only in files

Table = Iterable[Sequence[object]]
Score = Callable[[Outputs, Targets], Scores]


def _measure_distance(comparison: Comparison) -> Metrics:
    return {"sqnr_db": comparison.sqnr_db}


def _keep_paired(comparison: Comparison) -> dict[str, Array]:
    return comparison.paired.arrays()


def keep_values(of: Callable[[Any], Array], comparison: Comparison) -> dict[str, Array]:
    """Return the values that `of` takes from the scores, and the arrays of the paired test."""
    values = {
        "predictions": of(comparison.model),
        "baseline_predictions": of(comparison.baseline),
    }
    return values | comparison.paired.arrays()


def _nothing(*arguments: object) -> dict[str, Any]:
    return {}


def _no_answers(comparison: Comparison) -> None:
    return None


def _no_doubt(baseline: Scores, expected: float | None) -> None:
    return None


@dataclass(frozen=True)
class Scope:
    """The part of the outputs that a task scores, and the treatment of groups.

    Attributes:
        output: the index of the scored array in `Outputs.values`; None if all are scored.
        reduction: reduces the outputs of a batch to the needed part; None keeps all.
        params: further MLflow params of a run, such as the head of a detector.
        joins_groups: whether the samples of a group are scored as one item.
    """

    output: int | None = None
    reduction: Reduction | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    joins_groups: bool = False

    def find_silent(self, names: Sequence[str], outputs: Outputs, baseline: Outputs) -> str:
        """Return a sentence on the first silent part of a scored output; empty if none is silent.

        `distortion.find_units` cuts an output into parts, and `distortion.is_silent` decides which
        of them are silent.

        Args:
            names: the names of the network's outputs.
            outputs, baseline: outputs of the model and of FP32 for the same samples.
        """
        parts = zip(*split_units(baseline.values, outputs.values), strict=True)
        for number, exact, values in parts:
            if self.output in (None, number) and is_silent(exact, values):
                name = "output"
                if len(names) == len(outputs.values):
                    name += f" {names[number]}"
                state = "the same" if values[:1].any() else "zero"
                return f"{name} is {state} for every sample"
        return ""


def _as_returned(outputs: Outputs, targets: Targets) -> Outputs:
    return outputs


@dataclass(frozen=True)
class Joining:
    """The values of single samples that `task.join` joins for a group, see `tasks.joining`.

    Attributes:
        values: returns outputs with the values to join, such as the probabilities of logits.
        votes: returns the votes [n, classes] of these values, 0 or 1; None if the task has no
            votes.
    """

    values: Callable[[Outputs, Targets], Outputs] = _as_returned
    votes: Callable[[Array], Array] | None = None


@dataclass(frozen=True)
class Reference:
    """FP32 as the reference of a task without labels.

    Attributes:
        rescore: returns the scores of a model with the outputs of FP32 as its targets.
        note: the line of a report that explains the reference.
    """

    rescore: Callable[[Any, Any], Scores]
    note: str


@dataclass(frozen=True)
class TaskFiles:
    """The content of a task's files in the folder of a run.

    Attributes:
        arrays: arrays of `predictions.npz` and `choice.npz`, including those of the paired test.
        tables: CSV files by name.
        documents: other texts by file name.
        figures: figures by file name.
        captions: the caption of each figure by its file name.
        answers: the predicted classes of model and baseline for `wrong_examples.json`; None if the
            task does not write this file.
    """

    arrays: Callable[[Comparison], dict[str, Array]] = _keep_paired
    tables: Callable[[Comparison], dict[str, Table]] = _nothing
    documents: Callable[[Comparison], dict[str, str]] = _nothing
    figures: "Callable[[Comparison, str], dict[str, Figure]]" = _nothing
    captions: Mapping[str, str] = field(default_factory=dict)
    answers: Callable[[Comparison], tuple[Hits, Hits] | None] = _no_answers

    def save_figures(self, folder: Path, comparison: Comparison, title: str) -> None:
        """Write the figures of a comparison into a folder.

        The background process calls this method and imports this module for it, so the module
        imports no library that rewrites networks.
        """
        from resnet8ptq.core import figures

        for name, figure in self.figures(comparison, title).items():
            figures.save(figure, folder / name)


@dataclass(frozen=True)
class Task:
    """Scores the outputs of a model, and compares it with FP32.

    Attributes:
        criterion: a metric of `pair_metrics` with less variance over samples than the primary
            metric. A sweep chooses by it among the models near the best on the selection samples.
            None if only the primary metric chooses.
        beside: further metrics that tables show beside the primary metric.
        class_names: the names of the classes; empty without classes, or if they are not known.
        pair_metrics: metrics of a comparison by MLflow name.
        reference: FP32 as the reference; None for another reference, such as labels.
        doubt: returns the reason why no verdict is valid for a baseline with these scores, or None.
            If FP32 is not proven better than chance, or is clearly worse than expected, then the
            network, the data or the preprocessing may be wrong.
        joining: the values that `task.join` joins for a group; None if the task has no such values.
        summary: the result of a run in one line.
    """

    name: str
    metric: Metric
    score: Score
    test: PairedTest
    criterion: Metric | None = None
    beside: tuple[Metric, ...] = ()
    class_names: tuple[str, ...] = ()
    pair_metrics: Callable[[Comparison], Metrics] = _measure_distance
    reference: Reference | None = None
    scope: Scope = Scope()
    files: TaskFiles = TaskFiles()
    doubt: Callable[[Any, float | None], str | None] = _no_doubt
    joining: Joining | None = None
    summary: Callable[[Comparison], str] = summarize

    @property
    def few_names(self) -> tuple[str, ...]:
        """The names of the classes; empty for more than `MANY_CLASSES`."""
        if len(self.class_names) > MANY_CLASSES:
            return ()
        return self.class_names

    def compare(self, model: Any, baseline: Any) -> Comparison:
        """Compare the scores of a model with those of its baseline on the same samples.

        A task with a `reference` scores the model again first, with FP32's outputs as targets.
        """
        if self.reference is None:
            return Comparison(model, baseline, self.metric)
        rescored = self.reference.rescore(model, baseline)
        return Comparison(rescored, baseline, self.metric, tested=False)

    def metrics(self, comparison: Comparison) -> Metrics:
        """Return the metrics of a comparison by MLflow name; None for unknown values.

        Metrics of FP32 are left out if FP32 is the reference.
        """
        name = self.metric.name
        model = comparison.model
        baseline = comparison.baseline
        metrics = {
            name: model.value,
            f"{BASELINE}{name}": baseline.value,
            "drop": comparison.loss(),
            "paired/p_value": comparison.p_value,
            TOTAL: model.total,
            **name_ends("ci95/value", model.per_sample.interval),
            **name_ends("ci95/delta", comparison.interval),
            **model.more(),
        }

        # Add further metrics of FP32, of both models, and of the test
        for key, value in baseline.more().items():
            metrics[f"{BASELINE}{key}"] = value
        metrics |= self.pair_metrics(comparison)
        metrics |= comparison.paired.metrics()
        if self.reference is not None:  # FP32 is not measured
            metrics = {k: v for k, v in metrics.items() if not k.startswith(BASELINE)}
        return metrics

    def describe(self) -> dict[str, str]:
        """Return the name, the metric and `scope.params` as MLflow params."""
        metric = {"metric": self.metric.name, "metric_direction": self.metric.direction}
        return {"scored_as": self.name, **metric, **self.scope.params}


@dataclass(frozen=True)
class TaskType:
    """An entry of the registry, which makes a task.

    Attributes:
        make: makes the task for a network and data. Raises ConfigError if the data or settings do
            not fit, ModelError if the outputs do not fit.
        recall: makes the task from the recorded settings and class names of a run.
        schema: the type of the task's settings.
        fingerprint: returns a hash of the user's code or file that scoring uses; empty if there is
            none.
    """

    make: Callable[[Any, TaskContext], Task]
    recall: Callable[[Any, tuple[str, ...]], Task]
    schema: type[TaskConfig] = TaskConfig
    fingerprint: Callable[[Any], str] = lambda config: ""


def hash_file(key: str, config: Any) -> str:
    """Return a hash of the file that a setting of the task names; empty if there is none."""
    path = getattr(config, key)
    if path is None or not Path(path).is_file():
        return ""
    return files.sha256(Path(path))
