"""The bare library loop: the same configurations in one plain script, without this project.

    python -m benchmarks.bare MODEL.onnx --grid 24

MODEL.onnx is the converted FP32 network, or MODEL.h5 the Keras file, which tf2onnx converts first.
$CIFAR10_DIR is the folder of CIFAR-10's batches. Each configuration is calibrated, quantized,
written, loaded from its file, and run on all test images; nothing is tracked, compared or drawn.
Prints a line of JSON for each configuration: accuracy, and the seconds that quantizing (with
calibration, writing and loading) and evaluating took.

From this project it imports only the workaround for torchvision's missing operators, so that the
project neither slows nor helps it.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.calibrate import (
    CalibrationMethod,
    create_calibrator,
    save_tensors_data,
)
from torch.ao.quantization import QConfig, get_default_qconfig_mapping
from torch.ao.quantization import observer as observers
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from resnet8ptq.graph.torch_module import load_torch_module  # onnx2torch.convert(path).eval()

Images = NDArray[np.uint8]
Predict = Callable[[NDArray[np.float32]], NDArray[np.float32]]

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
CALIBRATION_BATCH, TEST_BATCH = 100, 256
METHODS = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}
# As this project sets them; the library's 128 bins would leave one threshold for entropy to try.
HISTOGRAMS = {
    "entropy": {"num_bins": 2048, "num_quantized_bins": 128},
    "percentile": {"num_bins": 2048, "percentile": 99.99, "symmetric": False},
}
TYPES = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}  # of activations and weights


class Configuration(NamedTuple):
    """One row of the grid; torch's `int8` is uint8 activations and int8 weights."""

    backend: str
    dtype: str
    calib: str = "minmax"
    per_channel: bool = False


# By the number of combinations; the quarter with torch and uint8 is left out, as FX lacks it.
_CELLS = [("onnx", "int8"), ("onnx", "uint8"), ("torch", "int8")]
GRIDS = {
    4: [Configuration(*cell) for cell in _CELLS],
    24: [Configuration(*c, *rest) for c, *rest in product(_CELLS, METHODS, (False, True))],
}


class _Unpickler(pickle.Unpickler):
    """Loads only arrays: the published files are pickles, which can run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_images(folder: Path, names: list[str]) -> tuple[Images, NDArray[np.int64]]:
    """Return images [N, 32, 32, 3] and labels [N] of CIFAR-10's batches."""
    batches = []
    for name in names:
        with (folder / name).open("rb") as file:
            batches.append(_Unpickler(file, encoding="latin1").load())
    planes = np.concatenate([batch["data"] for batch in batches])
    labels = np.concatenate([batch["labels"] for batch in batches])
    return planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def draw_calibration(images: Images, labels: NDArray[np.int64]) -> Images:
    """Return 100 images of each class: those that `calib.samples_per_class=100 seed=42` draws."""
    random = np.random.default_rng(42)
    members = (np.flatnonzero(labels == label) for label in range(10))
    return images[np.sort(np.concatenate([random.choice(m, 100, replace=False) for m in members]))]


def batches(images: Images, size: int) -> Iterator[NDArray[np.float32]]:
    """Yield raw pixels [<=size, 32, 32, 3] 0..255."""
    for start in range(0, len(images), size):
        yield images[start : start + size].astype(np.float32)


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Hands batches to ONNX Runtime."""

    def __init__(self, arrays: Iterator[NDArray[np.float32]], name: str) -> None:
        self.arrays = arrays
        self.name = name

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        """Return the next batch; None after the last."""
        batch = next(self.arrays, None)
        return None if batch is None else {self.name: batch}


class Onnx:
    """ONNX Runtime: static quantization in QDQ format."""

    def __init__(self, source: Path, options: argparse.Namespace) -> None:
        self.source = source
        self.options = options
        self.input_name = onnx.load(source).graph.input[0].name

    def quantize(self, config: Configuration, calibration: Images, folder: Path) -> Path:
        """Calibrate, quantize and write one configuration."""
        path, table = folder / "model.onnx", folder / "ranges.json"
        if self.options.share_ranges:
            table = folder.parent / f"{config.calib}.json"
        if config.calib in HISTOGRAMS and not table.exists():
            self._collect_histograms(config.calib, calibration, table)
        quantize_static(
            self.source,
            path,
            Reader(batches(calibration, CALIBRATION_BATCH), self.input_name),
            per_channel=config.per_channel,
            activation_type=TYPES[config.dtype],
            weight_type=TYPES[config.dtype],
            calibrate_method=METHODS[config.calib],
            calibration_cache_path=table,  # read where it exists, else written
        )
        return path

    def _collect_histograms(self, method: str, calibration: Images, table: Path) -> None:
        """Calibrate with settings that `quantize_static` does not pass on."""
        with tempfile.TemporaryDirectory() as scratch:
            calibrator = create_calibrator(
                self.source,
                augmented_model_path=str(Path(scratch, "augmented.onnx")),
                calibrate_method=METHODS[method],
                extra_options=HISTOGRAMS[method],
            )
        for batch in batches(calibration, CALIBRATION_BATCH):
            # A call for each batch: one for all would keep every activation of every image.
            calibrator.collect_data(Reader(iter([batch]), self.input_name))
        save_tensors_data(calibrator.compute_data(), table)

    def load_fp32(self) -> Predict:
        """Return the FP32 network."""
        return load(self.source)


class Torch:
    """FX graph mode quantization on oneDNN's integer kernels, saved as TorchScript."""

    def __init__(self, source: Path, options: argparse.Namespace) -> None:
        self.options = options
        torch.set_num_threads(THREADS)
        torch.backends.quantized.engine = "onednn"
        self.module = load_torch_module(source)

    def quantize(self, config: Configuration, calibration: Images, folder: Path) -> Path:
        """Calibrate, quantize and write one configuration."""
        path, example = folder / "model.pt", torch.zeros(1, 32, 32, 3)
        mapping = get_default_qconfig_mapping("onednn").set_global(self._qconfig(config))
        with torch.inference_mode():
            prepared = prepare_fx(copy.deepcopy(self.module), mapping, (example,))
            for batch in batches(calibration, CALIBRATION_BATCH):
                prepared(torch.from_numpy(batch))
            traced = torch.jit.trace(convert_fx(prepared).eval(), example, check_trace=False)
            torch.jit.save(torch.jit.freeze(traced), path)
        return path

    def _qconfig(self, config: Configuration) -> QConfig:
        """Choose observers; torch's histogram observer replaces entropy and percentile."""
        histogram = config.calib != "minmax" and self.options.torch_observer == "histogram"
        activations = observers.HistogramObserver if histogram else observers.MinMaxObserver
        weights, qscheme = (
            (observers.PerChannelMinMaxObserver, torch.per_channel_symmetric)
            if config.per_channel
            else (observers.MinMaxObserver, torch.per_tensor_symmetric)
        )
        return QConfig(
            activations.with_args(dtype=torch.quint8),
            weights.with_args(dtype=torch.qint8, qscheme=qscheme),
        )

    def load_fp32(self) -> Predict:
        """Return the FP32 network."""
        return partial(run_module, self.module)


