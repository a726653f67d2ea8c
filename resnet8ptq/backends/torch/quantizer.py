"""PyTorch: what the settings come to, and which flow does them.

FX graph mode quantization runs on integer kernels, which take uint8 activations and int8 weights
only: with others it would quantize nothing and say nothing. PT2E does every dtype, in float. Its
modules import torchao, which takes two seconds: only where it is the flow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import torch

from resnet8ptq.backends.contract import Artifact, Predictor, Resolved
from resnet8ptq.backends.torch import dynamic, fx, torchscript
from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import QuantizationConfig, TorchConfig
from resnet8ptq.core import machine
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.torch_module import load_torch_module
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.selection import Selection, find_float_nodes

_DEFAULT_ENGINE = str(torch.backends.quantized.engine)  # as torch chose it, before any run did


@dataclass(frozen=True)
class TorchQuantizer:
    """See `contract.Quantizer`."""

    config: QuantizationConfig
    runtime: Runtime

    def resolve(self) -> Resolved:
        """Return weight and activation dtype, engine and whether activations take 7 bits."""
        self._check_options()
        if self.config.dtype.name == "fp32":
            return Resolved()
        if self._options().flow == "pt2e":
            from resnet8ptq.backends.torch import pt2e

            return pt2e.resolve(self.config)
        self._check_engine()
        if self.config.method == "dynamic":
            resolved = dynamic.resolve(self.config)
        else:
            resolved = fx.resolve(self.config, self._reduce_range())
        return replace(resolved, engine=self._engine())

    def quantize(
        self,
        model: Fp32Model,
        calibration: Split,
        folder: Path,
        ranges: Mapping[str, Range] | None = None,
    ) -> Artifact:
        """Quantize by the flow that `backend.flow` and `method` name, and save.

        Raises:
            UnsupportedError: method=dynamic, and the network has no layer that torch does so.
        """
        self._set_up(self.runtime.threads)
        module = load_torch_module(model.onnx_path)
        example = torch.zeros(1, *calibration.input_shape)
        graph = onnx.load(model.onnx_path).graph
        if self.config.dtype.name == "fp32":
            return self._save_fp32(module, example, folder)

        skipped = find_float_nodes(graph, Selection.of(self.config))
        activations = Activations(
            model.onnx_path, calibration, self.config.calib, self.runtime, ranges or {}
        )
        if self._options().flow == "pt2e":
            from resnet8ptq.backends.torch import pt2e

            artifact = pt2e.quantize(module, graph, skipped, activations, self.config, folder)
        else:
            artifact = self._quantize_fx(module, graph, skipped, activations, folder)
        if artifact.quantized_layers == 0:
            raise QuantizationError(f"torch quantized nothing in {model.onnx_path}")
        return artifact

    def load(self, path: Path, threads: int) -> Predictor:
        """Load what the flow writes: an exported program (.pt2) or a TorchScript file (.pt)."""
        self._set_up(threads)
        if self._options().flow == "pt2e":
            from resnet8ptq.backends.torch import pt2e

            return pt2e.load(path)
        return torchscript.load(path)

    def _quantize_fx(
        self,
        module: torch.fx.GraphModule,
        graph: onnx.GraphProto,
        skipped: list[str],
        activations: Activations,
        folder: Path,
    ) -> Artifact:
        chosen: dict[str, Range] = {}
        details = {}
        if self.config.method == "dynamic":
            module, layers = dynamic.quantize(module, skipped, self.config)
            details["dynamic_layers"] = ", ".join(layers)
        else:
            settings = fx.Settings(self.config, self._engine(), self._reduce_range())
            module, chosen = fx.quantize(module, graph, skipped, settings, activations)
        path, options = folder / torchscript.MODEL_FILE, self._options()
        example = torch.zeros(1, *activations.calibration.input_shape)
        torchscript.save(module, example, path, options.freeze, options.debug_records)
        return Artifact(path, torchscript.count_quantized_layers(path), chosen, details)

    def _save_fp32(
        self, module: torch.fx.GraphModule, example: torch.Tensor, folder: Path
    ) -> Artifact:
        if self._options().flow == "pt2e":
            from resnet8ptq.backends.torch import pt2e

            path = folder / pt2e.MODEL_FILE
            pt2e.save(pt2e.export(module, example), path)
        else:
            path = folder / torchscript.MODEL_FILE
            torchscript.save(module, example, path, self._options().freeze)
        return Artifact(path)

    def _set_up(self, threads: int) -> None:
        """Set what torch keeps for the whole process."""
        torch.set_num_threads(threads)
        # Where in the code each node was traced: it is not read, and to find it FX imports
        # torch's compiler, which takes over a second.
        torch.fx.config.do_not_emit_stack_traces = True
        if self._options().flow == "fx" and self.config.dtype.name != "fp32":
            torch.backends.quantized.engine = self._engine()

    def _check_options(self) -> None:
        options = self._options()
        if self.config.format is not None:
            raise UnsupportedError(
                f"format={self.config.format}: QDQ and QOperator are ONNX's; torch takes null"
            )
        if self.config.slim:
            raise UnsupportedError(
                "slim=true is for ONNX files; backend.freeze and backend.debug_records are torch's"
            )
        if options.flow == "pt2e":
            for key in ("engine", "freeze", "debug_records"):
                given, default = getattr(options, key), getattr(TorchConfig, key)
                if given != default:
                    raise UnsupportedError(
                        f"backend.{key}={given} is for backend.flow=fx; pt2e takes {default}"
                    )

    def _check_engine(self) -> None:
        engine, supported = self._engine(), torch.backends.quantized.supported_engines
        if engine not in supported:
            raise UnsupportedError(
                f"backend.engine={engine} is not in this build of torch ({', '.join(supported)})"
            )

    def _engine(self) -> str:
        """Resolve `auto`: oneDNN is exact in 8 bits where the CPU has VNNI."""
        options = self._options()
        if options.engine != "auto":
            return options.engine
        if machine.has_vnni() and "onednn" in torch.backends.quantized.supported_engines:
            return "onednn"
        return _DEFAULT_ENGINE

    def _reduce_range(self) -> bool:
        """Resolve null: 7 bits keep the 16-bit sums of FBGEMM from saturating without VNNI."""
        given = self.config.reduce_range
        return self._engine() in ("fbgemm", "x86") if given is None else given

    def _options(self) -> TorchConfig:
        backend = self.config.backend
        assert isinstance(backend, TorchConfig)  # for mypy: the schema of backend=torch
        return backend
