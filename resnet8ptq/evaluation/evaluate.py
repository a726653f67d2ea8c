"""Run a model over a split of a data set."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.console import track
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.pace import _load, find_pace
from resnet8ptq.tasks.classification import Scores

LOGIT_IMAGES = 1000


@dataclass(frozen=True)
class Evaluation:
    """An artifact, loaded from disk and run over a split.

    Attributes:
        seconds: for all images, loading left out.
        batch_size, threads: as set, or as found to be fastest.
        predictor: the loaded artifact, with that many threads.
    """

    scores: Scores
    seconds: float
    batch_size: int
    threads: int
    predictor: Predictor


def evaluate(config: RunConfig, path: Path, split: Split, label: str = "Evaluating") -> Evaluation:
    """Load the artifact at `path` and run all images of `split`, as fast as `find_pace` knows."""
    batch_size, threads = find_pace(config, path, split)
    predictor = _load(config, path, threads)
    start = time.perf_counter()
    outputs = [predictor.predict(batch) for batch in track(split.batches(batch_size), label)]
    seconds = time.perf_counter() - start
    scores = Scores(np.concatenate(outputs), split.labels)
    return Evaluation(scores, seconds, batch_size, threads, predictor)


def one_by_one(config: RunConfig, path: Path, split: Split) -> Scores:
    """Return the scores at batch 1."""
    single = replace(config, evaluate=replace(config.evaluate, batch_size=1))
    return evaluate(single, path, split, "Evaluating one by one").scores


def collect_logits(
    predictor: Predictor, split: Split, batch_size: int
) -> NDArray[np.float32] | None:
    """Return the logits [m, classes] of the first m = `LOGIT_IMAGES` images.

    None where the model does not end in a softmax. Not of all images: a second pass would double
    the time of an evaluation, and the SQNR sums over every class of each image, enough of them.
    """
    images = split.take(np.arange(min(LOGIT_IMAGES, len(split))))
    found = [predictor.logits(batch) for batch in images.batches(batch_size)]
    arrays = [logits for logits in found if logits is not None]
    return np.concatenate(arrays) if arrays else None