def convert(source: Path, path: Path) -> None:
    """Write a Keras file's network as ONNX, by tf2onnx alone."""
    import keras
    import tensorflow
    import tf2onnx

    model = keras.models.load_model(source, compile=False)
    (tensor,) = model.inputs
    signature = [tensorflow.TensorSpec(tensor.shape, tensor.dtype, "input")]
    forward = tensorflow.function(partial(model, training=False), input_signature=signature)
    tf2onnx.convert.from_function(forward, signature, opset=13, output_path=str(path))


def load(path: Path, threads: int = THREADS) -> Predict:
    """Load an ONNX or a TorchScript file."""
    if path.suffix == ".pt":
        torch.set_num_threads(threads)
        torch.backends.quantized.engine = "onednn"
        return partial(run_module, torch.jit.load(path))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda batch: session.run(None, {name: batch})[0]


def run_module(module: Any, batch: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the outputs of a torch module."""
    with torch.inference_mode():
        outputs = module(torch.from_numpy(batch))
        return (outputs.dequantize() if outputs.is_quantized else outputs).numpy()


def evaluate(predict: Predict, images: Images, labels: NDArray[np.int64]) -> float:
    """Return the accuracy, a fraction."""
    outputs = np.concatenate([predict(batch) for batch in batches(images, TEST_BATCH)])
    return float((outputs.argmax(axis=1) == labels).mean())


def main() -> None:
    """Run the grid; print a line of JSON for each baseline and configuration."""
    options = parse_arguments()
    data = Path(os.environ["CIFAR10_DIR"])
    calibration = draw_calibration(*read_images(data, [f"data_batch_{n}" for n in range(1, 6)]))
    images, labels = read_images(data, ["test_batch"])
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model
        if model.suffix == ".h5":
            model = Path(scratch, "fp32.onnx")
            convert(options.model, model)
        frameworks: dict[str, Onnx | Torch] = {
            "onnx": Onnx(model, options),
            "torch": Torch(model, options),
        }
        fp32 = [Configuration(name, "fp32") for name in frameworks]
        for number, config in enumerate([*fp32, *GRIDS[options.grid]]):
            framework = frameworks[config.backend]
            folder = Path(scratch, str(number))
            folder.mkdir()
            start = time.perf_counter()
            if config.dtype == "fp32":
                predict = framework.load_fp32()
            else:
                with contextlib.redirect_stdout(io.StringIO()):  # the calibrators print
                    predict = load(framework.quantize(config, calibration, folder))
            loaded = time.perf_counter()
            record = {**config._asdict(), "accuracy": evaluate(predict, images, labels)}
            record |= {"quantize_s": loaded - start, "evaluate_s": time.perf_counter() - loaded}
            print(json.dumps(record), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="the bare library loop")
    parser.add_argument("model", type=Path, help="the FP32 network: ONNX, or Keras (.h5)")
    parser.add_argument("--grid", type=int, choices=GRIDS, default=4, help="combinations")
    parser.add_argument(
        "--torch-observer",
        choices=("histogram", "minmax"),
        default="histogram",
        help="replacement for torch's missing entropy and percentile observers",
    )
    parser.add_argument(
        "--share-ranges",
        action="store_true",
        help="ONNX Runtime calibrates once for each method, not once for each configuration",
    )
    return parser.parse_args()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # FX and TorchScript are deprecated
    main()
