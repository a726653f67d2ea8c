"""Trains MLPerf Tiny's ResNet8 on the embedded data set `shapes` and saves it as Keras .h5.

    python -m studies.train_shapes                  replaces resnet8ptq/data/shapes/resnet8.h5
    python -m studies.train_shapes epochs=18 output=PATH

An epoch has 20,000 new pictures; training takes about six minutes on two cores. The default
arguments made the weights of this package. The seeds are fixed, but sums in several threads may
differ in the last digit, so a second run may give slightly different weights.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import keras
import numpy as np
from keras import layers

from resnet8ptq.core import command, files
from resnet8ptq.data.shapes import WEIGHTS
from resnet8ptq.data.shapes.drawing import CLASS_NAMES, SIDE, draw, draw_seeded

_SEED = 1  # of the weights and of the order of the pictures
_PICTURES_SEED = 1000  # plus the epoch; the seeds of the published splits are 1 and 2
_PER_CLASS = 2000  # pictures drawn for each epoch
_BATCH = 64
_PEAK_RATE = 2e-3

_Convolution = partial(
    layers.Conv2D,
    padding="same",
    kernel_initializer="he_normal",
    kernel_regularizer=keras.regularizers.L2(1e-4),
)


def _normalised(x: keras.KerasTensor, filters: int, strides: int = 1) -> keras.KerasTensor:
    return layers.BatchNormalization()(_Convolution(filters, 3, strides=strides)(x))


def _rectify(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.Activation("relu")(x)


def build(width: int = 16) -> keras.Model:
    """Return MLPerf Tiny's ResNet8: float32 [N,32,32,3] pixels 0..255 to softmax [N,10].

    Args:
        width: channels of the first layers; 16 in MLPerf Tiny.
    """
    pixels = keras.Input((SIDE, SIDE, 3))
    x = _rectify(_normalised(pixels, width))
    for filters, strides in ((width, 1), (2 * width, 2), (4 * width, 2)):
        y = _normalised(_rectify(_normalised(x, filters, strides)), filters)
        if strides > 1:  # the shortcut shrinks too; it has no batch normalization
            x = _Convolution(filters, 1, strides=strides)(x)
        x = _rectify(layers.Add()([x, y]))
    x = layers.Flatten()(layers.AveragePooling2D(SIDE // 4)(x))
    scores = layers.Dense(len(CLASS_NAMES), activation="softmax", kernel_initializer="he_normal")(x)
    return keras.Model(pixels, scores)


def train(epochs: int) -> keras.Model:
    """Train a network on new pictures in every epoch, so that none is seen twice."""
    keras.utils.set_random_seed(_SEED)
    model = build()
    steps = epochs * -(-_PER_CLASS * len(CLASS_NAMES) // _BATCH)
    model.compile(
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(_PEAK_RATE, steps)),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    for epoch in range(epochs):
        images, labels = draw_seeded(_PICTURES_SEED + epoch, _PER_CLASS)
        history = model.fit(images.astype(np.float32), labels, batch_size=_BATCH, verbose=0).history
        loss, accuracy = history["loss"][-1], history["accuracy"][-1]
        print(f"epoch {epoch + 1}/{epochs}: loss {loss:.3f}, accuracy {accuracy:.4f}", flush=True)
    return model


@dataclass
class Arguments:
    """The key=value arguments of `python -m studies.train_shapes`."""

    epochs: int = 18
    output: str = str(WEIGHTS)


def main() -> None:
    """Train, save, and print the accuracy on the test split."""
    arguments = command.parse_words(sys.argv[1:], Arguments, __doc__)
    model = train(arguments.epochs)
    with files.atomic(Path(arguments.output)) as temporary:
        model.save(temporary, include_optimizer=False)
    images, labels = draw("test")
    scores = model.predict(images.astype(np.float32), batch_size=250, verbose=0)
    accuracy = float((np.argmax(scores, axis=1) == labels).mean())
    print(f"test accuracy {accuracy:.4f}; saved {arguments.output}")


if __name__ == "__main__":
    main()
