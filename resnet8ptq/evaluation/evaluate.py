"""Run a model over a split of a data set."""

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.core.console import track
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.pace import Load, Pace
from resnet8ptq.tasks.classification import Scores

LOGIT_IMAGES = 1000


@dataclass(frozen=True)
class Evaluation:
    """An artifact, loaded from disk and run over a split.

    Attributes:
        seconds: for all images, loading left out.
        predictor: the loaded artifact, with the threads of `pace`.
    """

    scores: Scores
    seconds: float
    pace: Pace
    predictor: Predictor


def evaluate(
    load: Load, split: Split, pace: Pace, label: str = "Evaluating", logits: bool = False
) -> Evaluation:
    """Load an artifact from disk and run all samples of `split`.

    Args:
        logits: what it returns are logits, of which the softmax is scored.
    """
    predictor = load(pace.threads)
    start = time.perf_counter()
    outputs = [predictor.predict(batch) for batch in track(split.batches(pace.batch_size), label)]
    seconds = time.perf_counter() - start
    found = np.concatenate(outputs)
    scores = Scores(found, split.labels)
    if logits:
        scores = Scores(softmax(found), split.labels, found)
    return Evaluation(scores, seconds, pace, predictor)


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return probabilities [n, classes] of logits [n, classes]."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True), dtype=np.float64)
    return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)


def with_logits(found: Evaluation, split: Split) -> Scores:
    """Return the scores with the logits of the first samples, where there are any."""
    if found.scores.logits is not None:
        return found.scores
    logits = collect_logits(found.predictor, split, found.pace.batch_size)
    return replace(found.scores, logits=logits)


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
