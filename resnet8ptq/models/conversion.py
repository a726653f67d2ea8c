"""From a Keras or ONNX file to ONNX, with the gate that both frameworks agree with the original.

Runs in a process of its own (see `model.load`): nothing in the main process imports TensorFlow.
"""

import json
import os
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.errors import ModelError, ParityError
from resnet8ptq.core.text import one_line
from resnet8ptq.models.folding import Preprocessing, preprocess
from resnet8ptq.models.sources import onnx
from resnet8ptq.models.sources.keras import _import_keras
from resnet8ptq.models.sources.onnx import Predict

PARITY_IMAGES = 1000
PARITY_TOLERANCE = 1e-4  # of a probability
MAX_CONVERSION_S = 3600

UNFOLDED, FOLDED, RECORD = "unfolded.onnx", "folded.onnx", "conversion.json"


@dataclass(frozen=True)
class Conversion:
    """What a conversion found.

    Attributes:
        parity: largest difference of probabilities from the original, by framework and file.
        source_opset: of the original; for Keras, as exported.
        preprocessing: what folding changed, or why it failed.
        without_torch: why there is no torch module, for each file of which there is none.
    """

    parity: dict[str, float]
    source_opset: int
    opset: int
    preprocessing: Preprocessing
    without_torch: dict[str, str] = field(default_factory=dict)


def is_onnx(path: Path) -> bool:
    """Tell by its name: ONNX files do not begin with a fixed sequence of bytes."""
    return path.suffix.lower() == ".onnx"


def read_record(folder: Path) -> Conversion:
    """Return what `convert` wrote into `folder`."""
    record = json.loads((folder / RECORD).read_text())
    return Conversion(**{**record, "preprocessing": Preprocessing(**record["preprocessing"])})


def limit_process() -> None:
    """Limit this process to the machine's memory, and to one hour of each of its cores.

    A file may ask for more than it holds: a constant of 10**12 zeros, a loop without end.
    """
    import resource

    bytes_there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    seconds = MAX_CONVERSION_S * (os.cpu_count() or 1)
    for kind, most in ((resource.RLIMIT_DATA, bytes_there), (resource.RLIMIT_CPU, seconds)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(
            kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )


def convert(source: Path, folder: Path, images: NDArray[np.uint8], classes: int) -> None:
    """Write `unfolded.onnx`, `folded.onnx` and `conversion.json` into `folder`.

    Where folding fails, `folded.onnx` is left out, and the record says why.

    Args:
        source: a Keras .h5 or .keras file, or an .onnx file.
        folder: an existing, empty folder.
        images: [n, H, W, C] uint8, on which the frameworks must agree.
        classes: how many outputs the network must have.

    Raises:
        ModelError: not a model, unsafe, NaN in its weights, or shapes that do not fit.
        ParityError: ONNX Runtime or torch disagree with the original.
    """
    warnings.simplefilter("ignore")  # TensorFlow's and tf2onnx's own deprecations
    load = onnx.import_file if is_onnx(source) else _import_keras
    pixels = images.astype(np.float32)
    try:
        predict, source_opset, opset = load(source, folder / UNFOLDED, images.shape[1:], classes)
        preprocessing = preprocess(folder / UNFOLDED, folder / FOLDED)
        written = [UNFOLDED] if preprocessing.failure else [UNFOLDED, FOLDED]
        expected = _in_batches(predict, pixels)
        parity, without_torch = _check([folder / name for name in written], pixels, expected)
    except ModelError:
        raise
    except Exception as error:  # Keras, tf2onnx, ONNX and onnx2torch each have their own
        raise ModelError(f"{source}: cannot be converted ({one_line(error)})") from None
    record = Conversion(parity, source_opset, opset, preprocessing, without_torch)
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=2))


def _check(
    paths: list[Path], pixels: NDArray[np.float32], expected: NDArray[np.float32]
) -> tuple[dict[str, float], dict[str, str]]:
    """Compare each graph in each framework with the original; return where torch cannot, too."""
    parity, without_torch = {}, {}
    for path in paths:
        label = f"onnx, {path.stem}"
        parity[label] = _compare(_in_batches(_onnx_predict(path), pixels), expected, label)
        label = f"torch, {path.stem}"
        try:
            probabilities = _in_batches(_torch_predict(path), pixels)
        except Exception as error:  # ModelError, or any that onnx2torch's modules raise
            without_torch[path.name] = " ".join(str(error).split()).removeprefix(f"{path}: ")[:300]
        else:
            parity[label] = _compare(probabilities, expected, label)
    return parity, without_torch


def _onnx_predict(path: Path) -> Predict:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {"input": batch})[0]


def _torch_predict(path: Path) -> Predict:
    import torch

    from resnet8ptq.graph.torch_module import load_torch_module

    module = load_torch_module(path)

    def predict(batch: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.inference_mode():
            return np.asarray(module(torch.from_numpy(batch)).numpy())

    return predict


def _in_batches(predict: Predict, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([predict(pixels[i : i + 100]) for i in range(0, len(pixels), 100)])


def _compare(got: NDArray[np.float32], expected: NDArray[np.float32], label: str) -> float:
    difference = float(np.abs(got - expected).max())
    flipped = int((got.argmax(1) != expected.argmax(1)).sum())
    if flipped or not difference <= PARITY_TOLERANCE:  # `not <=` catches NaN
        raise ParityError(
            f"{label}: differs from the original on {flipped} of {len(expected)} top-1 classes, "
            f"probabilities by up to {difference:.2e} (allowed: 0 and {PARITY_TOLERANCE:.0e})"
        )
    return difference
