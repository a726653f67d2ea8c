"""Train MLPerf Tiny's ResNet8 on the embedded data set `shapes` and save it as Keras .h5.

    python -m resnet8ptq.data.shapes.train [--epochs N] [--output PATH]

The weights shipped next to this file were made with the default arguments. The seeds are fixed,
but sums in several threads may differ in the last digit, so a second run need not give the same
weights bit for bit.
"""

import argparse
import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np
from keras import layers

from resnet8ptq.data.shapes import WEIGHTS
from resnet8ptq.data.shapes.pictures import CLASS_NAMES, SIDE, draw, draw_seeded

_SEED = 1  # of the weights and of the order of the pictures
_PICTURES_SEED = 1000  # plus the epoch: far from the seeds of the published splits
_PER_CLASS = 2000  # pictures drawn for each epoch
_BATCH = 64
_PEAK_RATE = 2e-3


def _convolve(
    x: keras.KerasTensor, filters: int, size: int = 3, strides: int = 1
) -> keras.KerasTensor:
    return layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding="same",
        kernel_initializer="he_normal",
        kernel_regularizer=keras.regularizers.L2(1e-4),
    )(x)


def _normalise(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.BatchNormalization()(x)


def _rectify(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.Activation("relu")(x)


def build() -> keras.Model:
    """MLPerf Tiny's ResNet8: float32 [N,32,32,3] pixels 0..255 to softmax [N,10]."""
    pixels = keras.Input((SIDE, SIDE, 3))
    x = _rectify(_normalise(_convolve(pixels, 16)))
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        y = _rectify(_normalise(_convolve(x, filters, strides=strides)))
        y = _normalise(_convolve(y, filters))
        if strides > 1:  # the shortcut has to shrink along; it has no batch normalization
            x = _convolve(x, filters, size=1, strides=strides)
        x = _rectify(layers.Add()([x, y]))
    x = layers.Flatten()(layers.AveragePooling2D(SIDE // 4)(x))
    scores = layers.Dense(len(CLASS_NAMES), activation="softmax", kernel_initializer="he_normal")(x)
    return keras.Model(pixels, scores)


def train(epochs: int) -> keras.Model:
    """Train on pictures drawn afresh for every epoch, so that none is seen twice."""
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


def save(model: keras.Model, path: Path) -> None:
    """Save in the legacy .h5 format without optimizer state; never leaves half a file."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        loose, tight = Path(folder) / "loose.h5", Path(folder) / "tight.h5"
        model.save(loose, include_optimizer=False)
        _repack(loose, tight)
        tight.replace(path)


def _repack(source: Path, target: Path) -> None:
    """Copy an HDF5 file with the compact groups of HDF5 1.8: a tenth smaller, same content."""
    with h5py.File(source) as old, h5py.File(target, "w", libver=("v108", "v108")) as new:

        def copy(name: str, item: h5py.Group | h5py.Dataset) -> None:
            if isinstance(item, h5py.Dataset):
                new[name] = item[()]
            else:
                new.require_group(name)
            new[name].attrs.update(item.attrs)

        old.visititems(copy)
        new.attrs.update(old.attrs)


def accuracies(model: keras.Model) -> tuple[float, dict[str, float]]:
    """Accuracy on the test split, 0..1: of all pictures, and of those of each class."""
    images, labels = draw("test")
    scores = model.predict(images.astype(np.float32), batch_size=250, verbose=0)
    right = np.argmax(scores, axis=1) == labels
    each = {name: float(right[labels == i].mean()) for i, name in enumerate(CLASS_NAMES)}
    return float(right.mean()), each


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m resnet8ptq.data.shapes.train",
        description="Train MLPerf Tiny's ResNet8 on the embedded data set `shapes`, print its "
        "accuracy on the test split and save it as a Keras .h5 file without optimizer state. "
        "Takes about six minutes on two cores.",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=18,
        metavar="N",
        help="rounds of 20,000 new pictures each (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=WEIGHTS,
        metavar="PATH",
        help="the .h5 file to write (default: resnet8.h5 next to this script, which is replaced)",
    )
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    if arguments.output.suffix != ".h5" or not arguments.output.parent.is_dir():
        parser.error("--output must be a .h5 file in a folder that exists")

    model = train(arguments.epochs)
    save(model, arguments.output)
    overall, each = accuracies(model)
    for name, accuracy in each.items():
        print(f"{name:>10} {accuracy:.4f}")
    print(f"test accuracy {overall:.4f}; saved {arguments.output}")


if __name__ == "__main__":
    main()
