"""Quantizes for ExecuTorch, torch's runtime for phones and small computers.

The quantizer lowers PT2E's quantized program (`backends/torch/pt2e.py`) to XNNPACK's 8-bit kernels.
The result is one .pte file.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import onnx

from resnet8ptq.backends.contract import (
    WITH_ACTIVATIONS,
    Artifact,
    Quantizer,
    Resolved,
    Takes,
    refuse_empty,
    refuse_others,
)
from resnet8ptq.backends.executorch import contents, lowering, predictor
from resnet8ptq.backends.torch import pt2e
from resnet8ptq.backends.torch.preparation import prepare
from resnet8ptq.backends.torch.torchscript import Example
from resnet8ptq.calibration.methods import SHARED
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.core import files
from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.layers import find_stacks
from resnet8ptq.graph.torch_module import infer, load_torch_module
from resnet8ptq.graph.torch_recurrent import KINDS
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.precision.grid import WeightScheme

log = logging.getLogger(__name__)

MODEL_FILE = "model.pte"
MOST_AT_ONCE = 64  # samples for which the runtime plans memory; larger batches run in parts

_KERNELS = "XNNPACK's int8 kernels take int8 activations and symmetric int8 weights"
_TAKES: Takes = {
    "method": (["static", "qat"], f"static only; {WITH_ACTIVATIONS['method'][1]}"),
    "dtype.name": (["int8"], f"{_KERNELS}; expected int8"),
    "symmetric.weights": ([None, True], _KERNELS),
    "reduce_range": ([None, False], "XNNPACK's kernels take 8 bits"),
    "calib.name": (SHARED, f"the observer of backend=torch; expected {' | '.join(SHARED)}"),
    "format": ([None], "QDQ and QOperator are ONNX's"),
    "slim": ([False], "for ONNX files"),
}


class ExecutorchQuantizer(Quantizer):
    """Quantizes for XNNPACK's kernels, and runs the file in ExecuTorch."""

    runs_torch: ClassVar[bool] = True
    level_pools: ClassVar[tuple[str, ...]] = ("AveragePool", "GlobalAveragePool")

    def resolve(self, decisions: Decisions | None = None) -> Resolved:
        """Return the dtypes, bits, execution and file format; see `contract.Quantizer`.

        ExecuTorch must be installed.
        """
        config = self.config
        lowering.check_installed()
        if config.dtype.is_fp32:
            return Resolved()
        refuse_others(config, _TAKES)
        if self.plan(decisions).is_narrow:
            raise UnsupportedError(f"weights below 8 bits: {_KERNELS}")

        # XNNPACK has one pair of dtypes
        return Resolved(
            weight_dtype="int8",
            activation_dtype="int8",
            weight_bits=8,
            activation_bits=8,
            execution="integer",
            file_format="ExecuTorch",
        )

    def fit(self, model: Fp32Model) -> dict[str, object]:
        """Raise `UnsupportedError` for recurrent layers; return no settings."""
        if any(node.op_type in KINDS for node in onnx.load(model.onnx_path).graph.node):
            raise UnsupportedError(
                "backend=executorch: a recurrent layer: ExecuTorch lowers each of its steps, which "
                "takes minutes for 40 of them; try backend=torch"
            )
        return {}

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        """Quantize with PT2E, except for dtype=fp32; lower to XNNPACK, and save.

        Raises:
            UnsupportedError: torch or ExecuTorch cannot process the network, the runtime lacks a
                kernel, or the lowered program computes other values.
            QuantizationError: a range is not finite, or XNNPACK runs no layer in 8 bits, see
                `refuse_empty`.
            ConfigError: a setting names an unknown layer, node or operator.
        """
        config = self.config
        path = folder / MODEL_FILE
        module = load_torch_module(model.onnx_path)
        example = Example.of(calibration)
        chosen: dict[str, Range] = {}

        # XNNPACK runs in 8 bits only the layers that PT2E marks
        if not config.dtype.is_fp32:
            proto = onnx.load(model.onnx_path)
            skipped = prepare(module, proto, self.select(decisions))
            if config.per_channel:  # XNNPACK lacks their kernel
                skipped += find_stacks(proto.graph)
            activations = self.activations(model, decisions, calibration)
            schemes = (
                WeightScheme.of(config),
                WeightScheme("int8", symmetric=bool(config.symmetric.activations)),
            )
            module, chosen = pt2e.quantize(
                module, proto.graph, skipped, activations, config, *schemes
            )

        # A missing kernel shows only when the program runs: try it before it is saved
        limits = (MOST_AT_ONCE, calibration.at_once, calibration.within_memory)
        content = lowering.lower(module, example, min(filter(None, limits)))
        missing = predictor.find_missing(content)
        if missing:
            raise UnsupportedError(
                "backend=executorch: the published runtime lacks a kernel for "
                f"{', '.join(missing)}; try backend=onnx"
            )
        _check_run(content, module, calibration)
        files.write_bytes(path, content)
        if config.dtype.is_fp32:
            return Artifact(path)

        # Only the file shows which operators XNNPACK runs
        operators = contents.read_operators(content)
        layers, _ = _count_layers(operators)
        if layers == 0:
            graph = onnx.load(model.onnx_path).graph
            refuse_empty("XNNPACK", graph, ": it runs no layer in 8 bits")

        # Report how much of the program XNNPACK runs
        delegated = sum(operator.delegated for operator in operators)
        integer = sum(operator.integer for operator in operators)
        whole = len(operators)
        log.info("XNNPACK runs %d of %d operators, %d in 8 bits", delegated, whole, integer)
        details = {
            "delegated_operators": f"{delegated} of {whole}",
            "operators_in_8_bits": f"{integer} of {whole}",
        }
        return Artifact(path, quantized_layers=layers, ranges=chosen, details=details)

    load = staticmethod(predictor.load)

    def count_kernels(self, path: Path) -> tuple[int, int]:
        """Count the layers that XNNPACK runs in 8 bits, and all others as layers in float."""
        return _count_layers(contents.read_operators(path.read_bytes()))

    def profile(self, path: Path, threads: int) -> NoReturn:
        """Raise `UnsupportedError`: the published runtime records no times of operators."""
        raise UnsupportedError(
            "backend=executorch: the published runtime records no times of operators; a build with "
            "EXECUTORCH_ENABLE_EVENT_TRACER=ON does"
        )


