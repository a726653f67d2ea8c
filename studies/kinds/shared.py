"""Published networks with their data, in the folder that SHARED_NETWORKS names."""

import os
from pathlib import Path

import numpy as np

from benchmarks.setting import REPO
from studies.kinds.subjects import AbsentError, write_samples


def find(*names: str) -> Path:
    """Return a file or folder below SHARED_NETWORKS."""
    root = os.environ.get("SHARED_NETWORKS", "")
    path = Path(root, *names)
    if not root or not path.exists():
        raise AbsentError(f"SHARED_NETWORKS: {'/'.join(names)}")
    return path


def resnet8(folder: Path) -> tuple[str, ...]:
    """MLPerf Tiny's ResNet8 on CIFAR-10."""
    if not os.environ.get("CIFAR10_DIR"):
        raise AbsentError("CIFAR-10: set CIFAR10_DIR")
    return ("data=cifar10", f"model.path={find('models', 'pretrainedResnet.h5')}")


def resnet_large(folder: Path) -> tuple[str, ...]:
    """MLPerf Tiny's larger ResNet, a `.tflite` file."""
    find("ic02")
    return ("benchmark=ic02", f"benchmark.folder={find()}")


def keywords(folder: Path) -> tuple[str, ...]:
    """MLPerf Tiny's keyword spotting: depthwise convolutions on MFCC."""
    find("kws")
    return ("benchmark=kws", f"benchmark.folder={find()}")


def wake_words(folder: Path) -> tuple[str, ...]:
    """MLPerf Tiny's visual wake words, with 132 pictures."""
    find("vww")
    return ("benchmark=vww", f"benchmark.folder={find()}")


def anomalies(folder: Path) -> tuple[str, ...]:
    """MLPerf Tiny's autoencoder of log-mel frames, on synthetic frames."""
    path = find("ad", "ad01_fp32.tflite")
    random = np.random.default_rng(31)
    level = random.normal(-30, 8, (600, 1, 1))
    slope = np.linspace(8, -12, 128)
    frames = level + slope + random.normal(0, 3, (600, 5, 128))
    values = frames.reshape(600, 640).astype(np.float32)
    samples = {"x_train": values[:300], "x_test": values[300:]}
    return (*write_samples(folder, samples), f"model.path={path}")


def mobilenet_v1(folder: Path) -> tuple[str, ...]:
    """MobileNetV1 0.25 with pictures of COCO, without labels."""
    pictures = ("data=folder", f"data.root={find('coco', 'images')}", "data.labels=none")
    size = ("preprocess=keras_mobilenet", "preprocess.size=224")
    return (*pictures, *size, f"model.path={find('networks', 'mobilenet_v1_0.25_224.h5')}")


def mobilenet_v2(folder: Path) -> tuple[str, ...]:
    """MobileNetV2 0.5 that recognizes persons, with pictures of COCO, without labels."""
    pictures = ("data=folder", f"data.root={find('coco', 'images')}", "data.labels=none")
    size = ("preprocess=symmetric", "preprocess.size=128")
    return (*pictures, *size, f"model.path={find('networks', 'mobilenet_v2_128_0.5.onnx')}")


def faces(folder: Path) -> tuple[str, ...]:
    """UltraFace: boxes and scores of faces, with pictures of COCO, without labels."""
    from PIL import Image

    paths = sorted(find("coco", "images").glob("*.jpg"))[:120]
    pictures = np.empty((len(paths), 3, 240, 320), np.float32)
    for row, path in enumerate(paths):
        picture = Image.open(path).convert("RGB").resize((320, 240))
        pictures[row] = (np.asarray(picture).astype(np.float32).transpose(2, 0, 1) - 127) / 128
    samples = {"input_train": pictures[:60], "input_test": pictures[60:]}
    path = find("networks", "version-RFB-320.onnx")
    return (*write_samples(folder, samples), f"model.path={path}")


def yolox(folder: Path) -> tuple[str, ...]:
    """YOLOX-nano with the boxes of 200 pictures of COCO."""
    images = f"data.images={find('coco', 'images')}"
    boxes = f"data.annotations={find('coco', 'instances.json')}"
    path = find("detectors", "yolox_nano.onnx")
    return ("data=coco", "task=detection", "preprocess=yolox", images, boxes, f"model.path={path}")


def vit(folder: Path) -> tuple[str, ...]:
    """A vision transformer on CIFAR-10, with all test pictures."""
    if not os.environ.get("CIFAR10_DIR"):
        raise AbsentError("CIFAR-10: set CIFAR10_DIR")
    return ("data=cifar10", "preprocess=unit", f"model.path={find('vit', 'vit_cifar10.onnx')}")


def digits(folder: Path) -> tuple[str, ...]:
    """The model zoo's network for MNIST."""
    path = find("mnist", "mnist.onnx")
    return ("data=arrays", f"data.root={path.parent}", "preprocess=raw", f"model.path={path}")


def phrases(folder: Path) -> tuple[str, ...]:
    """The encoder of the tests' phrases: attention on text."""
    from tests.helpers import phrases as written

    path = written.NETWORK.relative_to(REPO)
    return (*written.data_settings(folder), f"model.path={path}")
