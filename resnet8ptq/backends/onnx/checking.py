"""Compares ONNX Runtime's fused kernels with a node-by-node run of the same quantized file.

The file defines its outputs: each node is computed separately, without graph optimization. With
optimization, integer kernels replace groups of nodes; the outputs should differ by rounding alone.
On some releases and CPUs they differ more, because an optimizer has a fault or sums saturate in 16
bits. The file is then right, but its results on this machine are wrong.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from resnet8ptq.backends import kernel_noise
from resnet8ptq.backends.contract import Predict
from resnet8ptq.backends.kernel_noise import KernelNoise
from resnet8ptq.data.dataset import Split
from resnet8ptq.tasks.scoring.distortion import sqnr_or_infinity

log = logging.getLogger(__name__)

LIMIT_DB = 40.0  # ResNet8 in 8 bits has 46 to 48 dB, and 35 dB with weights of 4 bits
# ONNX Runtime's optimizers that change how a quantized graph is computed. No call of ONNX Runtime
# lists them, and a release ignores names that it does not know.
OPTIMIZERS = (
    "QDQSelectorActionTransformer",
    "QDQPropagationTransformer",
    "QDQS8ToU8Transformer",
    "Avx2WeightS8ToU8Transformer",
    "QDQFinalCleanupTransformer",
    "ClipQuantRewrite",
    "ReluQuantRewrite",
    "DQMatMulNBitsFusion",
    "DynamicQuantizeMatMulFusion",
    "MatMulIntegerToFloatFusion",
    "ConstantFolding",
    "ConstantSharing",
    "CommonSubexpressionElimination",
    "TransposeOptimizer",
    "NchwcTransformer",
    "NhwcTransformer",
    "ConvActivationFusion",
    "ConvAddActivationFusion",
    "ConvAddFusion",
    "ConvMulFusion",
    "ConvBNFusion",
    "Pad_Fusion",
    "GemmActivationFusion",
    "GemmSumFusion",
    "GemmTransposeFusion",
    "MatMulActivationFusion",
    "MatMulScaleFusion",
    "MatmulTransposeFusion",
    "MatMulAddFusion",
    "ReshapeFusion",
    "GeluFusion",
    "BiasGeluFusion",
    "LayerNormFusion",
    "SkipLayerNormFusion",
    "SimplifiedLayerNormFusion",
    "AttentionFusion",
)


class Opener(Protocol):
    """Loads a file in ONNX Runtime as a function from network inputs to network outputs."""

    def __call__(self, optimized: bool = True, without: Sequence[str] = ()) -> Predict:
        """Load the file; see `graph.session.open_session`."""


def compare_kernels(
    name: str, open_file: Opener, open_fp32: Callable[[], Predict], calibration: Split
) -> dict[str, str]:
    """Return the SQNR of the kernels as a param; warn if kernels add too much noise.

    `KernelNoise.exceeds` decides how much is too much. The result is empty without a finite SQNR,
    and without samples.

    Args:
        name: the file's name, for the warning.
        open_fp32: loads the FP32 network, which runs only if the kernels' SQNR is below `LIMIT_DB`.
        calibration: a few of these samples run in one batch.
    """
    samples = kernel_noise.draw_batch(calibration)
    if samples is None:
        return {}

    # Node by node, then with the kernels that run in use
    defined = open_file(optimized=False)(samples)
    computed = open_file()(samples)
    noise = KernelNoise.of(
        defined, computed, run_fp32=lambda: open_fp32()(samples), limit_db=LIMIT_DB
    )
    if noise.exceeds:
        log.warning(
            "%s: on %d calibration samples ONNX Runtime's optimized graph adds %s: %s",
            name,
            len(samples),
            noise.describe(),
            _explain(open_file, samples, defined, noise.kernels_db),
        )
    return noise.to_params()


def find_optimizer(
    open_file: Opener, samples: np.ndarray, defined: Sequence[np.ndarray], kernels_db: float
) -> str | None:
    """Return the first optimizer without which the outputs are right; None if there is none.

    Outputs are right if their SQNR reaches `LIMIT_DB`, and is at least 3 dB above `kernels_db`: the
    noise is then at most half.

    Args:
        defined: the outputs without graph optimization.
        kernels_db: the SQNR of the outputs with every optimizer, in dB.
    """
    for optimizer in OPTIMIZERS:
        outputs = open_file(without=[optimizer])(samples)
        sqnr = sqnr_or_infinity(defined, outputs)
        if sqnr >= max(LIMIT_DB, kernels_db + 3):  # +3 dB halves the noise
            return optimizer
    return None


def _explain(
    open_file: Opener, samples: np.ndarray, defined: Sequence[np.ndarray], kernels_db: float
) -> str:
    """Return the optimizer that causes the noise, if a single one does, and the mend, as text."""
    optimizer = find_optimizer(open_file, samples, defined, kernels_db)
    if optimizer is None:
        return "no single optimizer is the cause; try another backend, or graph optimization off"
    return (
        f"{optimizer} is the cause; try another dtype or format, or load the file with "
        f"disabled_optimizers=[{optimizer!r}]"
    )
