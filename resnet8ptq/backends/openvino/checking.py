"""Compares a file on OpenVINO's integer kernels with the same file in float arithmetic.

The file defines its outputs, and integer kernels should give them but for rounding. With OpenVINO
2026.4 they do not where sums saturate, where a transformation to integers is wrong, and, beyond the
first sample of a batch, behind some fused operators.
"""

import logging
from dataclasses import replace

import numpy as np

from resnet8ptq.backends.contract import Artifact
from resnet8ptq.backends.openvino.predictor import open_network
from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.core import machine
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.distortion import KERNELS_DB, sqnr_db

log = logging.getLogger(__name__)

SAMPLES = 16


def check(
    config: QuantizationConfig,
    artifact: Artifact,
    model: Fp32Model,
    calibration: Split,
    runtime: Runtime,
) -> Artifact:
    """Return the artifact with the SQNR of the kernels; warn if it is below the quantization's.

    Args:
        model: the FP32 network.
        calibration: a few of these samples run in one batch, and in float one by one.
    """
    count = min(calibration.limit(SAMPLES), len(calibration))
    if not count:  # all ranges are given
        return artifact
    samples = calibration.inputs(np.arange(count))
    exact = open_network(artifact.path, runtime.threads, on_integers=False)
    singles = zip(*(exact(samples[n : n + 1]) for n in range(count)), strict=True)
    defined = [np.concatenate(outputs) for outputs in singles]
    computed = open_network(artifact.path, runtime.threads)(samples)
    kernels = sqnr_db(defined, computed)
    if kernels is None:  # equal
        return artifact
    quantization = sqnr_db(open_runner(str(model.onnx_path), runtime.threads)(samples), defined)
    if quantization is not None and kernels < min(quantization, KERNELS_DB):
        saturates = not (config.reduce_range or machine.has_vnni())
        log.warning(
            "backend=%s: on %d calibration samples OpenVINO's integer kernels add more noise "
            "(SQNR %.1f dB) than the quantization (%.1f dB): %s",
            *(config.backend.name, count, kernels, quantization),
            "this CPU has no VNNI, and 16-bit sums saturate; reduce_range=true avoids it"
            if saturates
            else "try backend=onnx",
        )
    return replace(artifact, details=artifact.details | {"kernels_sqnr_db": f"{kernels:.1f}"})
