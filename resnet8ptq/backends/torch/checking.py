"""Compares torch's integer kernels with the float arithmetic that the scales of a module define.

A few kernels of oneDNN return wrong values (torch 2.13), such as those of grouped convolutions with
filters of 16 values.
"""

import copy
import logging
from typing import Any

import torch
from torch.ao.quantization.quantize_fx import convert_fx, convert_to_reference_fx

from resnet8ptq.backends import kernel_noise
from resnet8ptq.backends.kernel_noise import KernelNoise
from resnet8ptq.core.text import one_line
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.torch_module import infer
from resnet8ptq.tasks.scoring.distortion import KERNELS_DB

log = logging.getLogger(__name__)


def convert_checked(prepared: Any, calibration: Split) -> Any:
    """Return a calibrated module with integer kernels; warn if `KernelNoise.exceeds`.

    Args:
        prepared: the module with observers; it must not be used afterwards.
        calibration: up to `kernel_noise.SAMPLES` of these samples run in one batch, for the
            comparison.
    """
    samples = kernel_noise.draw_batch(calibration)
    if samples is None:
        return convert_fx(prepared)

    # Run FP32, the reference that the scales define, and the integer kernels
    copied = copy.deepcopy(prepared)  # the observers of the original see no sample twice
    quantized = convert_fx(prepared)
    try:
        fp32 = infer(copied, samples)
        defined = infer(convert_to_reference_fx(copied), samples)
        computed = infer(quantized, samples)
    except Exception as error:  # an operator that has no reference, or one that tracing refuses
        log.debug("torch's kernels are not compared with float arithmetic: %s", one_line(error))
        return quantized

    # FBGEMM is the engine to compare with, so its own noise needs another backend
    noise = KernelNoise.of(defined, computed, run_fp32=lambda: fp32, limit_db=KERNELS_DB)
    if noise.exceeds:
        engine = torch.backends.quantized.engine
        mend = "backend=onnx" if engine == "fbgemm" else "backend.engine=fbgemm"
        log.warning(
            "backend=torch: on %d calibration samples the integer kernels of %s add %s: try %s",
            len(samples),
            engine,
            noise.describe(),
            mend,
        )
    return quantized