def _count_layers(operators: Sequence[contents.Operator]) -> tuple[int, int]:
    """Return the numbers of layers in 8 bits and in float."""
    integer = 0
    in_float = 0
    for operator in operators:
        if operator.is_layer:
            integer += operator.integer
            in_float += not operator.integer
    return integer, in_float


def _check_run(content: bytes, module: Any, calibration: Split) -> None:
    """Run one sample, if there is one; raise `UnsupportedError` for errors or wrong outputs.

    A float output is wrong if its noise exceeds the signal, the output of `module`, or is NaN. An
    output is not checked if the signal is not finite.
    """
    why = "backend=executorch: the runtime cannot run the file"
    mend = "try backend=onnx"
    count = min(1, len(calibration))  # none if all ranges are preset
    for batch in calibration.take(np.arange(count)).batches(1):
        with errors_as(UnsupportedError, why, mend):
            outputs = predictor.LoadedProgram(content, 1)(batch)

        # Other roundings differ a little; wrong kernels differ by more than the signal
        for output, expected in zip(outputs, infer(module, batch), strict=True):
            if expected.dtype != np.float32:  # class numbers may change with ties
                continue
            noise = np.square(output - expected, dtype=np.float64).sum()
            signal = np.square(expected, dtype=np.float64).sum()
            if np.isfinite(signal) and not noise <= signal:  # also for outputs of NaN
                raise UnsupportedError(
                    "backend=executorch: the lowered program computes other values than the "
                    f"program for torch (noise / signal > 1); {mend}"
                )
