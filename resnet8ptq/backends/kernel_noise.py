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
from resnet8ptq.tasks.scoring.distortion import sqnr_db

Array = NDArray[Any]

SAMPLES = 16
NEAR_DB = 6.0  # a quarter of the noise


@dataclass(frozen=True)
class KernelNoise:
    """The SQNR of the kernels against the file's definition, and of each against FP32.

    All are in dB, and infinite without noise.

    Attributes:
        quantization_db: of the definition against FP32; None if the kernels' SQNR reaches the
            limit, because it is then not measured.
        computed_db: of the kernels' outputs against FP32; minus infinity if not measured.
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
            run_fp32: returns FP32's outputs; called only if the kernels' SQNR is below `limit_db`.
        """
        kernels_db = _sqnr_db(defined, computed)
        if kernels_db >= limit_db:
            return cls(kernels_db, quantization_db=None)
        fp32 = run_fp32()
        return cls(
            kernels_db,
            quantization_db=_sqnr_db(fp32, defined),
            computed_db=_sqnr_db(fp32, computed),
        )

    @property
    def exceeds(self) -> bool:
        """Whether the kernels miss the limit, and add more noise than the quantization."""
        is_noisy = self.quantization_db is not None and self.kernels_db < self.quantization_db
        return is_noisy and not self.is_nearer

    @property
    def is_nearer(self) -> bool:
        """Whether the kernels are far nearer to FP32 than what stands for the definition."""
        return (
            self.quantization_db is not None and self.computed_db > self.quantization_db + NEAR_DB
        )

    def describe(self) -> str:
        """Return both SQNRs as text."""
        return (
            f"more noise (SQNR {self.kernels_db:.1f} dB) than the quantization "
            f"({self.quantization_db:.1f} dB)"
        )

    def to_params(self) -> dict[str, str]:
        """Return the kernels' SQNR as a param; empty if they are exact."""
        if math.isinf(self.kernels_db):
            return {}
        return {"kernels_sqnr_db": f"{self.kernels_db:.1f}"}


def _sqnr_db(signal: Sequence[Array], values: Sequence[Array]) -> float:
    value = sqnr_db(signal, values)
    return math.inf if value is None else value


def draw_batch(calibration: Split, most: int = SAMPLES) -> Array | None:
    """Return a few calibration samples as one batch; None if there are none (all ranges preset)."""
    count = min(calibration.limit(most), len(calibration))
    return calibration.inputs(np.arange(count)) if count else None
