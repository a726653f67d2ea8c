"""The noise of a runtime's kernels, compared with the noise of quantization.

A quantized file defines its outputs. The outputs of kernels should differ from these by rounding
alone. If kernels add more noise than the quantization, a good file has bad results.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.data.dataset import Split
from resnet8ptq.tasks.scoring.distortion import sqnr_or_infinity

Array = NDArray[Any]

SAMPLES = 16
NEAR_DB = 6.0  # a quarter of the noise


@dataclass(frozen=True)
class KernelNoise:
    """Three SQNRs in dB by `sqnr_or_infinity`, which are infinite without noise.

    Attributes:
        kernels_db: the SQNR of the kernels' outputs against the file's definition.
        quantization_db: the SQNR of the definition against FP32; None if `kernels_db` reaches the
            limit.
        computed_db: the SQNR of the kernels' outputs against FP32; minus infinity if it is not
            measured.
    """

    kernels_db: float
    quantization_db: float | None
    computed_db: float = -math.inf

    @classmethod
    def of(
        cls,
        defined: Sequence[Array],
        computed: Sequence[Array],
        run_fp32: Callable[[], Sequence[Array]],
        limit_db: float,
    ) -> "KernelNoise":
        """Compare the outputs [n, ...] that the file defines with those that its kernels compute.

        Args:
            run_fp32: returns FP32's outputs; called only if `kernels_db` is below the limit.
            limit_db: the value of `kernels_db` from which the noise is accepted.
        """
        kernels_db = sqnr_or_infinity(defined, computed)
        if kernels_db >= limit_db:
            return cls(kernels_db, quantization_db=None)
        fp32 = run_fp32()
        return cls(
            kernels_db,
            quantization_db=sqnr_or_infinity(fp32, defined),
            computed_db=sqnr_or_infinity(fp32, computed),
        )

    @property
    def exceeds(self) -> bool:
        """Whether the kernels miss the limit, and add more noise than the quantization.

        It is False if `is_nearer`, because the definition is then in doubt.
        """
        is_noisy = self.quantization_db is not None and self.kernels_db < self.quantization_db
        return is_noisy and not self.is_nearer

    @property
    def is_nearer(self) -> bool:
        """Whether the kernels' outputs are more than `NEAR_DB` nearer to FP32 than the definition.

        The computation that stands for the definition is then wrong, not the kernels.
        """
        if self.quantization_db is None:
            return False
        return self.computed_db > self.quantization_db + NEAR_DB

    def describe(self) -> str:
        """Return `kernels_db` and `quantization_db` as a part of a warning."""
        return (
            f"more noise (SQNR {self.kernels_db:.1f} dB) than the quantization "
            f"({self.quantization_db:.1f} dB)"
        )

    def to_params(self) -> dict[str, str]:
        """Return `kernels_db` as an MLflow param; empty if it is infinite."""
        if math.isinf(self.kernels_db):
            return {}
        return {"kernels_sqnr_db": f"{self.kernels_db:.1f}"}


def draw_batch(calibration: Split, most: int = SAMPLES) -> Array | None:
    """Return the first calibration samples as one batch; None if there are no samples.

    Args:
        most: the largest batch size; the network or the memory may allow less.
    """
    count = min(calibration.limit(most), len(calibration))
    if count == 0:
        return None
    return calibration.inputs(np.arange(count))
