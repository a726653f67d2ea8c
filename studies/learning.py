"""Times learned rounding and reconstruction on the CPU and on a GPU.

python -m studies.learning NETWORK.onnx IMAGES.npy ITERATIONS cpu,cuda

The network is a converted one, such as `model.onnx` of an entry `fp32` in the cache; the images are
its inputs [N, ...]. Needs ONNX, ONNX Runtime, onnx2torch and torch only. Prints, for each device
and method, seconds and the squared error of the layers' outputs relative to nearest rounding:
the median over the layers for AdaRound, that of the last layer for reconstruction.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core.machine import Runtime
from resnet8ptq.corrections import adaround, layers, reconstruction
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.data.dataset import Split
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan, Selection

SEED = 42


def measure(network: Path, samples: Split, iterations: int, device: str, cache: Path) -> None:
    """Learn by both methods on a device, with an empty cache; print a line for each method."""
    proto = onnx.load(network)
    setting = CorrectionSettings(
        weights=Plan(WeightScheme("int8", per_channel=True)),
        selection=Selection(),
        samples=samples,
        calib=CalibConfig(name="minmax"),
        runtime=Runtime(cache, os.cpu_count() or 1, device=device),
        activations=ActivationScheme(),
        float_output=False,
    )
    nearest = layers.errors(proto, proto, setting)

    start = time.perf_counter()
    rounded = adaround.learn_rounding(proto, setting, iterations, SEED)
    seconds = time.perf_counter() - start
    errors = layers.errors(proto, rounded, setting)
    ratio = float(np.median([errors[name] / nearest[name] for name in nearest]))
    print(f"{device}, adaround: {seconds:.1f} s, error {ratio:.3f} of nearest rounding")

    start = time.perf_counter()
    rebuilt, _ = reconstruction.reconstruct(network, setting, iterations, SEED)
    seconds = time.perf_counter() - start
    errors = layers.errors(proto, rebuilt, setting)
    last = list(errors)[-1]
    ratio = errors[last] / nearest[last]
    print(f"{device}, reconstruction: {seconds:.1f} s, error {ratio:.3f} of nearest rounding")


def main() -> None:
    """Measure on each device."""
    network, images, iterations, devices = sys.argv[1:]
    samples = Split(np.load(images).astype(np.float32), None, "images")
    for device in devices.split(","):
        with tempfile.TemporaryDirectory() as cache:
            measure(Path(network), samples, int(iterations), device, Path(cache))


if __name__ == "__main__":
    main()
