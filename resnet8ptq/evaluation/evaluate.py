"""Run a model over a split of a data set."""

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.core.console import track
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.pace import Load, Pace
from resnet8ptq.tasks.contract import LOGITS, PROBABILITIES, Outputs, Targets

LOGIT_IMAGES = 1000


@dataclass(frozen=True)
class Evaluation:
    """An artifact, loaded from disk and run over a split.

    Attributes:
        seconds: for all images, loading left out.
        predictor: the loaded artifact, with the threads of `pace`.
    """

    outputs: Outputs
    seconds: float
    pace: Pace
    predictor: Predictor


def evaluate(
    load: Load, split: Split, pace: Pace, label: str = "Evaluating", final: str = PROBABILITIES
) -> Evaluation:
    """Load an artifact from disk and run all samples of `split`.

    Args:
        final: what it returns, see `Outputs`.
    """
    predictor = load(pace.threads)
    start = time.perf_counter()
    found = [predictor.predict(batch) for batch in track(split.batches(pace.batch_size), label)]
    seconds = time.perf_counter() - start
    outputs = Outputs(tuple(map(np.concatenate, zip(*found, strict=True))), None, final)
    return Evaluation(outputs, seconds, pace, predictor)


def targets_of(split: Split) -> Targets:
    """Return what is known of the samples of a split."""
    return Targets(split.labels, split.groups, split.inputs)


def with_logits(found: Evaluation, split: Split) -> Outputs:
    """Return the outputs with the logits of the first samples, where a softmax hides them."""
    if found.outputs.final == LOGITS:
        return found.outputs
    logits = collect_logits(found.predictor, split, found.pace.batch_size)
    return replace(found.outputs, logits=logits)


def collect_logits(
    predictor: Predictor, split: Split, batch_size: int
) -> NDArray[np.float32] | None:
    """Return the logits [m, classes] of the first m = `LOGIT_IMAGES` images.

    None where the model does not end in a softmax. Not of all images: a second pass would double
    the time of an evaluation, and the SQNR sums over every class of each image, enough of them.
    """
    images = split.take(np.arange(min(LOGIT_IMAGES, len(split))))
    outputs = [predictor.logits(batch) for batch in images.batches(batch_size)]
    arrays = [logits for logits in outputs if logits is not None]
    return np.concatenate(arrays) if arrays else None
