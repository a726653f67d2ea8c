"""Compares LiteRT's fast kernels with its reference kernels on the same TFLite file."""

import logging
from collections.abc import Callable

from resnet8ptq.backends import kernel_noise
from resnet8ptq.backends.contract import Predict
from resnet8ptq.backends.kernel_noise import KernelNoise
from resnet8ptq.core.text import one_line
from resnet8ptq.data.dataset import Split

log = logging.getLogger(__name__)

SAMPLES = 4  # the reference kernels take a second for a picture of 224x224
LIMIT_DB = 20.0  # XNNPACK rounds differently in each layer: ResNet8 with an 8-bit softmax has 29 dB


def compare_kernels(
    name: str,
    open_file: Callable[[bool], Predict],
    open_fp32: Callable[[], Predict],
    calibration: Split,
) -> dict[str, str]:
    """Return the SQNR of the fast kernels against the reference kernels, as an MLflow param.

    The result is empty if the SQNR is not finite, the reference kernels cannot run the file, or
    there are no samples. The function warns if the fast kernels add too much noise
    (`KernelNoise.exceeds`), or if the reference kernels are wrong (`KernelNoise.is_nearer`).

    Args:
        name: the file's name, for the warning.
        open_file: loads the file; with True, for LiteRT's reference kernels, which are slow.
        open_fp32: loads the FP32 network, which runs only if the kernels' SQNR is below `LIMIT_DB`.
        calibration: the file runs on up to `SAMPLES` of these samples.
    """
    samples = kernel_noise.draw_batch(calibration, SAMPLES)
    if samples is None:
        return {}

    # The reference kernels define the outputs, if LiteRT has all of them
    try:
        defined = open_file(True)(samples)
    except (ValueError, RuntimeError) as error:  # LiteRT lacks a reference kernel, such as of ELU
        log.info(
            "%s: its kernels are not compared with LiteRT's reference kernels, which do not run "
            "it (%s)",
            name,
            one_line(error),
        )
        return {}

    # Warn of the kernels with more noise
    computed = open_file(False)(samples)
    noise = KernelNoise.of(
        defined, computed, run_fp32=lambda: open_fp32()(samples), limit_db=LIMIT_DB
    )
    if noise.exceeds:
        log.warning(
            "%s: on %d calibration samples LiteRT's kernels for this CPU add %s of its reference "
            "kernels; compare them on the device that will run the file",
            name,
            len(samples),
            noise.describe(),
        )
    if noise.is_nearer:  # such as 4-bit weights in blocks, which they misread
        log.warning(
            "%s: LiteRT's reference kernels compute it wrongly (SQNR against FP32 %.1f dB, of the "
            "kernels for this CPU %.1f dB): do not run it on them, such as on a microcontroller",
            name,
            noise.quantization_db,
            noise.computed_db,
        )
    return noise.to_params()
