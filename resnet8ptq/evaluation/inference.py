"""Runs a model on a split of a data set, and collects its outputs, logits and targets."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import ModelError
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.batching import Batching, run_all
from resnet8ptq.tasks.scoring.distortion import sqnr_or_infinity
from resnet8ptq.tasks.scoring.outputs import PROBABILITIES, Array, Outputs, Reduction, Targets

LOGIT_SAMPLES = 1000
ALONE = 2  # samples that also run without their batch
BATCH_DB = 20.0  # least SQNR of samples in a batch, beside the same samples alone
RAW_BYTES = 2**25  # limit of the raw outputs that are kept beside reduced ones

OTHER_NUMBERS = (
    "the network returns another number of values for each sample, as NonMaxSuppression does; with "
    "labels, try task=detection; without, name earlier outputs in model.outputs=[...]"
)


@dataclass(frozen=True)
class Evaluation:
    """The outputs of an artifact, loaded from disk and run on a split.

    Attributes:
        seconds: the time for all samples, without loading and without collecting logits.
        batch_sqnr_db: the SQNR in dB of samples in a batch, relative to the same samples without
            the rest of the batch, see `_compare_alone`.
        cached: whether the outputs are from the cache; `seconds` is then the time of the earlier
            run.
    """

    outputs: Outputs
    seconds: float
    batching: Batching
    batch_sqnr_db: float = math.inf
    cached: bool = False


def infer(
    copies: Sequence[Predictor],
    split: Split,
    batching: Batching,
    label: str = "Evaluating",
    final: str = PROBABILITIES,
    reduction: Reduction | None = None,
) -> Evaluation:
    """Run copies of a loaded artifact, one for each parallel batch, on all samples of `split`.

    Raises:
        ModelError: the shapes of the kept outputs differ between batches, or `_run` raises it.
        DataError: the reduction does not take the samples.
    """
    # Keep the reduced outputs of all batches, and the raw ones of the first
    start = time.perf_counter()
    kept: list[Sequence[Array]] = []
    raw: list[Sequence[Array]] = []
    raw_bytes = 0
    batches = split.batches(batching.batch_size)
    runs = [partial(_run, copy, reduction) for copy in copies]
    for reduced, outputs in run_all(runs, track(batches, label)):
        if reduction and raw_bytes < RAW_BYTES:
            raw.append(outputs)
            raw_bytes += sum(values.nbytes for values in outputs)
        kept.append(reduced)
    seconds = time.perf_counter() - start

    # Join the batches of each output, in the order of the samples
    if split.lengths is not None:
        kept = _pad(kept)
    joined = tuple(map(batches.restore, _join(kept)))
    if not joined:
        raise ModelError(OTHER_NUMBERS)
    whole = Outputs(joined, None, final, _join(raw))
    returned = whole.raw if reduction else whole.values
    batch_sqnr_db = _compare_alone(copies[0], split, batching.batch_size, returned)
    return Evaluation(whole, seconds, batching, batch_sqnr_db)


def _run(
    copy: Predictor, reduction: Reduction | None, batch: NDArray[np.float32]
) -> tuple[Sequence[Array], Sequence[Array]]:
    """Return the reduced outputs of a batch, and those of the network.

    Raises:
        ModelError: without a reduction, an output lacks a row for each sample; or the reduction
            does not take the outputs.
        DataError: the reduction does not take the samples.
    """
    outputs = copy.predict(batch)
    if reduction is None:
        if any(values.shape[:1] != (len(batch),) for values in outputs):
            raise ModelError(OTHER_NUMBERS)
        return outputs, outputs
    return reduction(outputs, batch), outputs


def _compare_alone(
    copy: Predictor, split: Split, batch_size: int, outputs: Sequence[Array]
) -> float:
    """Return the SQNR in dB of the last `ALONE` samples of the first batch.

    The reference is their outputs when they run without the rest of the batch.
    A kernel may compute large batches wrongly, which a check of few samples cannot see: torch
    2.13's 8-bit instance normalization does so with more samples than a channel has pixels.

    Args:
        outputs: the network's outputs for the first batch or more; empty if they are not kept.

    Returns:
        The SQNR of the worst output, see `sqnr_or_infinity`. It is infinite without a difference,
        and if nothing is compared, as for texts.
    """
    size = split.limit(batch_size)
    if split.lengths is not None or not ALONE < size <= len(split):
        return math.inf
    last = slice(size - ALONE, size)
    in_batch = [values[last] for values in outputs]
    [batch] = split.take(np.arange(size)[last]).batches(ALONE)
    alone = copy.predict(batch)
    if [values.shape for values in in_batch] != [values.shape for values in alone]:
        return math.inf
    return sqnr_or_infinity(alone, in_batch)


def extend(before: Evaluation | None, after: Evaluation) -> Evaluation:
    """Join two evaluations of one artifact; without a first one, return the second."""
    if before is None:
        return after
    joined = _join([before.outputs.values, after.outputs.values])
    whole = replace(after.outputs, values=joined)  # tasks of hits reduce nothing, so `raw` is empty
    return replace(
        after,
        outputs=whole,
        seconds=before.seconds + after.seconds,
        batch_sqnr_db=min(before.batch_sqnr_db, after.batch_sqnr_db),
    )


def _pad(batches: Sequence[Sequence[Array]]) -> list[Sequence[Array]]:
    """Return outputs [n, length, ...] of batches, padded with zeros to the longest batch.

    Outputs whose axis 1 has one size in all batches, such as classes, are unchanged.
    """
    padded = []
    for of_all_batches in zip(*batches, strict=True):  # one output
        longest = max(map(_length, of_all_batches))
        padded.append([_pad_to(values, longest) for values in of_all_batches])
    return list(zip(*padded, strict=True))


def _length(values: Array) -> int:
    """Return the length of an output [n, length, ...]; 0 without such an axis."""
    return values.shape[1] if values.ndim > 1 else 0


def _pad_to(values: Array, length: int) -> Array:
    if values.ndim < 2 or values.shape[1] == length:
        return values
    widths = [(0, 0), (0, length - values.shape[1])] + [(0, 0)] * (values.ndim - 2)
    return np.pad(values, widths)


def _join(batches: Sequence[Sequence[Array]]) -> tuple[Array, ...]:
    """Return the outputs of all batches, joined; empty if a sample's shape differs by batch."""
    joined = []
    for of_all_batches in zip(*batches, strict=True):  # one output
        if len({values.shape[1:] for values in of_all_batches}) > 1:
            return ()
        joined.append(np.concatenate(of_all_batches))
    return tuple(joined)


