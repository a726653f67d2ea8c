"""PyTorch: FX graph mode quantization, saved as TorchScript.

FX graphs do not survive `torch.save`; TorchScript does. FX with int8 activations, or with unsigned
weights, would quantize nothing and say nothing: the kernels take uint8 activations and int8
weights only.
"""

import io
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch.ao.quantization import QConfig, QConfigMapping, get_default_qconfig_mapping
from torch.ao.quantization.observer import (
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    UniformQuantizationObserverBase,
)
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from resnet8ptq import environment, files
from resnet8ptq.calibration import Range, TensorStats, find_range, needs_histogram
from resnet8ptq.config import CalibConfig, RunConfig, TorchConfig
from resnet8ptq.data import Split
from resnet8ptq.errors import QuantizationError, UnsupportedError
from resnet8ptq.interfaces import Artifact
from resnet8ptq.model import Fp32Model
from resnet8ptq.nodes import find_float_nodes
from resnet8ptq.terminal import track
from resnet8ptq.torch_module import load_torch_module

MODEL_FILE = "model.pt"
_DEFAULT_ENGINE = str(torch.backends.quantized.engine)  # as torch chose it, before any run did


class RangeObserver(UniformQuantizationObserverBase):  # type: ignore[misc]
    """An FX observer that leaves the choice of the range to `calibration`."""

    def __init__(self, config: CalibConfig, reduce_range: bool, **kwargs: Any) -> None:
        super().__init__(
            dtype=torch.quint8,
            qscheme=torch.per_tensor_affine,
            reduce_range=reduce_range,
            **kwargs,
        )
        self.config = config
        self.stats = TensorStats()
        self.stage = "ranges"

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Take statistics of `values`, and pass them on."""
        array = values.detach().numpy()
        if self.stage == "ranges":
            self.stats.observe_range(array)
        else:
            self.stats.observe_histogram(array, self.config.num_bins)
        return values

    def chosen_range(self) -> Range:
        """Return the range that the calibration method chooses."""
        return find_range(self.stats, self.config)

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero_point, each of shape [1]."""
        low, high = self.chosen_range()
        scale, zero_point = self._calculate_qparams(torch.tensor(low), torch.tensor(high))
        return scale, zero_point


