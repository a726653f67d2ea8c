"""Detects an implausible FP32 result; looks for a fitting preprocessing or order of classes."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.data.dataset import Dataset, Labels, Split
from resnet8ptq.data.preprocessing import Preprocessing
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.evaluation.inference import targets_of
from resnet8ptq.graph.session import open_runner
from resnet8ptq.tasks.classification import ACCURACY, ClassScores
from resnet8ptq.tasks.scoring.comparison import Scores
from resnet8ptq.tasks.scoring.outputs import Outputs
from resnet8ptq.tasks.scoring.statistics import kappa

log = logging.getLogger(__name__)

SAMPLES = 200  # samples of the training split
BETTER = 0.1  # least gain of a metric up to 1; less may be luck, since the best of several is taken
BATCH_SIZE = 20
LEAST_KAPPA = 0.5  # of classes in another order: less may be a network that guesses

# Common options of conf/preprocess for pixels 0..255: scale, mean, std.
_USUAL = {
    "raw": (1.0, (0.0,), (1.0,)),
    "unit": (1 / 255, (0.0,), (1.0,)),
    "symmetric": (1 / 127.5, (1.0,), (1.0,)),
    "torchvision_imagenet": (1 / 255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": (1 / 255, (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
    "caffe": (1.0, (103.939, 116.779, 123.68), (1.0,)),
}


def check(
    preprocess: PreprocessConfig,
    evaluator: Evaluator,
    dataset: Dataset,
    baseline: Scores,
    expected: float | None,
) -> str | None:
    """Warn if the FP32 result is implausible, see `Task.doubt`; suggest another setting.

    The suggestion is an order of the classes or a usual preprocessing, if one is clearly better on
    training samples with labels. Float inputs without labels cannot be checked, so the function
    logs their preprocessing.

    Args:
        dataset: the data set, arranged for the network.
        baseline: the scores of the FP32 network on the reported or the held-out samples.
        expected: `report.expected_accuracy`; None without an expectation.

    Returns:
        The doubt with the suggestion; None if FP32 is plausible.
    """
    if dataset.test.labels is None and dataset.test.dtype == "float32":
        _log_unchecked(preprocess, dataset.test)
    task = evaluator.task
    fp32 = evaluator.network
    threads = evaluator.runtime.threads
    reason = task.doubt(baseline, expected)
    if reason is None:
        return None

    # Try other preprocessings on training samples
    split = dataset.train.spaced(SAMPLES)
    metric = task.metric
    runner = open_runner(str(fp32.onnx_path), threads)
    reduction = task.scope.reduction

    def run(batch: Any) -> Sequence[NDArray[Any]]:
        return runner(batch) if reduction is None else reduction(runner(batch), batch)

    def score(preprocessing: Preprocessing) -> Scores:
        tried = replace(split, preprocessing=preprocessing)
        outputs = Outputs(tuple(run_all(run, tried)), None, fp32.final)
        return task.score(outputs, targets_of(tried))

    # Suggest the best one, if its gain is more than luck
    advice = "does the preprocessing fit the network?"
    if _tells_apart(split.labels):
        values = dict[str, float]()
        for setting, steps in usual(split, sized=preprocess.size is not None):
            values[setting] = score(steps).value
        best = min(values, key=lambda setting: metric.cost(values[setting]), default="")
        scores = score(split.preprocessing)
        now = scores.value
        order = find_class_order(scores, dataset.class_names)
        if order:
            advice = f"are the classes in the network's order? {order}"
        elif best and metric.cost(now) - metric.cost(values[best]) > BETTER:
            advice += (
                f" {best} gets {metric.show(values[best])} on {len(split)} training samples, this "
                f"run {metric.show(now)}"
            )
        elif not values:
            advice += " look at data.offset, at data.scale and at the labels"
        else:
            advice += (
                " no usual preprocessing of the pixels does better; look at the order of the "
                "classes, at preprocess.resize, data.offset and data.scale"
            )
    doubt = f"FP32 {metric.title.upper()} {reason}: {advice}"
    log.warning("%s; verdicts against such an FP32 network are void", doubt)
    return doubt


def find_class_order(scores: Scores, names: Sequence[str]) -> str:
    """Return a text with the network's order of classes; empty unless it is clearly better.

    The text is also empty without `ClassScores` for these classes, or with fewer samples than
    classes.

    One half of the samples gives the order, the other half its accuracy. On its own half, the best
    of all orders gains by luck.
    """
    if not isinstance(scores, ClassScores) or scores.probabilities.shape[1] != len(names):
        return ""
    labels = scores.labels
    if len(names) > len(labels):  # classes without a sample have no order
        return ""
    predictions = scores.per_sample.predictions
    mixed = np.random.default_rng(0).permutation(len(labels))
    known, checked = np.array_split(mixed, 2)

    # Give each output the class that it stands for most often
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (predictions[known], labels[known]), 1)
    _, order = linear_sum_assignment(counts, maximize=True)
    renamed = order[predictions[checked]]
    now = float((predictions[checked] == labels[checked]).mean())
    reordered = float((renamed == labels[checked]).mean())
    if reordered - now <= BETTER or kappa(labels[checked], renamed, len(names)) < LEAST_KAPPA:
        return ""
    ordered = [names[index] for index in order]
    return (
        f"data.classes='[{','.join(ordered)}]' gets {ACCURACY.show(reordered)} on {len(checked)} "
        f"training samples, this run {ACCURACY.show(now)}; it orders folders and labels that are "
        "texts, integers must be renumbered"
    )


def _log_unchecked(taken: PreprocessConfig, split: Split) -> None:
    """Log the unchecked preprocessing; warn if it leaves float pictures from 0 to 1 unchanged."""
    if _is_unit(split) and (taken.scale, *taken.mean, *taken.std) == (1, 0, 1):
        log.warning(
            "preprocess=%s: the samples are float pictures from 0 to 1 and stay so, and there are "
            "no labels to test whether that fits the network; if it takes 0 to 255: "
            "preprocess.scale=255, -1 to 1: preprocess=symmetric preprocess.scale=2",
            taken.name,
        )
        return
    log.info(
        "no labels to test whether preprocess=%s (scale=%g, mean=%s, std=%s, %s) fits the network",
        taken.name,
        taken.scale,
        taken.mean,
        taken.std,
        taken.channels,
    )


def usual(split: Split, sized: bool) -> Iterator[tuple[str, Preprocessing]]:
    """Yield usual preprocessings of pixels, each with its settings; none for other samples.

    Args:
        sized: whether `preprocess.size` is set.
    """
    unit = _is_unit(split)
    if split.dtype != "float32" or (split.stored.dtype != np.uint8 and not unit):
        return
    coloured = split.stored.shape[-1] == 3
    for name, (scale, mean, std) in _USUAL.items():
        scale = scale * 255 if unit else scale
        steps = replace(split.preprocessing, bgr=name == "caffe", scale=scale, mean=mean, std=std)
        setting = f"preprocess={name} preprocess.scale={scale:g}" if unit else f"preprocess={name}"
        if name == "torchvision_imagenet" and not sized:
            setting += " preprocess.size=null"
        if len(mean) == 1 or coloured:
            yield setting, steps
        if name != "caffe" and coloured:
            yield f"{setting} preprocess.channels=bgr", replace(steps, bgr=True)


def _is_unit(split: Split) -> bool:
    """Return whether samples are pictures of floats from 0 to 1, a usual scaling of pixels."""
    shape = split.stored.shape
    if split.stored.dtype.kind != "f" or len(shape) != 4 or not {shape[1], shape[3]} & {1, 3}:
        return False
    some = split.spaced(SAMPLES).stored[:]
    return bool(some.size and some.min() >= 0 and 0 < some.max() <= 1)


def _tells_apart(labels: Labels | None) -> bool:
    if labels is None or labels.dtype.kind == "V":
        return labels is not None and bool(labels["count"].any())
    return len(np.unique(labels)) > 1


def run_all(
    run: Callable[[NDArray[Any]], Sequence[NDArray[Any]]], split: Split
) -> list[NDArray[Any]]:
    """Return each output for all samples, in their order."""
    batches = split.batches(BATCH_SIZE)
    runs = [run(batch) for batch in batches]
    outputs = []
    for parts in zip(*runs, strict=True):
        joined = np.concatenate(parts)
        outputs.append(batches.restore(joined))
    return outputs
