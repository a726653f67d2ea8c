"""The outputs and targets that a task scores, and the network and data for which it is made."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.errors import ConfigError

# The kinds of outputs
PROBABILITIES = "probabilities"
LOGITS = "logits"
VALUES = "values"

Array = NDArray[Any]
# A function from the outputs and the inputs of a batch to the part of the outputs to keep, for
# outputs that are too large to keep whole.
Reduction = Callable[[Sequence[Array], Array], tuple[Array, ...]]


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model for n samples, or n joined groups.

    Attributes:
        values: every output [n, ...] in the network's order, or the arrays that the task has made
            of them.
        logits: the input of the softmax for the first m samples [m, ...]; None if it is not known.
        final: the kind of the network's outputs: `PROBABILITIES`, `LOGITS` or `VALUES`.
            `classification` sets `PROBABILITIES` if it has made them from logits.
        raw: the network's outputs for the first batches, before a reduction, or for the single
            samples, before joining; empty if they are not kept.
    """

    values: tuple[Array, ...]
    logits: Array | None = None
    final: str = PROBABILITIES
    raw: tuple[Array, ...] = ()

    @property
    def returned(self) -> tuple[Array, ...]:
        """The outputs closest to the network's: `raw` if it is kept, otherwise `values`."""
        return self.raw or self.values

    def __len__(self) -> int:
        return len(self.values[0])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `raw`: the process that draws figures does not need this large copy."""
        return {**self.__dict__, "raw": ()}

    @property
    def sha256(self) -> str:
        """The hash of all `values`, with their shapes and dtypes."""
        digest = hashlib.sha256()
        for array in self.values:
            digest.update(f"{array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def first(self, count: int) -> "Outputs":
        """Return the outputs for the first `count` samples; `raw` is unchanged."""
        first = replace(self, values=tuple(values[:count] for values in self.values))
        if self.logits is not None:
            first = replace(first, logits=self.logits[:count])
        return first

    def has_raw_of(self, other: "Outputs") -> bool:
        """Return whether both have raw outputs, of equal shapes."""
        shapes = [values.shape for values in self.raw]
        return bool(shapes) and shapes == [values.shape for values in other.raw]


@dataclass(frozen=True)
class Targets:
    """The targets of the samples, or of joined groups.

    Attributes:
        labels: see `Split`; None without labels.
        groups: group numbers [n], equal for samples that belong together; None without groups.
        inputs: returns the network inputs of a slice of the samples.
        pictures: returns the stored pictures at given indices [k, ...], before the arithmetic of
            the preprocessing; None without pictures, see `Split.has_pictures`.
        lengths: the length of each sample by the mask [n]; None without a mask.
        whole_length: the length of the longest network input; None without a mask.
    """

    labels: Array | None = None
    groups: NDArray[np.int64] | None = None
    inputs: Callable[[slice], NDArray[np.float32]] | None = None
    pictures: Callable[[NDArray[np.int64]], NDArray[np.uint8]] | None = None
    lengths: NDArray[np.int64] | None = None
    whole_length: int | None = None


@dataclass(frozen=True)
class TaskContext:
    """The data and the network outputs for which a task is made.

    Attributes:
        data: the name of the data set in messages.
        labels: see `Split`; None without labels.
        class_names, named, class_ids: see `Dataset`.
        input_shape: the shape of one network input; () for records.
        outputs: the shape of each output by name, without the batch axis.
        final: see `Outputs`.
        grouped: whether the samples have group numbers.
    """

    data: str
    labels: Array | None
    class_names: tuple[str, ...]
    named: bool
    input_shape: tuple[int, ...]
    outputs: Mapping[str, tuple[int | None, ...]]
    final: str
    class_ids: tuple[int, ...] = ()
    grouped: bool = False

    @property
    def classes(self) -> int | None:
        """The number of probabilities or logits in the network's only output, see `count_scores`.

        The result is None for several outputs, for values of another kind, and if `count_scores`
        returns None.
        """
        if len(self.outputs) != 1 or self.final == VALUES:
            return None
        [shape] = self.outputs.values()
        return count_scores(shape)

    @property
    def of_tokens(self) -> bool:
        """Whether the labels are classes of tokens [N, tokens]."""
        return self.labels is not None and (self.labels.dtype.kind, self.labels.ndim) == ("i", 2)

    @property
    def keypoints(self) -> int:
        """The number of keypoints of each object; 0 if the labels have none. See `data.boxes`."""
        if self.labels is None or "boxes" not in (self.labels.dtype.names or ()):
            return 0
        box = self.labels["boxes"].dtype
        if "keypoints" not in (box.names or ()):
            return 0
        return int(box["keypoints"].shape[0] // 3)

    @property
    def has_masks(self) -> bool:
        """Whether the labels are boxes with masks of their objects. See `data.boxes`."""
        return self.labels is not None and "masks" in (self.labels.dtype.names or ())


def count_scores(shape: Sequence[int | None]) -> int | None:
    """Return the number of scores in an output of this shape, without its batch axis.

    The result is None if an axis is free, or if several axes have more than one value. Axes of size
    1 do not count: a convolution at the end of a network leaves them, a squeeze removes them.

    >>> [count_scores(shape) for shape in ([10], [10, 1, 1], [], [10, 4])]
    [10, 10, 1, None]
    """
    if not is_vector(shape):
        return None
    for size in shape:
        if size != 1:
            return size
    return 1


def is_vector(shape: Sequence[int | None]) -> bool:
    """Return whether at most one axis of a shape without a batch axis has a size other than 1."""
    return sum(1 for size in shape if size != 1) < 2


def as_rows(values: Array) -> Array:
    """Return the scores of each sample [n, scores], see `count_scores`."""
    return values.reshape(len(values), -1)


def check_labels(task: str, context: TaskContext, kinds: str, expected: str) -> None:
    """Raise `ConfigError` if the labels are missing, or not of these NumPy kinds."""
    labels = context.labels
    if labels is not None and labels.dtype.kind in kinds:
        return

    # Say what the labels are, and how texts become classes
    got = "none"
    mend = ""
    if labels is not None:
        got = f"{labels.dtype} {list(labels.shape)}"
        if labels.dtype.kind == "U" and "i" in kinds:
            mend = "; try numpy.unique(labels, return_inverse=True)[1]"
    raise ConfigError(
        f"task={task}: the labels of {context.data} are {got}, expected {expected}{mend}"
    )


def has_prototypes(outputs: Mapping[str, tuple[int | None, ...]]) -> bool:
    """Return whether outputs may be boxes [boxes, values] and prototypes of masks.

    Only the numbers of axes count: 2 for boxes, 3 for prototypes.
    """
    return sorted(len(shape) for shape in outputs.values()) == [2, 3]


def describe(outputs: Mapping[str, tuple[int | None, ...]]) -> str:
    """Return names and shapes of a network's outputs, for a message.

    >>> describe({"boxes": (100, 4), "scores": (100,)})
    'boxes [100, 4], scores [100]'
    """
    return ", ".join(f"{name} {list(shape)}" for name, shape in outputs.items())
