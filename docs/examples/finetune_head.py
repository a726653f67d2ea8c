"""Train a new head on a network's features, on the training half of a folder of pictures.

    python docs/examples/finetune_head.py root=FOLDER backbone=FILE.h5 output=FILE.keras

The backbone is a Keras classifier with global average pooling; what comes before that is kept as it
is. `resnet8ptq run data=folder data.root=FOLDER model.path=FILE.keras` with the same preprocessing
splits the folder in the same way, so that its test half has not been trained on. That command is
printed at the end.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
from omegaconf import MISSING

from resnet8ptq.config.schema import FolderConfig, PreprocessConfig
from resnet8ptq.core import cache, command, files
from resnet8ptq.data import locate, registry
from resnet8ptq.data.dataset import Split
from resnet8ptq.models.sources.keras import load_keras


@dataclass
class Arguments:
    """What the command line takes, as key=value; the preprocessing is the backbone's own."""

    root: str = MISSING
    backbone: str = MISSING
    output: str = MISSING
    size: int = 224
    scale: float = 1 / 127.5
    mean: float = 1.0
    epochs: int = 200


def find_features(backbone: keras.Model) -> keras.Model:
    """Return the part of a classifier up to its global average pooling, as features [N, count]."""
    pooling = [
        each for each in backbone.layers if isinstance(each, keras.layers.GlobalAveragePooling2D)
    ]
    return keras.Model(backbone.inputs, keras.layers.Flatten()(pooling[-1].output))


def train(features: keras.Model, split: Split, classes: int, epochs: int) -> keras.Model:
    """Return the features with a softmax layer that is trained on them; they stay as they are."""
    values = np.concatenate([features.predict(each, verbose=0) for each in split.batches(32)])
    head = keras.Sequential([keras.Input(values.shape[1:]), keras.layers.Dense(classes, "softmax")])
    head.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    found = head.fit(values, split.labels, epochs=epochs, verbose=0).history["accuracy"][-1]
    print(f"{len(split)} pictures of {classes} classes, training accuracy {found:.4f}")
    return keras.Model(features.inputs, head(features.output))


def main() -> None:
    """Train and save."""
    given = command.parse_words(sys.argv[1:], Arguments, __doc__)
    keras.utils.set_random_seed(0)
    preprocess = PreprocessConfig(size=given.size, scale=given.scale, mean=[given.mean])
    config = locate.find_data(FolderConfig(root=given.root))
    data = registry.read(config, preprocess, cache.folder(None))
    features = find_features(load_keras(Path(given.backbone)))
    model = train(features, data.train, len(data.class_names), given.epochs)
    with files.atomic(Path(given.output)) as temporary:
        model.save(temporary, include_optimizer=False)
    settings = {
        "data": "folder",
        "data.root": config.root,
        "preprocess.size": given.size,
        "preprocess.scale": given.scale,
        "preprocess.mean": given.mean,
        "model.path": given.output,
        "backend": "onnx,torch,tflite",
        "per_channel": "true",  # the depthwise layers of a MobileNet need it
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    print(shlex.join(["resnet8ptq", "run", "-m", *words]))


if __name__ == "__main__":
    sys.exit(command.main(main))
