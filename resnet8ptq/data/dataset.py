"""Samples with optional labels (`Split`), data sets of two splits, and their cache."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import cache, code
from resnet8ptq.core.records import names_of
from resnet8ptq.data import fields
from resnet8ptq.data.fields import Fields, Layout
from resnet8ptq.data.lazy import Batches, LazySamples, Stored, in_parts
from resnet8ptq.data.preprocessing import RAW, Preprocessing, arrange

Labels = NDArray[Any]
Side = Literal["train", "test"]
SIDES: tuple[Side, ...] = ("train", "test")
MAX_SAMPLES = 10_000_000  # limited, since each sample is hashed


@dataclass(frozen=True)
class Split:
    """Stored samples [N, ...], their labels and their source.

    Pictures are uint8 [N, H, W, C]; a user's own arrays may be [N, C, H, W] instead. Samples of
    several inputs are records [N] (`core.records`). The samples may be mapped from files, so code
    reads them in batches.

    Attributes:
        labels: classes [N] int64, classes of tokens [N, tokens] int64 (-100 for tokens that are not
            scored), several classes [N, classes] bool, values [N, ...] of floats, texts [N], masks
            [N, H, W] uint8, pictures [N, H, W, C] uint8, or boxes (see `boxes`); None without
            labels.
        source: the origin of the samples in messages, such as their folder.
        preprocessing: the arithmetic from samples to network inputs.
        layout: the order of a sample's axes in the network's input, see `preprocessing.arrange`.
        dtype: the dtype of the network's input.
        fields: the network's inputs, if samples are records; used in place of preprocessing,
            layout and dtype.
        at_once: the network's largest batch; None if any size works.
        groups: group numbers [N] int64, equal for samples that belong together, such as the windows
            of one clip; None without groups.
        hashes: the `pixel_hashes`, if they are known already.
        within_memory: the largest batch whose tensors fit into the memory budget; None if unknown.
        names: names of the samples in messages, such as their files, [N]; None without names.
        texts: the texts whose tokens are the samples, [N]; None if samples are not texts.
    """

    stored: Stored
    labels: Labels | None
    source: str
    preprocessing: Preprocessing = RAW
    layout: Layout | None = None
    dtype: str = "float32"
    fields: Fields | None = None
    at_once: int | None = None
    groups: NDArray[np.int64] | None = None
    hashes: NDArray[np.bytes_] | None = None
    within_memory: int | None = None
    names: NDArray[np.object_] | None = None
    texts: NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.stored)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of samples, labels, groups and preprocessing, in hexadecimal.

        The digest does not depend on the attributes `layout`, `dtype` and `fields`, which follow
        from the network.
        """
        samples = self.stored
        described = str(self.stored.shape)
        if self.has_records:
            described += str(samples.dtype.descr)
        elif samples.dtype != np.uint8:
            described += samples.dtype.str
        if self.preprocessing != RAW:
            described += repr(self.preprocessing)

        # Hash the values in parts, which may be mapped from a file
        digest = hashlib.sha256(described.encode())
        for part in in_parts(samples):
            digest.update(np.ascontiguousarray(part).data)
        for array in (self.labels, self.groups):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @cached_property
    def pixel_hashes(self) -> NDArray[np.bytes_]:
        """A 16-byte hash of each stored sample, [N]."""
        if self.hashes is not None:
            return self.hashes
        return hash_samples(self.stored)

    @property
    def sample_ids(self) -> NDArray[np.uint64]:
        """The first 8 bytes of each sample's hash as a number, [N]."""
        # Viewed as numbers, each hash is two, of which the first is taken
        return np.ascontiguousarray(self.pixel_hashes).view("<u8")[::2].astype(np.uint64)

    @property
    def has_records(self) -> bool:
        """Whether the samples are records, see `core.records`."""
        return bool(names_of(self.stored.dtype))

    @cached_property
    def lengths(self) -> NDArray[np.int64] | None:
        """The length of each sample, [N]; None unless the network takes any length."""
        if self.fields is None or self.fields.length_mask is None:
            return None
        return self.masked_lengths

    @cached_property
    def masked_lengths(self) -> NDArray[np.int64] | None:
        """The length of each sample by its mask, [N]; None without a mask."""
        if self.fields is None or self.fields.mask is None:
            return None
        parts = [np.zeros(0, np.int64)]
        for part in in_parts(self.stored):
            parts.append(fields.lengths(part[self.fields.mask]))
        return np.concatenate(parts)

    @property
    def whole_length(self) -> int | None:
        """The length of the longest network input; None without a mask."""
        if self.fields is None or self.fields.mask is None:
            return None
        if self.lengths is not None:  # each batch is cut to its longest sample
            return int(self.lengths.max(initial=0))
        padding = max(field.padding for field in self.fields.inputs)
        return int(self.stored.dtype[self.fields.mask].shape[0]) + padding

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one network input; () for records."""
        return self.zeros.shape[1:]

    @property
    def sample_bytes(self) -> int:
        """The memory of one sample in bytes: of a record as stored, of others as float32."""
        if self.has_records:
            return self.stored.dtype.itemsize
        return 4 * math.prod(self.stored.shape[1:])

    @property
    def zeros(self) -> NDArray[Any]:
        """One network input [1, ...] of zeros."""
        stored = np.zeros((1, *self.stored.shape[1:]), self.stored.dtype)
        if self.fields is not None:  # `prepare` would cut zeros to length 0
            return np.zeros_like(self.fields.whole(stored))
        return np.zeros_like(self.prepare(stored))

    def is_of(self, other: "Split") -> bool:
        """Return whether both splits are parts of one array, so that their group numbers are
        comparable.
        """
        return self._whole is other._whole

    @property
    def _whole(self) -> NDArray[Any]:
        if isinstance(self.stored, LazySamples):
            return self.stored.whole
        return self.stored

    @property
    def has_pictures(self) -> bool:
        """Whether the samples are pictures, which may be shifted and mirrored.

        Pictures are uint8 with three axes, for a network that takes float32 or uint8. Their axes
        are [H, W, C], or [C, H, W] in a user's own arrays.
        """
        pixels = self.stored.dtype == np.uint8 and self.dtype in ("float32", "uint8")
        return pixels and len(self.stored.shape) == 4

    @property
    def channels_first(self) -> bool:
        """Whether the pictures are [C, H, W], judged by their shape; see `has_pictures`."""
        first, _, last = self.stored.shape[1:]
        return first in (1, 3) and last not in (1, 3)

    def take(self, indices: NDArray[np.int64]) -> "Split":
        """Return the samples at `indices`, in that order, without a copy of the stored samples."""
        samples = self.stored
        if isinstance(samples, LazySamples):
            taken = LazySamples(samples.whole, samples.indices[indices])
        else:
            taken = LazySamples(samples, np.arange(len(samples))[indices])

        # Only the samples are read on access
        def pick(array: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if array is None else array[indices]

        hashes = self.hashes
        if "pixel_hashes" in vars(self):  # keep hashes that were computed
            hashes = self.pixel_hashes
        return replace(
            self,
            stored=taken,
            labels=pick(self.labels),
            groups=pick(self.groups),
            hashes=pick(hashes),
            names=pick(self.names),
            texts=pick(self.texts),
        )

    def name_of(self, index: int) -> str:
        """Return a sample's name for messages; without names, its index in the stored array."""
        if self.names is not None:
            return str(self.names[index])
        if isinstance(self.stored, LazySamples):
            index = int(self.stored.indices[index])
        return f"sample {index} of {self.source}"

    def spaced(self, most: int) -> "Split":
        """Return `most` evenly spaced samples; all samples if there are fewer."""
        chosen = np.linspace(0, len(self) - 1, min(most, len(self)))
        return self.take(chosen.astype(np.int64))

    @property
    def has_classes(self) -> bool:
        """Whether each sample has one class."""
        return self.labels is not None and self.labels.dtype.kind == "i" and self.labels.ndim == 1

    def strata(self, classes: int) -> list[NDArray[np.int64]]:
        """Return the ascending indices of each class's samples; without classes, of all samples.

        Args:
            classes: number of classes; samples with other labels are in no stratum.
        """
        if self.labels is None or not self.has_classes:
            return [np.arange(len(self))]

        # A stable sort groups the samples by class and keeps their order
        ends = np.searchsorted(np.sort(self.labels), np.arange(classes), "right")
        starts = [np.count_nonzero(self.labels < 0), *ends[:-1]]
        order = np.argsort(self.labels, kind="stable")
        return [order[start:end] for start, end in zip(starts, ends, strict=True)]

    def prepare(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return stored samples [n, ...] as network inputs [n, ...] of `dtype`, or as records."""
        if self.fields is not None:
            return self.fields.prepare(stored)
        values = self.preprocessing.apply(stored, self.dtype)
        return np.ascontiguousarray(arrange(values, self.layout))

    def inputs(self, indices: NDArray[np.int64] | slice) -> NDArray[Any]:
        """Return the network inputs [n, ...] of the samples at `indices`."""
        return self.prepare(self.stored[indices])

    def limit(self, size: int) -> int:
        """Return `size`, reduced to the network's limit and the memory budget."""
        return min(size, self.at_once or size, self.within_memory or size)

    def batches(self, size: int, padded: bool = True) -> Batches:
        """Return batches of at most `size` network inputs; see `limit`, `parts` and `prepare`."""
        parts = self.parts(self.limit(size), padded)
        order = None
        if self.lengths is not None:  # the parts are sorted by length
            order = np.concatenate(list(map(np.asarray, parts)))
        return Batches(self.stored, parts, self.prepare, order)

    def parts(self, size: int, padded: bool = True) -> Sequence[slice | NDArray[np.int64]]:
        """Return the sample indices of each batch of at most `size`.

        If the network takes any length, samples are sorted, the longest first, so that a batch
        needs little padding.

        Args:
            padded: whether a batch may mix lengths; False for statistics of tensors, which must not
                count padding.
        """
        lengths = self.lengths
        if lengths is None:
            return [slice(start, start + size) for start in range(0, len(self), size)]
        order = np.argsort(-lengths, kind="stable")
        mixable = [order]
        if not padded:
            mixable = np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1)
        batches = []
        for indices in mixable:
            for start in range(0, len(indices), size):
                batches.append(indices[start : start + size])
        return batches


