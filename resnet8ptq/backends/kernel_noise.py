"""The noise of a runtime's kernels beside that of quantization.

A quantized file defines its outputs. The kernels that run it should differ from them by rounding
alone; where they add more noise than the quantization, a good file has bad results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.data.dataset import Split
from resnet8ptq.tasks.distortion import sqnr_db

Array = NDArray[Any]

SAMPLES = 16


@dataclass(frozen=True)
class KernelNoise:
    """The SQNR of the kernels against the file's definition, and of the definition against FP32.

    Both in dB; infinite without noise.
    """

    kernels_db: float
    quantization_db: float

    @classmethod
    def of(
        cls, defined: Sequence[Array], computed: Sequence[Array], fp32: Sequence[Array]
    ) -> "KernelNoise":
        """Measure the outputs [n, ...] that the file defines, of its kernels, and of FP32."""
        kernels_db, quantization_db = sqnr_db(defined, computed), sqnr_db(fp32, defined)
        return cls(
            math.inf if kernels_db is None else kernels_db,
            math.inf if quantization_db is None else quantization_db,
        )

    def exceeds(self, limit_db: float) -> bool:
        """Return whether the kernels add more noise than the quantization, below a limit."""
        return self.kernels_db < min(self.quantization_db, limit_db)

    def describe(self) -> str:
        """Return both SQNRs as text."""
        return (
            f"more noise (SQNR {self.kernels_db:.1f} dB) than the quantization "
            f"({self.quantization_db:.1f} dB)"
        )

    def to_params(self) -> dict[str, str]:
        """Return the kernels' SQNR as a param; empty if they are exact."""
        exact = math.isinf(self.kernels_db)
        return {} if exact else {"kernels_sqnr_db": f"{self.kernels_db:.1f}"}


def draw(calibration: Split, most: int = SAMPLES) -> Array | None:
    """Return a few calibration samples as one batch; None without samples: all ranges are given."""
    count = min(calibration.limit(most), len(calibration))
    return calibration.inputs(np.arange(count)) if count else None
