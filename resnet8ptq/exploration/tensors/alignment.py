"""Matches the tensors of two files of one network: by name, by values, and by position.

Files of different formats may differ in names, in layouts, and in the order of parallel branches.
The values of a broken file are wrong after its fault. Tensors are therefore matched in three steps:

1. By equal names and sizes. Steps 2 and 3 follow only if less than half of the file's tensors
   match.
2. By values: two tensors that are near, and each the nearest to the other. Fingerprints without a
   layout choose the candidates.
3. By the order of the remaining tensors, whose values may be wrong. The alignment has the largest
   sum of scores (Needleman and Wunsch, 1970, with gaps that cost nothing). An error spreads to
   later tensors. Only pairs after the last pair of steps 1 and 2 may therefore have unlike values.
   Earlier pairs need values that are somewhat alike.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Matrix = NDArray[np.float64]
Pairs = dict[int, int]  # from the index of a tensor of FP32 to the index in the other file

QUANTILES = np.linspace(0, 1, 17)
KEPT_NAMES = 0.5  # share of the file's tensors matched by name, from which names alone decide
ALIKE = 0.8  # least similarity of candidates
NEAR = 0.5  # least nearness: the difference has half of the signal's magnitude (6 dB)
SOMEWHAT = 0.4  # least similarity of values that may have a wrong scale or bias
SURE = 4.0  # ratio of squared errors by which another layout must be better
SHAPED = 0.1  # score of equal sizes, for which position decides


@dataclass(frozen=True)
class Fingerprint:
    """A tensor without its layout.

    Attributes:
        name: the name in the file, without additions of a quantizer.
        sizes: the sorted sizes of the axes without the batch axis; sizes of 1 are left out. An
            empty tensor has (0,).
        quantiles: `QUANTILES` of the values for each sample [samples, quantiles].
    """

    name: str
    sizes: tuple[int, ...]
    quantiles: NDArray[np.float64]

    @classmethod
    def of(cls, name: str, samples: Sequence[Array]) -> "Fingerprint":
        """Return the fingerprint of a tensor's values, one array [1, ...] for each sample."""
        if not samples[0].size:
            return cls(name, (0,), np.zeros((len(samples), len(QUANTILES))))
        sizes = tuple(sorted(size for size in samples[0].shape[1:] if size > 1))
        quantiles = [np.quantile(np.nan_to_num(values), QUANTILES) for values in samples]
        return cls(name, sizes, np.asarray(quantiles, np.float64))


def match(
    fp32: Sequence[Fingerprint],
    other: Sequence[Fingerprint],
    measure: Callable[[int, int], float],
) -> list[tuple[int, int]]:
    """Return the pairs of indices of matched tensors, in the order of `fp32`.

    Args:
        fp32, other: the tensors of both files, in execution order.
        measure: returns the nearness of two tensors, given by their indices, see `find_nearness`.
    """
    similarity = _find_similarity(fp32, other)
    pairs = _match_names(fp32, other, similarity)
    if len(pairs) < KEPT_NAMES * len(other):
        _match_nearest(pairs, similarity, measure)
        _match_order(pairs, similarity)
    return sorted(pairs.items())


def _find_similarity(fp32: Sequence[Fingerprint], other: Sequence[Fingerprint]) -> Matrix:
    """Return the similarity of each pair [fp32, other], 0 to 1; -1 for different sizes."""
    similarity = np.full((len(fp32), len(other)), -1.0)
    by_sizes: dict[tuple[int, ...], list[int]] = {}
    for column, tensor in enumerate(other):
        by_sizes.setdefault(tensor.sizes, []).append(column)
    for row, tensor in enumerate(fp32):
        columns = by_sizes.get(tensor.sizes, [])
        if columns:
            quantiles = np.stack([other[column].quantiles for column in columns])
            similarity[row, columns] = _compare(tensor.quantiles, quantiles)
    return similarity


def _compare(wanted: Matrix, others: Matrix) -> Matrix:
    """Return the similarity, 0 to 1, of one tensor's quantiles with those of several others.

    The similarity is the mean of three values. The first is nearness. The second is correlation,
    which a wrong scale or bias leaves unchanged. The third is the share of equal signs, which tells
    the output of a ReLU from its input.

    Args:
        wanted: quantiles of one tensor [samples, quantiles].
        others: quantiles of other tensors [tensors, samples, quantiles].
    """
    size = np.linalg.norm(wanted)
    distances = np.linalg.norm(others - wanted, axis=(1, 2))
    near = (distances == 0).astype(float)
    if size:
        near = np.clip(1 - distances / size, 0, 1)

    # Constant values have no correlation
    centred = wanted - wanted.mean()
    others_centred = others - others.mean(axis=(1, 2), keepdims=True)
    products = (others_centred * centred).sum(axis=(1, 2))
    norms = np.linalg.norm(others_centred, axis=(1, 2)) * np.linalg.norm(centred)
    correlation = np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)
    signs = (np.sign(others) == np.sign(wanted)).mean(axis=(1, 2))
    similarity: Matrix = (near + np.clip(correlation, 0, 1) + signs) / 3
    return similarity


