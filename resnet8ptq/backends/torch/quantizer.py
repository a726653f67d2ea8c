"""Resolves the settings of PyTorch, quantizes by the chosen flow, and saves the file.

FX graph mode runs on integer kernels, which take uint8 activations and int8 weights only; with
other dtypes it silently quantizes nothing. PT2E simulates 8-bit dtypes in float. The modules of
PT2E import torchao, which takes two seconds, so this module imports them only for PT2E.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import onnx
import torch

from resnet8ptq.backends.contract import (
    WITH_ACTIVATIONS,
    Artifact,
    Predictor,
    Profiler,
    Quantizer,
    Resolved,
    Takes,
    options_of,
    refuse_empty,
    refuse_others,
    resolve_stored,
)
from resnet8ptq.backends.torch import dynamic, fx, profiler, torchscript, weight_storage
from resnet8ptq.backends.torch.options import TorchConfig
from resnet8ptq.backends.torch.preparation import prepare
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import DTYPES
from resnet8ptq.core import machine
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.embeddings import find_tables
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.graph.torch_module import load_torch_module
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.plan import find_float_nodes

# torch's choice, read before any run sets the engine
_DEFAULT_ENGINE = str(torch.backends.quantized.engine)

_TAKES: Takes = {
    **WITH_ACTIVATIONS,
    "format": ([None], "QDQ and QOperator are ONNX's"),
    "slim": ([False], "for ONNX files; backend.freeze and backend.debug_records are torch's"),
}
_FX_ONLY: Takes = {
    "backend.engine": (["auto"], "for backend.flow=fx; pt2e takes auto"),
    "backend.freeze": ([True], "for backend.flow=fx; pt2e takes true"),
    "backend.debug_records": ([False], "for backend.flow=fx; pt2e takes false"),
}


class TorchQuantizer(Quantizer):
    """Quantizes with FX graph mode or PT2E, and runs the file in torch."""

    runs_torch: ClassVar[bool] = True
    level_pools: ClassVar[tuple[str, ...]] = ("AveragePool", "GlobalAveragePool")

    def resolve(self, decisions: Decisions | None = None) -> Resolved:
        """Return the dtypes, bits, execution, file format and engine; see `contract.Quantizer`.

        Weights or activations may have 7 bits.
        """
        config = self.config
        fx_flow = self._options.flow == "fx"
        if config.computes_in_float and not config.dtype.is_fp32:
            return resolve_stored(config, file_format=self._flow[1].FORMAT)
        refuse_others(config, _TAKES)
        if not fx_flow:
            refuse_others(config, _FX_ONLY)
        if config.dtype.is_fp32:
            return Resolved()
        if self.plan(decisions).is_narrow:
            raise UnsupportedError("weights below 8 bits: torch's quantized kernels take 8")

        # FX runs torch's integer kernels; PT2E only simulates them
        method, file = self._flow
        if fx_flow:
            engines = torch.backends.quantized.supported_engines
            reason = f"this build of torch has {', '.join(engines)}"
            refuse_others(config, {"backend.engine": (["auto", *engines], reason)})
        refuse_others(config, method.TAKES)

        # Report the dtypes, and the part that has 7 bits
        weights = self._weights
        activations = self._activations
        suffix = " (dynamic)" if config.method == "dynamic" else ""
        weight_bits = 7 if weights.reduce_range else None
        activation_bits = 7 if activations.reduce_range else 8
        resolved = Resolved(
            weight_dtype=weights.dtype,
            activation_dtype=f"{activations.dtype}{suffix}",
            weight_bits=weight_bits,
            activation_bits=activation_bits,
            execution="simulated",
            file_format=file.FORMAT,
        )
        if fx_flow:
            resolved = replace(resolved, execution="integer", engine=self._engine)
        return resolved

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        """Quantize by `backend.flow`, `method` and `dtype`, except for dtype=fp32, and save.

        Raises:
            UnsupportedError: torch cannot convert, trace or run the network, or none of its layers
                can have the weights of `method` and `dtype`.
            QuantizationError: a range is not finite, the settings leave no node to quantize, or
                torch quantized no layer, see `refuse_empty`.
            ConfigError: a setting names an unknown layer, node or operator, or the cache cannot be
                written.
        """
        self._set_up(self.runtime.threads)
        config = self.config
        options = self._options
        method, file = self._flow
        path = folder / file.MODEL_FILE
        example = torchscript.Example.of(calibration)
        module = load_torch_module(model.onnx_path)
        if config.dtype.is_fp32:
            file.save(module, example, path, options.freeze)
            return Artifact(path)

        # With weights alone in fewer bits, the network still computes in float
        proto = onnx.load(model.onnx_path)
        if config.computes_in_float:
            half = config.dtype.is_float
            skipped = decisions.in_float
            if not half:
                skipped = find_float_nodes(proto.graph, self.select(decisions))
            nodes = [*weight_layers(proto.graph).values(), *find_tables(proto.graph)]
            names = {node.name for node in nodes}.difference(skipped)
            count = weight_storage.store(module, names, half)
            file.save(module, example, path, False)  # freezing would store float32 weights
            return Artifact(path, count)

        # Quantize weights and activations, with ranges at inference or from calibration
        skipped = prepare(module, proto, self.select(decisions))
        chosen: dict[str, Range] = {}
        details: dict[str, str] = {}
        if config.method == "dynamic":
            module, layers = dynamic.quantize(module, skipped, config, weights=self._weights)
            details["dynamic_layers"] = ", ".join(layers)
        else:
            activations = self.activations(model, decisions, calibration)
            module, chosen = method.quantize(
                module, proto.graph, skipped, activations, config, self._weights, self._activations
            )
        file.save(module, example, path, options.freeze, options.debug_records)
        count, _ = file.count_layers(path)
        if count == 0:
            refuse_empty("torch", onnx.load(model.onnx_path).graph, f" in {model.onnx_path}")
        return Artifact(path, quantized_layers=count, ranges=chosen, details=details)

    def load(self, path: Path, threads: int) -> Predictor:
        """Load the flow's artifact: a program (.pt2) or a TorchScript file (.pt)."""
        self._set_up(threads)
        predictor: Predictor = self._flow[1].load(path)
        return predictor

    def count_kernels(self, path: Path) -> tuple[int, int]:
        """Count the layers by the operators of the file, which torch runs unchanged."""
        counted: tuple[int, int] = self._flow[1].count_layers(path)
        return counted

    def profile(self, path: Path, threads: int) -> AbstractContextManager[Profiler]:
        """Load a TorchScript file, to time its operators; raise `UnsupportedError` for PT2E."""
        if self._options.flow == "pt2e":
            raise UnsupportedError(
                "backend.flow=pt2e: simulates integer kernels in float; its times are meaningless"
            )
        return profiler.profile(partial(self.load, path, threads))

    def _set_up(self, threads: int) -> None:
        """Set torch's threads, and its engine for integer kernels, for the whole process."""
        torch.set_num_threads(threads)
        # For stack traces, which nothing reads, FX would import torch's compiler for a second.
        torch.fx.config.do_not_emit_stack_traces = True
        if self._options.flow == "fx" and not self.config.computes_in_float:
            torch.backends.quantized.engine = self._engine

    @property
    def _flow(self) -> tuple[Any, Any]:
        """The module that quantizes, and the module of the file format."""
        if self._options.flow != "fx":
            from resnet8ptq.backends.torch import program, pt2e

            return pt2e, program
        if self.config.method == "dynamic":
            return dynamic, torchscript
        return fx, torchscript

    @property
    def _engine(self) -> str:
        """The engine of integer kernels.

        `auto` is oneDNN on a CPU with VNNI, where its 8-bit sums are exact, if torch has it.
        Otherwise `auto` is torch's default.
        """
        if self._options.engine != "auto":
            return self._options.engine
        if machine.has_vnni() and "onednn" in torch.backends.quantized.supported_engines:
            return "onednn"
        return _DEFAULT_ENGINE

    @property
    def _weights(self) -> WeightScheme:
        """The weight scheme; 7 bits if `_reduced` is `weights`."""
        return WeightScheme.of(self.config, self._reduced == "weights")

    @property
    def _activations(self) -> WeightScheme:
        """The activation scheme; torch's integer kernels take uint8 only.

        7 bits if `_reduced` is `activations`.
        """
        config = self.config
        dtype = "uint8"
        if self._options.flow == "pt2e":
            dtype = DTYPES[config.dtype.name][0]
        return WeightScheme(
            dtype,
            symmetric=bool(config.symmetric.activations),
            reduce_range=self._reduced == "activations",
        )

    @property
    def _reduced(self) -> str | None:
        """The part that has 7 bits, `weights` or `activations`; None if both have 8.

        `backend.reduced` may name the part. With `auto`, it is the weights if they have a scale for
        each channel, because they then lose less than activations. Without such scales, or with
        method=dynamic, it is the activations.
        """
        config = self.config
        reduce_range = config.reduce_range
        if reduce_range is None and self._options.flow != "pt2e":
            # 7 bits keep 16-bit sums exact without VNNI; dynamic kernels always take 7 bits.
            reduce_range = config.method == "dynamic" or self._engine in ("fbgemm", "x86")
        if not reduce_range:
            return None

        # Choose the part, by default the one that loses less
        if self._options.reduced != "auto":
            return self._options.reduced
        finer = config.per_channel and config.method != "dynamic"
        return "weights" if finer else "activations"

    @property
    def _options(self) -> TorchConfig:
        return options_of(self.config, TorchConfig)
