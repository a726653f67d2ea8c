"""TensorFlow Lite: TensorFlow's own converter, run by LiteRT's interpreter.

It takes TensorFlow's own formats: a Keras file, or a SavedModel. A float .tflite file is the FP32
baseline as it is. With `backend.flow=file`, the quantized model is a .tflite file that exists.

The deployment path of MLPerf Tiny. The converter folds, calibrates and places scales by itself, so
that it takes few of the settings; `resolve` says which not, and why.

Known of its calibrator (2.21): it looks at an operator's inputs again after the operator ran. An
addition runs in place, over its first input, whose range then takes in that of the sum: half of
the levels of a residual network's shortcut convolutions are lost to it.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from ai_edge_litert.schema_py_generated import TensorType
from ai_edge_litert.tools import flatbuffer_utils as flatbuffer

from resnet8ptq.backends.contract import Artifact, Predictor, Resolved, Takes, refuse_others
from resnet8ptq.backends.tflite import converter, predictor
from resnet8ptq.calibration.statistics import Range, Ranges
from resnet8ptq.config.schema import QuantizationConfig, TfliteConfig
from resnet8ptq.core import files, isolation
from resnet8ptq.core.errors import ConfigError, QuantizationError, UnsupportedError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.text import one_line
from resnet8ptq.data.dataset import Split
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.models.sources import find_format

log = logging.getLogger(__name__)

MODEL_FILE = "model.tflite"
FORMATS = ("keras", "saved_model")  # what the converter takes
LAYERS = ("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED")

_ONNX_GRAPH = "changes the ONNX graph; this converter takes the Keras file"
_ONNX_FILES = "only for ONNX files"
_OPERATORS = "the converter quantizes every operator"
_BY_ITSELF = "the converter calibrates by itself"
# What concerns the network itself, and so the baseline too.
_NETWORK_TAKES: Takes = {
    "corrections.equalization": ([False], _ONNX_GRAPH),
    "corrections.bias_correction": ([False], _ONNX_GRAPH),
    "corrections.adaround": ([False], _ONNX_GRAPH),
    "method": (["static", "dynamic"], f"fine-tuning {_ONNX_GRAPH}"),
    "slim": ([False], _ONNX_FILES),
}
_TAKES: Takes = {
    "dtype.name": (["int8"], "TFLite's quantization specification has int8 kernels only"),
    "calib.name": (["minmax"], f"{_BY_ITSELF}, and takes minmax only"),
    "calib.table": ([None], f"{_BY_ITSELF}, and takes no ranges"),
    "nodes_to_quantize": ([None], _OPERATORS),
    "nodes_to_exclude": ([[]], _OPERATORS),
    "op_types": ([None], _OPERATORS),
    "float_output": ([False], _OPERATORS),
    "float_tail": ([False], f"{_OPERATORS}; takes float_tail=false"),
    "format": ([None], _ONNX_FILES),
    "reduce_range": ([None, False], "TFLite's kernels take 8 bits"),
    "symmetric.activations": ([None, False], "TFLite's activations have a zero point"),
    "symmetric.weights": ([None, True], "TFLite's weights have no zero point"),
}
_FILE_TAKES: Takes = {"dtype.name": (["int8"], "backend.file holds int8")}


@dataclass(frozen=True)
class TfliteQuantizer:
    """See `contract.Quantizer`."""

    config: QuantizationConfig
    runtime: Runtime
    widths: ClassVar[tuple[int, ...]] = (4, 8)

    def resolve(self) -> Resolved:
        """Return weight and activation dtype and the format."""
        refuse_others(self.config, _NETWORK_TAKES)
        if self.config.dtype.name == "fp32":
            return Resolved()
        refuse_others(self.config, _TAKES if self._file is None else _FILE_TAKES)
        if self._options.integer_io and self.config.method == "dynamic":
            raise UnsupportedError("backend.integer_io=true: method=dynamic takes floats alone")
        if self._options.integer_io is not None and self._file is not None:
            raise UnsupportedError("backend.integer_io: backend.file is scored as it is")
        return Resolved(
            weight_dtype="int8",
            activation_dtype="int8",  # with method=dynamic, as the model runs
            execution="integer",
            file_format="TFLite",
        )

    def quantize(
        self, model: Fp32Model, calibration: Split, folder: Path, ranges: Ranges | None = None
    ) -> Artifact:
        """Convert the network, in a process of its own; or copy the file that is quantized already.

        Raises:
            UnsupportedError: as `resolve`; `ranges` are given; the converter does not take the
                format; the network is not to be folded; the converter ignores `per_channel`.
            ConfigError: `backend.file` is no quantized .tflite file, or takes other samples.
        """
        self.resolve()
        path = folder / MODEL_FILE
        if self._file is not None and self.config.dtype.name != "fp32":
            return self._copy(self._file, path, calibration.input_shape)
        if not model.fold:
            raise UnsupportedError("model.fold=false: TFLite's converter always folds")
        if ranges is not None:
            raise UnsupportedError("TFLite's converter takes no ranges: it calibrates by itself")
        content = self._content(model.source, calibration)
        artifact = Artifact(path) if self.config.dtype.name == "fp32" else self._read(content, path)
        with files.atomic(path) as temporary:
            temporary.write_bytes(content)
        return artifact

    def load(self, path: Path, threads: int) -> Predictor:
        """Load a .tflite file."""
        return predictor.load(path, threads)

    def profile(self, path: Path, threads: int) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "backend=tflite: LiteRT's interpreter times no operators in Python; its "
            "benchmark_model does, with --enable_op_profiling=true"
        )

    @property
    def _options(self) -> TfliteConfig:
        backend = self.config.backend
        return backend if isinstance(backend, TfliteConfig) else TfliteConfig()

    @property
    def _file(self) -> Path | None:
        """A quantized file that is scored as it is."""
        backend = self._options
        if backend.flow != "file":
            return None
        if backend.file is None:
            raise ConfigError(
                "backend.file: got null, takes a quantized .tflite file with backend.flow=file"
            )
        return Path(backend.file).expanduser()

    def _copy(self, file: Path, path: Path, shape: tuple[int, ...]) -> Artifact:
        try:
            content = file.read_bytes()
            [taken] = predictor.open_interpreter(content, 1).get_input_details()
            artifact = self._read(content, path, check=False)
        except (OSError, RuntimeError, ValueError, IndexError, QuantizationError) as error:
            raise ConfigError(
                f"backend.file: got {file} ({one_line(error)}), takes a quantized .tflite file"
            ) from None
        if (takes := taken["shape"][1:].tolist()) != list(shape):
            raise ConfigError(f"backend.file: {file} takes {takes}, the samples are {list(shape)}")
        path.write_bytes(content)
        return artifact

    def _content(self, source: Path, calibration: Split) -> bytes:
        found = find_format(source)
        name = found.name if found else "module"
        if name == "tflite" and self.config.dtype.name == "fp32":
            return source.read_bytes()
        if name not in FORMATS:
            raise UnsupportedError(
                f"{source.name}: TFLite's converter takes a Keras file or a SavedModel"
            )
        return self._convert(source, calibration)

    def _convert(self, source: Path, calibration: Split) -> bytes:
        quantized = self.config.dtype.name != "fp32"
        calibrated = quantized and self.config.method == "static"
        # Only these samples go to the other process, not the file that they lie in.
        taken = replace(calibration, images=calibration.images[:]) if calibrated else None
        settings = (quantized, self.config.per_channel, self._options.integer_io is not False)
        crashed = QuantizationError(f"{source}: converting it crashed TensorFlow")
        return isolation.call(converter.convert, source, taken, *settings, crashed=crashed)

    def _read(self, content: bytes, path: Path, check: bool = True) -> Artifact:
        """Return what the file says of itself: which layers are quantized, and how.

        Args:
            check: whether it is as `per_channel` says.
        """
        model = flatbuffer.convert_bytearray_to_object(content)
        dynamic, layers = self.config.method == "dynamic", list(_layers(model))
        types = (TensorType.INT8, TensorType.FLOAT32 if dynamic else TensorType.INT8)
        quantized = [weights for weights, made in layers if (weights.type, made.type) == types]
        if not quantized:
            raise QuantizationError("TFLite's converter quantized nothing")
        for weights in quantized if check else ():
            _check_granularity(weights, self.config.per_channel)
        in_float = len(layers) - len(quantized)
        if in_float:  # dynamic-range quantization leaves weights of less than 1,024 values alone
            log.warning("TFLite's converter left %d of %d layers in float", in_float, len(layers))
        details = {"float_layers": str(in_float)}
        return Artifact(path, len(quantized), _activation_ranges(model), details)


def _layers(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the tensors (weights, output) of each convolution and matrix product."""
    graph = model.subgraphs[0]
    for operator in graph.operators:
        if flatbuffer.opcode_to_name(model, operator.opcodeIndex) in LAYERS:
            yield graph.tensors[operator.inputs[1]], graph.tensors[operator.outputs[0]]


def _check_granularity(weights: Any, per_channel: bool) -> None:
    scales = len(weights.quantization.scale)
    channels = int(weights.shape[weights.quantization.quantizedDimension])
    if scales != (channels if per_channel else 1):
        raise UnsupportedError(
            f"per_channel={str(per_channel).lower()}: this version of the converter gave "
            f"{weights.name.decode()} {scales} scales for {channels} channels"
        )


def _activation_ranges(model: Any) -> dict[str, Range]:
    """Return the range that each int8 activation can hold, by the name of its tensor.

    A fused tensor bears the names of all it was made of; the first is what it would be in Keras.
    """
    ranges: dict[str, Range] = {}
    for tensor in model.subgraphs[0].tensors:
        constant = model.buffers[tensor.buffer].data is not None
        if tensor.type == TensorType.INT8 and not constant:
            scale, zero_point = tensor.quantization.scale[0], tensor.quantization.zeroPoint[0]
            low, high = (float(scale) * (level - int(zero_point)) for level in (-128, 127))
            whole = tensor.name.decode()
            first = whole.partition(";")[0]
            ranges[whole if first in ranges else first] = (low, high)
    return ranges
