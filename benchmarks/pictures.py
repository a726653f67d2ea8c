"""A sweep over a network of real size, beside the same in one plain script.

EfficientNet-lite0, as in `calibration`; the pictures are JPEG files in a folder. Both sides read
and resize them, quantize the network twice per channel (u8s8 and uint8, calib=minmax), and compare
the files that they have written with FP32 on the pictures that did not calibrate.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import process
from benchmarks.calibration import draw_pictures
from benchmarks.setting import NO_LATENCY, Record, Setting
from benchmarks.tables import usage_table

SIDE, BATCH, MEAN, STD = 224, 16, 127.0, 128.0
DTYPES = ("u8s8", "uint8")
BARE = "bare loop"


def measure(setting: Setting) -> Record:
    """Run both sides in turns: ours from an empty cache, and again where it has run."""
    folder = setting.fresh()
    model, pictures = folder / "efficientnet_lite0.onnx", folder / "pictures"
    for command in (("calibration", "export", model), ("pictures", "draw", pictures)):
        process.run(setting.module(*map(str, command)), setting.fresh(), setting.environment())
    words = (
        *("-m", f"dtype={','.join(DTYPES)}", "per_channel=true", f"model.path={model}"),
        *("data=folder", f"data.root={pictures}", "data.labels=none", f"preprocess.size={SIDE}"),
        *(f"preprocess.mean=[{MEAN}]", f"preprocess.std=[{STD}]"),
    )

    def sides() -> dict[str, Callable[[], process.Finished]]:
        folder, cache = setting.fresh(), setting.fresh()
        ours = partial(setting.call, folder, cache, *words)
        bare = setting.module("pictures", "bare", model, pictures)
        return {
            BARE: partial(process.run, bare, folder, setting.environment()),
            "run.py -m, cold, latency.enabled=false": partial(ours, NO_LATENCY),
            "run.py -m, warm, latency.enabled=false": partial(ours, NO_LATENCY),
            "run.py -m, warm, default settings": ours,
        }

    return {"usages": setting.call_in_turns(sides)}


def render(record: Record) -> str:
    """Return the section in Markdown."""
    return "\n\n".join(
        [
            "EfficientNet-lite0 by `backend=onnx calib=minmax per_channel=true dtype=u8s8,uint8` "
            "on a folder of 500 pictures (JPEG), half of which calibrate. Cold: from an empty "
            "cache. This includes the conversion of the network, its check, and the search for the "
            "fastest batch size, which the bare loop lacks. Warm: again, with that "
            "cache, from which the outputs of the same files come.",
            usage_table(record["usages"], {BARE: BARE}),
        ]
    )


def draw(folder: Path) -> None:
    """Write the pictures as JPEG files, larger than the network takes them."""
    from PIL import Image

    folder.mkdir()
    for number, picture in enumerate(draw_pictures()):
        Image.fromarray(picture).resize((500, 375)).save(folder / f"{number:03}.jpg")


def run_bare(model: Path, folder: Path) -> None:
    """Quantize and compare by ONNX Runtime alone; print a line of JSON for each dtype."""
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from PIL import Image

    def read(paths: list[Path]) -> NDArray[np.float32]:
        """Return pictures [n, 3, SIDE, SIDE] as the network takes them."""
        pictures = [Image.open(path).convert("RGB").resize((SIDE, SIDE)) for path in paths]
        values = (np.stack([np.asarray(picture, np.float32) for picture in pictures]) - MEAN) / STD
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2))

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Hand out one picture at a time, which takes ONNX Runtime's calibrator least memory."""

        def __init__(self, paths: list[Path]) -> None:
            self.paths = iter(paths)

        def get_next(self) -> dict[str, NDArray[np.float32]] | None:
            path = next(self.paths, None)
            return None if path is None else {"images": read([path])}

    def predict(path: Path) -> NDArray[np.int64]:
        """Return the top class of each test picture."""
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        batches = (read(test[start : start + BATCH]) for start in range(0, len(test), BATCH))
        outputs = [session.run(None, {"images": batch})[0] for batch in batches]
        return np.concatenate(outputs).argmax(axis=1)

    paths = sorted(folder.iterdir())
    calibration, test = paths[::2], paths[1::2]
    expected = predict(model)
    types = {"u8s8": QuantType.QInt8, "uint8": QuantType.QUInt8}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in DTYPES:
            written = Path(scratch, f"{dtype}.onnx")
            quantize_static(
                model,
                written,
                Reader(calibration),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=types[dtype],
            )
            agreement = float((predict(written) == expected).mean())
            print(json.dumps({"dtype": dtype, "agreement": agreement}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="draw pictures, or run the bare loop")
    parser.add_argument("what", choices=["draw", "bare"])
    parser.add_argument("paths", type=Path, nargs="+")
    arguments = parser.parse_args()
    (draw if arguments.what == "draw" else run_bare)(*arguments.paths)