def hash_samples(samples: Stored) -> NDArray[np.bytes_]:
    """Return a 16-byte hash of each sample, [N]."""
    hashes = (hashlib.blake2b(sample.tobytes(), digest_size=16).digest() for sample in samples)
    return np.fromiter(hashes, "S16", len(samples))


@dataclass(frozen=True)
class Dataset:
    """A training and a test split with their classes.

    Attributes:
        class_names: names of the classes; empty if the labels are not classes, or are masks of
            classes without names.
        named: False if the classes are only numbers up to the largest label, so that the network
            may have more classes.
        class_ids: the ids of the classes in the annotations, negative for classes that these lack;
            empty if the data have no such ids.
        calibration: unlabelled samples for calibration in place of training samples; None for
            training samples.
    """

    name: str
    class_names: tuple[str, ...]
    train: Split
    test: Split
    named: bool = True
    class_ids: tuple[int, ...] = ()
    calibration: Split | None = None

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of one stored sample, such as (H, W, C), or of a record's first picture.

        Records without a picture have the shape ().
        """
        samples = self.test.stored
        return fields.picture_shape(samples.dtype) or samples.shape[1:]

    def with_splits(self, change: Callable[[Split], Split]) -> "Dataset":
        """Return the data set with `change` applied to every split."""
        changed = replace(self, train=change(self.train), test=change(self.test))
        if self.calibration is not None:
            changed = replace(changed, calibration=change(self.calibration))
        return changed

    @cached_property
    def unseen(self) -> NDArray[np.bool_]:
        """Whether each training sample is absent from the test samples, [N]."""
        return np.isin(self.train.pixel_hashes, self.test.pixel_hashes, invert=True)

    @property
    def calibrating(self) -> Split:
        """The samples from which calibration draws."""
        return self.train if self.calibration is None else self.calibration


@dataclass(frozen=True)
class CalibrationSet:
    """Samples for calibration, and their indices in `Dataset.calibrating`."""

    split: Split
    indices: NDArray[np.int64]

    @property
    def digest(self) -> str:
        """SHA-256 of the indices (int64, little endian), in hexadecimal."""
        return hashlib.sha256(self.indices.astype("<i8").tobytes()).hexdigest()


def load_cached(
    name: str,
    class_names: tuple[str, ...],
    source: str,
    read: Callable[[Side], tuple[NDArray[Any], NDArray[np.int64]]],
    keys: Mapping[Side, cache.Key],
    module: str,
    cache_root: Path,
) -> Dataset:
    """Return a data set from the cache; if it is not there, `read` reads its samples [N, ...].

    Args:
        read: returns the samples and their classes [N] of one side.
        keys: the cache key of each split, without the hash of the code.
        module: the `__name__` of the module of `read`, whose code is part of the key.
    """

    def open_split(side: Side) -> Split:
        def make(folder: Path) -> None:
            samples, labels = read(side)
            np.save(folder / "images.npy", samples)
            np.save(folder / "labels.npy", labels)
            np.save(folder / "hashes.npy", hash_samples(samples))

        folder = cache.entry(cache_root, name, {**keys[side], "code": code.behind(module)}, make)
        samples = np.asarray(np.load(folder / "images.npy", mmap_mode="r"))
        labels = np.load(folder / "labels.npy")
        hashes = np.load(folder / "hashes.npy")
        return Split(samples, labels, source, hashes=hashes)

    return Dataset(name, class_names, open_split("train"), open_split("test"))
