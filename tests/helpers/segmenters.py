"""Pictures of coloured squares with masks, and a network that finds the classes of their pixels."""

from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from PIL import Image

from tests.helpers.assembling import assemble

SIZE, CELL = 64, 16
NAMES = ("ground", "red", "green", "blue")


def write_pictures(folder: Path, count: int = 24, kind: str = "palette") -> Path:
    """Write `folder`/images and `folder`/masks, PNG files with a palette or grey values."""
    random = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        pixels = random.integers(0, 40, (SIZE, SIZE, 3), np.uint8)
        labels = np.zeros((SIZE, SIZE), np.uint8)
        for position in random.choice((SIZE // CELL) ** 2, 6, replace=False):
            row, column = (CELL * side for side in divmod(int(position), SIZE // CELL))
            area = slice(row, row + CELL), slice(column, column + CELL)
            labels[area] = 1 + random.integers(3)
            pixels[(*area, labels[row, column] - 1)] = random.integers(150, 255)
        labels[0] = 255
        mask = Image.fromarray(labels)
        if kind == "palette":
            mask.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
        mask.save(folder / "masks" / f"{number}.png")
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
    return folder


def overrides(folder: Path) -> list[str]:
    """Return what a run of them is told, but for the network."""
    masked = (f"data.root={folder / 'images'}", f"data.masks={folder / 'masks'}")
    return ["data=folder", *masked, f"data.classes=[{','.join(NAMES)}]"]


def write_network(path: Path) -> Path:
    """Write a network [N, 3, 64, 64] -> logits [N, 4, 16, 16] of pixels 0..255."""
    weights = np.zeros((4, 3, 4, 4), np.float32)
    weights[range(1, 4), range(3)] = 1 / (255 * 16)
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["c0"], "conv0", strides=[4, 4]),
        helper.make_node("Relu", ["c0"], ["r0"], "relu0"),
        helper.make_node("Conv", ["r0", "w1"], ["logits"], "conv1"),
    ]
    constants = {
        **{"w0": weights, "b0": np.array([0.35, 0, 0, 0], np.float32)},
        "w1": np.eye(4, dtype=np.float32).reshape(4, 4, 1, 1),
    }
    takes, gives = {"x": ["N", 3, SIZE, SIZE]}, {"logits": ["N", 4, SIZE // 4, SIZE // 4]}
    onnx.save(assemble(nodes, takes, gives, constants, opset=13), path)
    return path


def write_restorer(path: Path) -> Path:
    """Write a network [N, 3, 64, 64] of pixels 0..255 -> pixels 0..1, a little blurred."""
    blur = np.zeros((3, 3, 3, 3), np.float32)
    blur[range(3), range(3)] = np.outer([1, 8, 1], [1, 8, 1]) / 100
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c0"], "conv0"),
        helper.make_node("Conv", ["c0", "w1"], ["y"], "conv1", pads=[1, 1, 1, 1]),
    ]
    scale = np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1) / 255
    sizes = ["N", 3, SIZE, SIZE]
    proto = assemble(nodes, {"x": sizes}, {"y": sizes}, {"w0": scale, "w1": blur}, opset=13)
    onnx.save(proto, path)
    return path
