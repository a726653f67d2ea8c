"""Run a model over a split of a data set."""

import time
from dataclasses import dataclass

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


def evaluate(load: Load, split: Split, pace: Pace, label: str = "Evaluating") -> Evaluation:
    """Load an artifact from disk and run all images of `split`."""
    predictor = load(pace.threads)
    start = time.perf_counter()
    outputs = [predictor.predict(batch) for batch in track(split.batches(pace.batch_size), label)]
    seconds = time.perf_counter() - start
    return Evaluation(Scores(np.concatenate(outputs), split.labels), seconds, pace, predictor)


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