def targets_of(split: Split) -> Targets:
    """Return the targets of a split for a task."""

    def pick_pictures(indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        return split.stored[indices]

    pictures = None
    if split.has_pictures:  # other samples cannot be drawn
        pictures = pick_pictures
    return Targets(
        labels=split.labels,
        groups=split.groups,
        inputs=split.inputs,
        pictures=pictures,
        lengths=split.masked_lengths,
        whole_length=split.whole_length,
    )


def with_logits(evaluation: Evaluation, copies: Sequence[Predictor], split: Split) -> Evaluation:
    """Return the evaluation; if its outputs are probabilities, with the first samples' logits.

    The logits are None if the copies give none.
    """
    if evaluation.outputs.final != PROBABILITIES:
        return evaluation
    logits = collect_logits(copies, split, evaluation.batching.batch_size)
    return replace(evaluation, outputs=replace(evaluation.outputs, logits=logits))


def collect_logits(
    copies: Sequence[Predictor], split: Split, batch_size: int
) -> NDArray[np.float32] | None:
    """Return the logits [m, ...] of the first m samples, at most `LOGIT_SAMPLES`.

    The result is None if the copies give no logits. The first samples are enough for the SQNR,
    which sums over all logits of each sample; a pass over all samples would double the time.
    """
    first = split.take(np.arange(min(LOGIT_SAMPLES, len(split))))
    batches = first.batches(batch_size)
    arrays = []
    steps = track(batches, "Reading the logits")
    for logits in run_all([copy.logits for copy in copies], steps):
        if logits is not None:
            arrays.append(logits)
    if not arrays:
        return None
    return batches.restore(np.concatenate(arrays))
