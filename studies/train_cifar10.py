"""Train MLPerf Tiny's ResNet8 on CIFAR-10 again, with another seed or width, as a Keras file.

    python -m studies.train_cifar10 output=resnet8_s1.h5 seed=1
    python -m studies.train_cifar10 output=resnet8_w24.h5 seed=3 width=24

A recommended recipe must work on networks that were not used to choose it. An epoch takes about a
minute on two cores at width 16. Sums in several threads may differ in the last digit, so a second
run may give slightly different weights.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

from resnet8ptq.core import command, files
from resnet8ptq.data import registry
from resnet8ptq.finetuning.training import augment
from studies.train_shapes import build

BATCH = 128
PEAK_RATE = 4e-3


@dataclass
class Arguments:
    """The key=value arguments of `python -m studies.train_cifar10`."""

    output: str = "resnet8.h5"
    seed: int = 1
    width: int = 16
    epochs: int = 20


def main() -> None:
    """Train, save, and print the accuracy on the test images."""
    arguments = command.parse_words(sys.argv[1:], Arguments, __doc__)
    data = registry.load("cifar10", os.environ["CIFAR10_DIR"])
    images, labels = np.asarray(data.train.stored[:]), data.train.labels
    keras.utils.set_random_seed(arguments.seed)
    random = np.random.default_rng(arguments.seed)
    model = build(arguments.width)
    steps = arguments.epochs * -(-len(images) // BATCH)
    rate = keras.optimizers.schedules.CosineDecay(
        PEAK_RATE / 10, steps, warmup_target=PEAK_RATE, warmup_steps=steps // 5
    )
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    for epoch in range(arguments.epochs):
        shown = augment(images, random).astype(np.float32)
        history = model.fit(shown, labels, batch_size=BATCH, verbose=0).history
        loss, accuracy = history["loss"][-1], history["accuracy"][-1]
        print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.4f}", flush=True)
    with files.atomic(Path(arguments.output)) as temporary:
        model.save(temporary, include_optimizer=False)
    tested = np.asarray(data.test.stored[:]).astype(np.float32)
    scores = model.predict(tested, batch_size=256, verbose=0)
    accuracy = float((np.argmax(scores, axis=1) == data.test.labels).mean())
    print(f"test accuracy {accuracy:.4f}; saved {arguments.output}")


if __name__ == "__main__":
    main()