@dataclass(frozen=True)
class TorchPredictor:
    """A TorchScript module, loaded from the file at `path`."""

    module: Any
    path: Path

    def predict(self, batch: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return probabilities [n, classes] for raw pixels [n, H, W, C]."""
        with torch.inference_mode():
            return np.asarray(self.module(torch.from_numpy(batch)).numpy())

    def logits(self, batch: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return what the final softmax takes [n, classes]; None where the graph ends in none."""
        if self._logits_module is None:
            return None
        with torch.inference_mode():
            found = self._logits_module(torch.from_numpy(batch))
            return np.asarray((found.dequantize() if found.is_quantized else found).numpy())

    @cached_property
    def _logits_module(self) -> Any | None:
        """A frozen copy (one flat graph, which can be cut) that returns the softmax's input."""
        with _known_warnings():
            frozen = torch.jit.load(self.path, map_location="cpu")
            if hasattr(frozen, "training"):  # saved frozen, it has lost the attribute
                frozen = torch.jit.freeze(frozen.eval())
        graph = frozen.graph
        last = next(graph.outputs()).node()
        if last.kind() == "aten::dequantize":
            last = next(last.inputs()).node()
        if last.kind() not in ("aten::softmax", "quantized::softmax"):
            return None
        graph.eraseOutput(0)
        graph.registerOutput(next(last.inputs()))
        return frozen


@dataclass(frozen=True)
class TorchQuantizer:
    """See `interfaces.Quantizer`."""

    config: RunConfig

    def resolve(self) -> dict[str, str]:
        """Return weight and activation dtype, engine and whether activations take 7 bits."""
        if self.config.dtype.name == "fp32":
            return {
                "weight_dtype": "float32",
                "activation_dtype": "float32",
                "execution": "float",
            }
        if self.config.dtype.name == "uint8":
            raise UnsupportedError(
                "FBGEMM's and oneDNN's quantized convolutions require qint8 weights"
            )
        engine = self._engine()
        supported = torch.backends.quantized.supported_engines
        if engine not in supported:
            raise UnsupportedError(
                f"backend.engine={engine} is not in this build of torch ({', '.join(supported)})"
            )
        return {
            "weight_dtype": "int8",
            "activation_dtype": "uint8",
            "execution": "integer",
            "file_format": "TorchScript",
            "engine": engine,
            "activation_bits": "7" if self._reduce_range() else "8",
        }

    def quantize(
        self,
        model: Fp32Model,
        calibration: Split,
        folder: Path,
        ranges: Mapping[str, Range] | None = None,
    ) -> Artifact:
        """Prepare with observers, calibrate, convert, trace and save."""
        path, options = folder / MODEL_FILE, self._options()
        module = load_torch_module(model.onnx_path)
        example = torch.zeros(1, *calibration.images.shape[1:])
        torch.set_num_threads(environment.threads(self.config.threads))
        if self.config.dtype.name == "fp32":
            _save_torchscript(module, example, path, options.freeze)
            return Artifact(path)

        skipped = find_float_nodes(onnx.load(model.onnx_path).graph, self.config)
        with _known_warnings():
            torch.backends.quantized.engine = self._engine()
            prepared = prepare_fx(module, self._qconfig_mapping(skipped), (example,))
            self._calibrate(prepared, calibration)
            ranges = _chosen_ranges(prepared)
            converted = convert_fx(prepared)
        _save_torchscript(converted, example, path, options.freeze, options.debug_records)
        layers = count_quantized_layers(path)
        if layers == 0:
            raise QuantizationError(f"torch quantized nothing in {model.onnx_path}")
        return Artifact(path, layers, ranges)

    def load(self, path: Path) -> TorchPredictor:
        """Load a TorchScript file; its weights are packed for the engine as they load."""
        torch.set_num_threads(environment.threads(self.config.threads))
        if self.config.dtype.name != "fp32":
            torch.backends.quantized.engine = self._engine()
        with _known_warnings():
            return TorchPredictor(torch.jit.load(path, map_location="cpu"), path)

    def _engine(self) -> str:
        """Resolve `auto`: oneDNN is exact in 8 bits where the CPU has VNNI."""
        options = self._options()
        if options.engine != "auto":
            return options.engine
        if environment.has_vnni() and "onednn" in torch.backends.quantized.supported_engines:
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

    def _qconfig_mapping(self, skipped: list[str]) -> QConfigMapping:
        mapping = get_default_qconfig_mapping(self._engine()).set_global(self._qconfig())
        # Constants are quantized with the node that takes them, or else not at all.
        for name in [*skipped, "initializers"] if skipped else []:
            mapping.set_module_name(name, None)
        return mapping

    def _qconfig(self) -> QConfig:
        if self.config.calib.name == "histogram":
            activation = HistogramObserver.with_args(reduce_range=self._reduce_range())
        else:
            activation = RangeObserver.with_args(
                config=self.config.calib, reduce_range=self._reduce_range()
            )
        if self.config.per_channel:
            weight = PerChannelMinMaxObserver.with_args(
                dtype=torch.qint8, qscheme=torch.per_channel_symmetric
            )
        else:
            weight = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
        return QConfig(activation=activation, weight=weight)

    def _calibrate(self, prepared: Any, calibration: Split) -> None:
        config = self.config.calib
        two_passes = config.name != "histogram" and needs_histogram(config.name)
        for stage in ["ranges", "histograms"] if two_passes else ["ranges"]:
            for observer in prepared.modules():
                if isinstance(observer, RangeObserver):
                    observer.stage = stage
            batches = track(calibration.batches(config.batch_size), f"Calibrating: {stage}")
            with torch.inference_mode():
                for batch in batches:
                    prepared(torch.from_numpy(batch))


def _chosen_ranges(prepared: Any) -> dict[str, Range]:
    """Return the range of each observed activation, by the node of the graph that makes it."""
    modules = dict(prepared.named_modules())
    return {
        str(node.args[0]): modules[node.target].chosen_range()
        for node in prepared.graph.nodes
        if isinstance(modules.get(str(node.target)), RangeObserver)
    }


def _save_torchscript(
    module: Any, example: torch.Tensor, path: Path, freeze: bool, debug: bool = False
) -> None:
    archive = io.BytesIO()
    with _known_warnings(), torch.inference_mode():
        traced = torch.jit.trace(_Network(module).eval(), example, check_trace=False)
        if freeze:
            traced = torch.jit.freeze(traced, optimize_numerics=False)
        torch.jit.save(traced, archive)
    with files.atomic(path) as temporary:
        if debug:
            temporary.write_bytes(archive.getvalue())
        else:
            _copy_reproducibly(archive, temporary)


class _Network(torch.nn.Module):  # type: ignore[misc]
    """Gives every network the same class name in the file; FX makes a new class each time."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return probabilities [n, classes] for raw pixels [n, H, W, C]."""
        return self.body(images)


def _copy_reproducibly(archive: io.BytesIO, path: Path) -> None:
    """Leave out what inference does not read and what differs from process to process.

    The debug records say where in the Python code each operation was traced: a quarter of a small
    quantized file, and as long as the call stack and the path of the installation. Class names
    count on from what was traced before; here they count from 0. The serialization id is a hash
    of all that.
    """
    with zipfile.ZipFile(archive) as whole, zipfile.ZipFile(path, "w") as slim:
        names = " ".join(whole.namelist()).encode()
        counts = sorted({int(count) for count in _MANGLED.findall(names)})

        def count_from_zero(text: bytes) -> bytes:
            return _MANGLED.sub(
                lambda found: b"___torch_mangle_%d" % counts.index(int(found[1])), text
            )

        for record in whole.infolist():
            if record.filename.endswith((".debug_pkl", "/serialization_id")):
                continue
            content = whole.read(record)
            if record.filename.endswith((".py", "data.pkl")):
                content = count_from_zero(content)
            record.filename = count_from_zero(record.filename.encode()).decode()
            slim.writestr(record, content)


_MANGLED = re.compile(rb"___torch_mangle_(\d+)")


def count_quantized_layers(path: Path) -> int:
    """Count the quantized convolutions and matrix products in a TorchScript file."""
    with _known_warnings():
        graph = str(torch.jit.load(path, map_location="cpu").inlined_graph)
    return len(re.findall(r"= quantized::(?:conv\dd|linear|matmul)\w*\(", graph))


@contextmanager
def _known_warnings() -> Iterator[None]:
    """Quiet what is known of the pinned torch and of onnx2torch."""
    with warnings.catch_warnings():
        for message in (
            # Both APIs, and the quantized tensors beneath, are announced to go away.
            "torch.ao.quantization is deprecated",
            r"`torch.jit.\w+` is deprecated",
            "torch.quantize_per_tensor, torch.quantize_per_channel",
            "Please use quant_min and quant_max to specify the range",
            # onnx2torch's Reshape reads its target shape, quantized operators their scale: both are
            # constants of the graph.
            "(Converting a tensor to a Python|Iterating over a tensor|Using len to get)",
        ):
            warnings.filterwarnings("ignore", message=message)
        yield
