"""Runs a structure through a backend as a user's run does, and says what came of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx

from resnet8ptq import dispatch
from resnet8ptq.api.networks import find_network, list_inputs
from resnet8ptq.api.samples import find_samples
from resnet8ptq.core import cache
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.tasks import deviation
from tests.helpers.configs import make_config
from tests.zoo import framework_networks, onnx_networks, variations  # noqa: F401  # they register structures
from tests.zoo.registry import STRUCTURES, Network, Samples

EACH = {  # of every structure
    "onnx int8": ("backend=onnx", "dtype=int8"),
    "onnx u8s8": ("backend=onnx", "dtype=u8s8"),
    "onnx qoperator": ("backend=onnx", "dtype=u8s8", "format=qoperator"),
    "onnx dynamic": ("backend=onnx", "method=dynamic"),
    "onnx weight_only": ("backend=onnx", "method=weight_only", "dtype=w8"),
    "torch fx": ("backend=torch",),
    "torch pt2e": ("backend=torch_pt2e",),
    "tflite": ("backend=tflite",),
    "openvino": ("backend=openvino",),
    "openvino_nncf": ("backend=openvino_nncf",),
    "executorch": ("backend=executorch",),
}
SOME = {  # of the structures that name them
    "file": ("backend=file",),
    "onnx percentile": ("backend=onnx", "dtype=u8s8", "calib=percentile"),
    "onnx weight_only w4": ("backend=onnx", "method=weight_only", "dtype=w4"),
    "tflite percentile": ("backend=tflite", "calib=percentile"),
    "tflite corrected": ("backend=tflite", "corrections.bias_correction=true"),
}
FLOWS = EACH | SOME
# NNCF's ranges are means over the samples, which cut off the largest values of heavy tails.
LEAST_OF_FLOW = {"openvino_nncf": 8.0}
COMMON = (
    *("per_channel=true", "latency.enabled=false", "threads=1", "evaluate.batch_size=10"),
    *("evaluate.choice=none", "task=deviation"),
)
EXACT_DB = 200.0  # in place of infinity, for equal outputs


@dataclass(frozen=True)
class Outcome:
    """The result of one structure in one flow: the SQNR of its worst output, or the reason."""

    sqnr_db: float | None
    reason: str = ""


class Recorder:
    """An open run that keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def run(name: str, flow: str, folder: Path) -> Outcome:
    """Quantize a structure of the registry by a flow; see `run_network`."""
    return run_network(STRUCTURES[name].build(), FLOWS[flow], folder)


def run_network(network: Network, words: tuple[str, ...], folder: Path) -> Outcome:
    """Quantize, reload, run and compare with FP32; `folder` gets the run's files.

    The calibration samples are the reported ones, a hundredth larger: what lies outside of the
    range of other samples is no fault of a structure.
    """
    root = cache.folder(None)
    samples = {"train": enlarge(network.samples), "test": dict(network.samples)}
    about_data, few = find_samples(samples, root, takes=list_inputs(network.model))
    about_network = find_network(network.model, None, few, root)
    if words[0] == "backend=file":
        assert network.file is not None
        onnx.save(network.file, folder / "file.onnx")
        words = (*words, f"backend.path={folder / 'file.onnx'}")
    config = make_config(*about_data, *about_network, *COMMON, *words)
    with mock.patch.object(deviation, "RESAMPLES", 99):  # no interval is asked for
        result = dispatch.run_or_analyse(resolve(config), folder, Recorder())
    if result.measurement is None:
        return Outcome(None, result.reason)
    metrics = result.to_metrics()
    return Outcome(metrics.get("sqnr_db", EXACT_DB))


def enlarge(samples: Samples) -> dict[str, Any]:
    """Return samples that are a hundredth larger; integers in another order along a sample."""
    return {
        name: np.roll(values, 1, -1) if values.dtype.kind in "iub" else np.float32(1.01) * values
        for name, values in samples.items()
    }
