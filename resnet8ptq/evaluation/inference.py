"""Run a model over a split of a data set."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import ModelError
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.batching import Batching, Load, run_all
from resnet8ptq.tasks.contract import PROBABILITIES, Array, Outputs, Reduction, Targets

LOGIT_IMAGES = 1000
RAW_BYTES = 2**25  # of outputs that are kept besides what a task makes of them


@dataclass(frozen=True)
class Evaluation:
    """An artifact, loaded from disk and run over a split.

    Attributes:
        seconds: for all images, loading left out.
        copies: the loaded artifact, as often as `batching` runs batches at once.
    """

    outputs: Outputs
    seconds: float
    batching: Batching
    copies: Sequence[Predictor]


def infer(
    load: Load,
    split: Split,
    batching: Batching,
    label: str = "Evaluating",
    final: str = PROBABILITIES,
    reduction: Reduction | None = None,
) -> Evaluation:
    """Load an artifact from disk and run all samples of `split`.

    Args:
        final: what it returns, see `Outputs`.
        reduction: what is kept of each batch; None: the outputs themselves.

    Raises:
        ModelError: the outputs have other shapes for other samples, and are kept.
    """
    copies = [load(batching.threads) for _ in range(batching.at_once)]
    start = time.perf_counter()
    kept: list[Sequence[Array]] = []
    raw: list[Sequence[Array]] = []
    batches = track(split.batches(batching.batch_size), label)
    for found in run_all([copy.predict for copy in copies], batches):
        if reduction is not None:
            if sum(each.nbytes for every in raw for each in every) < RAW_BYTES:
                raw.append(found)
            found = reduction(found)
        kept.append(found)
    seconds = time.perf_counter() - start
    joined = _join(kept)
    if not joined:
        raise ModelError(
            "returns another number of values for each sample; task=detection takes it"
        )
    outputs = Outputs(joined, None, final, _join(raw))
    return Evaluation(outputs, seconds, batching, copies)


def _join(batches: Sequence[Sequence[Array]]) -> tuple[Array, ...]:
    """Return the outputs of all batches; none where a batch has other shapes than another."""
    shapes = {tuple(each.shape[1:] for each in found) for found in batches}
    if len(shapes) != 1:
        return ()
    return tuple(map(np.concatenate, zip(*batches, strict=True)))


def targets_of(split: Split) -> Targets:
    """Return what is known of the samples of a split."""
    pictures = (lambda places: split.images[places]) if split.has_pictures else None
    return Targets(split.labels, split.groups, split.inputs, pictures)


def with_logits(found: Evaluation, split: Split) -> Outputs:
    """Return the outputs with the logits of the first samples, where a softmax hides them."""
    if found.outputs.final != PROBABILITIES:
        return found.outputs
    logits = collect_logits(found.copies, split, found.batching.batch_size)
    return replace(found.outputs, logits=logits)


def collect_logits(
    copies: Sequence[Predictor], split: Split, batch_size: int
) -> NDArray[np.float32] | None:
    """Return the logits [m, classes] of the first m = `LOGIT_IMAGES` images.

    None where the model does not end in a softmax. Not of all images: a second pass would double
    the time of an evaluation, and the SQNR sums over every class of each image, enough of them.
    """
    images = split.take(np.arange(min(LOGIT_IMAGES, len(split))))
    outputs = run_all([copy.logits for copy in copies], images.batches(batch_size))
    arrays = [logits for logits in outputs if logits is not None]
    return np.concatenate(arrays) if arrays else None
