"""Compares a file on OpenVINO's integer kernels with the same file in float arithmetic.

The file defines its outputs, and integer kernels should differ from them by rounding alone. With
OpenVINO 2026.4 they differ more if sums saturate, or if a transformation to integers is wrong.
After some fused operators, every sample of a batch but the first differs.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends import kernel_noise, kernels
from resnet8ptq.backends.contract import Artifact, Quantizer
from resnet8ptq.backends.kernel_noise import KernelNoise
from resnet8ptq.backends.openvino.predictor import open_network
from resnet8ptq.core import machine
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.scoring.distortion import KERNELS_DB

log = logging.getLogger(__name__)

Array = NDArray[Any]


def compare_kernels(
    quantizer: Quantizer, artifact: Artifact, model: Fp32Model, calibration: Split
) -> dict[str, str]:
    """Return the SQNR of the kernels against float arithmetic; warn if `KernelNoise.exceeds`.

    The result is an MLflow param. It is empty without a finite SQNR, if the file computes in float,
    and without samples.

    Args:
        quantizer: the quantizer that wrote the artifact.
        model: the FP32 network.
        calibration: the file runs on up to `kernel_noise.SAMPLES` of these samples: in one batch on
            integers, one by one in float.

    Raises:
        UnsupportedError: OpenVINO cannot compile the file, or its outputs differ in shape from ONNX
            Runtime's.
    """
    samples = kernel_noise.draw_batch(calibration)
    if samples is None or quantizer.config.computes_in_float:
        return {}
    name = quantizer.config.backend.name
    threads = quantizer.runtime.threads

    # One by one, in float: the outputs that the file defines
    exact = open_network(artifact.path, threads, on_integers=False)
    singles = [exact(samples[number : number + 1]) for number in range(len(samples))]
    defined = [np.concatenate(outputs) for outputs in zip(*singles, strict=True)]
    fp32 = open_runner(str(model.onnx_path), threads)(samples)
    _check_shapes(name, fp32, defined)

    # Integer kernels may differ from that by more than rounding
    computed = quantizer.load(artifact.path, threads).predict(samples)
    noise = KernelNoise.of(defined, computed, run_fp32=lambda: fp32, limit_db=KERNELS_DB)
    if noise.exceeds:
        resolved = quantizer.resolve()
        mend = "try backend=onnx"
        if kernels.saturates(resolved, (), machine.cpu()[1]):
            avoided = kernels.avoid_saturation(resolved)
            mend = f"this CPU has no VNNI, and 16-bit sums saturate; {avoided} avoids it"
        log.warning(
            "backend=%s: on %d calibration samples OpenVINO's integer kernels add %s: %s",
            name,
            len(samples),
            noise.describe(),
            mend,
        )
    return noise.to_params()


def _check_shapes(name: str, fp32: Sequence[Array], outputs: Sequence[Array]) -> None:
    shapes = [list(output.shape) for output in outputs]
    expected = [list(output.shape) for output in fp32]
    if shapes != expected:
        raise UnsupportedError(
            f"backend={name}: OpenVINO returns {shapes} for this network, ONNX Runtime {expected}; "
            "try backend=onnx"
        )