def _match_names(
    fp32: Sequence[Fingerprint], other: Sequence[Fingerprint], similarity: Matrix
) -> Pairs:
    """Return the pairs of equal names and sizes."""
    columns = {tensor.name: column for column, tensor in enumerate(other)}
    pairs = {}
    for row, tensor in enumerate(fp32):
        column = columns.get(tensor.name)
        if column is not None and similarity[row, column] >= 0:
            pairs[row] = column
    return pairs


def _match_nearest(pairs: Pairs, similarity: Matrix, measure: Callable[[int, int], float]) -> None:
    """Add pairs of unmatched tensors that are near, and each the nearest to the other."""
    nearness = np.zeros_like(similarity)
    taken = {*pairs.values()}
    for row, column in np.argwhere(similarity >= ALIKE).tolist():
        if row not in pairs and column not in taken:
            nearness[row, column] = measure(row, column)
    if not nearness.size:
        return
    nearest = nearness.argmax(axis=1)
    back = nearness.argmax(axis=0)
    for row, column in enumerate(nearest.tolist()):
        if nearness[row, column] >= NEAR and back[column] == row:
            pairs[row] = column


def _match_order(pairs: Pairs, similarity: Matrix) -> None:
    """Add pairs of unmatched tensors in the same order, preferably near their expected position."""
    rows = np.arange(similarity.shape[0])
    columns = np.arange(similarity.shape[1])
    known = sorted(pairs.items())
    last_row = max(pairs, default=-1)
    last_column = max(pairs.values(), default=-1)
    behind = (rows[:, np.newaxis] > last_row) & (columns > last_column)

    # The expected column of a row lies between those of its matched neighbours, or the ends
    ends = [(-1, -1), *known, (len(rows), len(columns))]
    known_rows, known_columns = zip(*ends, strict=True)
    expected = np.interp(rows, known_rows, known_columns)
    away = np.abs(columns - expected[:, np.newaxis]) / max(1, len(columns))

    # Only unmatched tensors of equal sizes have a score
    scores = np.where(behind | (similarity >= SOMEWHAT), similarity + SHAPED - away, 0)
    scores[similarity < 0] = 0
    scores[[*pairs.keys()], :] = 0
    scores[:, [*pairs.values()]] = 0
    pairs.update(_align(np.maximum(scores, 0)))


def _align(scores: Matrix) -> list[tuple[int, int]]:
    """Return the pairs, ascending on both sides, with the largest sum of scores."""
    rows, columns = scores.shape

    # Find the best sum up to each pair
    best = np.zeros((rows + 1, columns + 1))
    for row, of_row in enumerate(scores, 1):
        paired = best[row - 1, :-1] + of_row
        best[row, 1:] = np.maximum(best[row - 1, 1:], paired)
        best[row] = np.maximum.accumulate(best[row])

    # Go back along the pairs that gave the best sum
    pairs = []
    while rows and columns:
        if best[rows, columns] == best[rows - 1, columns]:
            rows -= 1
        elif best[rows, columns] == best[rows, columns - 1]:
            columns -= 1
        else:
            rows -= 1
            columns -= 1
            pairs.append((rows, columns))
    return pairs[::-1]


def find_axes(fp32: Array, other: Array) -> tuple[int, ...] | None:
    """Return the transposition that gives `other` the layout of `fp32`.

    Returns None if no order of the axes fits, or if there are more than 5 axes. Axes of size 1 do
    not count, see `arrange`. If several orders fit, the one with the smallest squared error is
    returned. The unchanged order is preferred if its error is less than 4 times the smallest.

    Args:
        fp32, other: values of one sample [1, ...], or weights.
    """
    target = np.squeeze(fp32)
    packed = np.squeeze(other)
    if packed.ndim > 5:
        return None  # more orders than are worth trying

    # Try every order of the axes
    fitting = []
    errors = []
    for axes in itertools.permutations(range(packed.ndim)):
        turned = packed.transpose(axes)
        if turned.shape == target.shape:
            fitting.append(axes)
            errors.append(float(np.square(turned - target).sum()))
    if not fitting:
        return None

    # Prefer the unchanged order unless another is clearly better
    best = errors.index(min(errors))
    unchanged = tuple(range(packed.ndim))
    if unchanged in fitting and errors[fitting.index(unchanged)] < SURE * errors[best]:
        return unchanged
    return fitting[best]


def find_nearness(fp32: Array, other: Array) -> float:
    """Return 1 - |difference| / |fp32| of one sample in the layout of `find_axes`, at least 0.

    The nearness is 0 if no layout fits. If FP32's values are all 0, it is 1 for equal values, and
    else 0.
    """
    axes = find_axes(fp32, other)
    if axes is None:
        return 0.0
    distance = np.linalg.norm(np.nan_to_num(arrange(other, axes, fp32.shape) - fp32))
    size = np.linalg.norm(np.nan_to_num(fp32))
    if not size:
        return float(distance == 0)
    return max(0.0, 1 - float(distance / size))


def arrange(other: Array, axes: tuple[int, ...], shape: Sequence[int]) -> Array:
    """Return a tensor of another file in the layout of FP32; `axes` are those of `find_axes`.

    >>> nhwc = np.arange(6, dtype=np.float32).reshape(1, 1, 3, 2)
    >>> arrange(nhwc, (1, 0), (1, 2, 1, 3)).tolist()
    [[[[0.0, 2.0, 4.0]], [[1.0, 3.0, 5.0]]]]
    """
    return np.squeeze(other).transpose(axes).reshape(shape)
