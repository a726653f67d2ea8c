"""A small data set of drawn pictures."""

import numpy as np

from resnet8ptq.data.dataset import Dataset, Split


def make_dataset(per_class: int = 20, classes: int = 3) -> Dataset:
    random = np.random.default_rng(5)
    labels = random.permutation(np.repeat(np.arange(classes), per_class))

    def split(labels: np.ndarray) -> Split:
        images = random.integers(0, 256, (len(labels), 4, 4, 3), dtype=np.uint8)
        return Split(images, labels, "here")

    names = tuple("abcdefghij"[:classes])
    return Dataset("small", names, split(labels), split(np.arange(classes)))


SMALL = make_dataset()
