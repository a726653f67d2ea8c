"""Quantizes for OpenVINO on the CPU: integer layers are in QDQ format, which OpenVINO compiles.

The quantizer of `backends.onnx` writes the ONNX file, so that ranges, corrections and plans are the
same in both backends. `rewriting` then avoids OpenVINO's faults. OpenVINO's own format holds the
same graph, but takes two files for each network.

Activations are u8, even with dtype=int8. OpenVINO 2026.4 moves the rounding of a Concat's output
before the Concat. In s8, the next convolution then gets wrong zero points: YOLOX-nano had an AP of
0.004, and 0.111 in ONNX Runtime. With the same levels in u8, OpenVINO agrees with ONNX Runtime.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import onnx

from resnet8ptq.backends.contract import (
    WITH_ACTIVATIONS,
    Artifact,
    Predictor,
    Profiler,
    Quantizer,
    Resolved,
    Takes,
    refuse_others,
    resolve_stored,
)
from resnet8ptq.backends.onnx.predictor import check_file
from resnet8ptq.backends.onnx.quantizer import OnnxQuantizer
from resnet8ptq.backends.openvino import checking, predictor, profiler
from resnet8ptq.backends.openvino.library import library, read_graph, refuse_missing
from resnet8ptq.backends.openvino.rewriting import avoid_faults
from resnet8ptq.config.schema import DtypeConfig
from resnet8ptq.core import files, isolation
from resnet8ptq.core.errors import QuantizationError, UnsupportedError, errors_as
from resnet8ptq.data.dataset import Split
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.target.measure import F32

ENGINE = "openvino"

_FLOAT = "OpenVINO computes such layers in float"
# Tried on OpenVINO 2026.4: compiled each setting and counted its kernels.
_TAKES: Takes = {
    "method": (["static", "qat"], f"ranges at inference: {_FLOAT}; expected static | qat"),
    "format": ([None, "qdq", "auto"], "OpenVINO does not read QOperator files; expected qdq"),
    "dtype.name": (["int8", "u8s8"], f"weights of u8, or below 8 bits: {_FLOAT}"),
}

_TYPES = {F32: "float32", "bf16": "bfloat16", "f16": "float16"}


class RunsInOpenvino(Quantizer):
    """Runs files in OpenVINO; subclasses write the files."""

    def with_engine(self, resolved: Resolved) -> Resolved:
        """Return resolved settings with OpenVINO and its float type as the engine.

        Raises:
            UnsupportedError: OpenVINO is missing, or this machine runs the files and its CPU lacks
                the float type.
        """
        library()
        refuse_missing(self._precision)
        precision = self.config.inference_precision
        if precision == F32:
            return replace(resolved, engine=ENGINE)
        if self.config.computes_in_float:
            resolved = replace(resolved, activation_dtype=_TYPES[precision])
        return replace(resolved, engine=f"{ENGINE} {precision}")

    @property
    def _precision(self) -> str:
        """The float type on this machine: float32 if a target runs the files."""
        return F32 if self.config.runs_elsewhere else self.config.inference_precision

    def load(self, path: Path, threads: int) -> Predictor:
        """Load a file for this CPU; see `contract.Quantizer`."""
        refuse_missing(self._precision)
        return predictor.load(path, threads, self._precision)

    def profile(self, path: Path, threads: int) -> AbstractContextManager[Profiler]:
        """Load a file to time its nodes; see `contract.Quantizer`."""
        return profiler.profile(path, threads, self._precision)

    verify = checking.compare_kernels
    count_kernels = staticmethod(profiler.count_kernels)


class OpenvinoQuantizer(RunsInOpenvino):
    """Writes files with the quantizer of `backends.onnx`, and runs them in OpenVINO."""

    @property
    def level_pools(self) -> tuple[str, ...]:
        """The pools of ONNX Runtime's QDQ files; see `contract.Quantizer`."""
        return self._writer.level_pools

    def resolve(self, decisions: Decisions | None = None) -> Resolved:
        """Return dtypes and schemes, with OpenVINO as the engine; see `contract.Quantizer`."""
        if self.config.dtype.is_fp32:
            return self.with_engine(Resolved())
        if self.config.computes_in_float:
            return self.with_engine(resolve_stored(self.config, file_format="Cast"))
        refuse_others(self.config, WITH_ACTIVATIONS)
        refuse_others(self.config, _TAKES)
        resolved = self._writer.resolve(decisions)
        if resolved.execution == "simulated":
            raise UnsupportedError(f"precision.plan: weights below 8 bits: {_FLOAT}")
        return self.with_engine(resolved)

    def fit(self, model: Fp32Model) -> dict[str, object]:
        """Check that OpenVINO reads the network, and that `backends.onnx` can quantize it.

        Returns no settings; see `contract.Quantizer`.
        """
        with errors_as(UnsupportedError, "backend=openvino: OpenVINO cannot read the network"):
            read_graph(model.onnx_path)
        self._writer.fit(model)
        return {}

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        """Write the ONNX file; `avoid_faults` changes a file for integer kernels.

        Raises:
            UnsupportedError: OpenVINO cannot compile the quantized file, or computes every layer in
                float; see also `contract.Quantizer`.
            QuantizationError: the file is invalid, or OpenVINO crashes; see also
                `contract.Quantizer`.
        """
        artifact = self._writer.quantize(model, decisions, calibration, folder)
        if self.config.computes_in_float:
            return artifact
        proto = avoid_faults(onnx.load(artifact.path))
        with files.atomic(artifact.path) as temporary:
            onnx.save(proto, temporary)
        with errors_as(QuantizationError, "backend=openvino: the quantizer wrote an invalid file"):
            check_file(artifact.path)

        # Only the compiled network shows which layers run on integers
        why = "backend=openvino: OpenVINO cannot compile the quantized file; try backend=onnx"
        count = profiler.count_kernels  # in a separate process, whose crash does not end a sweep
        with errors_as(UnsupportedError, why):
            crashed = QuantizationError(f"{why} (it crashed)")
            on_integers, in_float = isolation.call(count, artifact.path, crashed=crashed)
        if not on_integers:
            artifact.path.unlink()
            raise UnsupportedError(
                f"backend=openvino: OpenVINO computes all {in_float} layers of the quantized file "
                "in float on this CPU"
            )
        return artifact

    @cached_property
    def _writer(self) -> OnnxQuantizer:
        config = self.config
        if config.dtype.name == "int8":
            config = replace(config, dtype=DtypeConfig("u8s8"))
        if not config.dtype.is_float and config.method in ("static", "qat"):
            config = replace(config, format="qdq")
        return OnnxQuantizer(config, self.runtime)
