"""ONNX Runtime: static quantization in QDQ format."""

import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.calibrate import (
    CalibrationMethod,
    TensorData,
    TensorsData,
    save_tensors_data,
)

from resnet8ptq import calibration_table, environment, files
from resnet8ptq.calibration import Range, TensorStats, find_range, needs_histogram
from resnet8ptq.config import CalibConfig, RunConfig
from resnet8ptq.data import Split
from resnet8ptq.errors import QuantizationError, UnsupportedError
from resnet8ptq.interfaces import Artifact
from resnet8ptq.model import Fp32Model
from resnet8ptq.nodes import LAYERS, find_float_nodes
from resnet8ptq.terminal import track

MODEL_FILE = "model.onnx"

# dtype -> (activations, weights)
DTYPES = {
    "int8": (QuantType.QInt8, QuantType.QInt8),
    "uint8": (QuantType.QUInt8, QuantType.QUInt8),
    "u8s8": (QuantType.QUInt8, QuantType.QInt8),
}
_NAMES = {QuantType.QInt8: "int8", QuantType.QUInt8: "uint8"}


@dataclass(frozen=True)
class OnnxPredictor:
    """An inference session on the file at `path`."""

    session: onnxruntime.InferenceSession
    path: Path
    config: RunConfig

    def predict(self, batch: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return probabilities [n, classes] for raw pixels [n, H, W, C]."""
        return np.asarray(self.session.run(None, {self.session.get_inputs()[0].name: batch})[0])

    def logits(self, batch: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return what the final softmax takes [n, classes]; None where the graph ends in none."""
        session = self._logits_session
        if session is None:
            return None
        return np.asarray(session.run(None, {session.get_inputs()[0].name: batch})[0])

    @cached_property
    def _logits_session(self) -> onnxruntime.InferenceSession | None:
        proto = _end_at_logits(onnx.load(self.path))
        return None if proto is None else _session(proto.SerializeToString(), self.config)


@dataclass(frozen=True)
class OnnxQuantizer:
    """See `interfaces.Quantizer`."""

    config: RunConfig

    def resolve(self) -> dict[str, str]:
        """Return weight and activation dtype and the format."""
        if self.config.dtype.name == "fp32":
            return {
                "weight_dtype": "float32",
                "activation_dtype": "float32",
                "execution": "float",
            }
        if self.config.calib.name == "histogram":
            raise UnsupportedError(
                "calib=histogram is torch's own observer; onnx takes minmax | entropy | percentile"
            )
        activations, weights = DTYPES[self.config.dtype.name]
        return {
            "weight_dtype": _NAMES[weights],
            "activation_dtype": _NAMES[activations],
            "execution": "integer",
            "file_format": "QDQ",
        }

    def quantize(
        self,
        model: Fp32Model,
        calibration: Split,
        folder: Path,
        ranges: Mapping[str, Range] | None = None,
    ) -> Artifact:
        """Calibrate, then let `quantize_static` place the Q and DQ nodes."""
        path = folder / MODEL_FILE
        if self.config.dtype.name == "fp32":
            with files.atomic(path) as temporary:
                shutil.copyfile(model.onnx_path, temporary)
            return Artifact(path)

        proto = onnx.load(model.onnx_path)
        skipped = find_float_nodes(proto.graph, self.config)
        if ranges is None:
            ranges = self._calibrate(proto, skipped, calibration)
        else:
            calibration_table.check_complete(ranges, _expose_activations(proto, skipped)[1])
        activations, weights = DTYPES[self.config.dtype.name]
        with files.atomic(path) as temporary, tempfile.TemporaryDirectory() as scratch:
            # ONNX Runtime takes ranges made elsewhere through its calibration cache.
            table = Path(scratch, "ranges.json")
            save_tensors_data(_as_tensors_data(ranges), table)
            quantize_static(
                model.onnx_path,
                temporary,
                quant_format=QuantFormat.QDQ,
                activation_type=activations,
                weight_type=weights,
                per_channel=self.config.per_channel,
                nodes_to_exclude=skipped,
                calibrate_method=CalibrationMethod.MinMax,
                calibration_cache_path=table,
            )
        layers = count_quantized_layers(onnx.load(path))
        if layers == 0:
            raise QuantizationError(f"ONNX Runtime quantized nothing in {model.onnx_path}")
        return Artifact(path, layers, dict(ranges))

    def load(self, path: Path) -> OnnxPredictor:
        """Load an ONNX file."""
        return OnnxPredictor(_session(str(path), self.config), path, self.config)

    def _calibrate(
        self, proto: onnx.ModelProto, skipped: list[str], calibration: Split
    ) -> dict[str, Range]:
        config = self.config.calib
        proto, names = _expose_activations(proto, skipped)
        session = _session(proto.SerializeToString(), self.config)
        input_name = session.get_inputs()[0].name
        stats = {name: TensorStats() for name in [input_name, *names]}
        passes = ["ranges", "histograms"] if needs_histogram(config.name) else ["ranges"]
        for stage in passes:
            for batch in track(calibration.batches(config.batch_size), f"Calibrating: {stage}"):
                outputs = zip(names, session.run(names, {input_name: batch}), strict=True)
                _observe(stats, {input_name: batch, **dict(outputs)}, stage, config)
        return {name: find_range(stat, config) for name, stat in stats.items()}


def _observe(
    stats: dict[str, TensorStats],
    tensors: dict[str, NDArray[np.float32]],
    stage: str,
    config: CalibConfig,
) -> None:
    for name, values in tensors.items():
        if stage == "ranges":
            stats[name].observe_range(values)
        else:
            stats[name].observe_histogram(values, config.num_bins)


def _session(model: str | bytes, config: RunConfig) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = environment.threads(config.threads)
    options.inter_op_num_threads = 1
    options.log_severity_level = logging.ERROR // 10 - 1  # 3: errors
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _expose_activations(
    proto: onnx.ModelProto, skipped: list[str]
) -> tuple[onnx.ModelProto, list[str]]:
    """Make the float activations around quantized nodes outputs of the graph; return their names.

    `skipped` nodes stay in float: tensors between two of them need no range.
    """
    graph = onnx.shape_inference.infer_shapes(proto).graph
    known = {value.name: value for value in [*graph.value_info, *graph.output]}
    used = {
        name
        for node in graph.node
        if node.name not in skipped
        for name in (*node.input, *node.output)
    }
    produced = [name for node in graph.node for name in node.output if name in used]
    floats = [
        name
        for name in produced
        if name in known and known[name].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    ]
    del proto.graph.output[:]
    proto.graph.output.extend(known[name] for name in floats)
    return proto, floats


def _end_at_logits(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Make the final softmax's input the only output; None where the graph ends in no softmax."""
    producers = {name: node for node in proto.graph.node for name in node.output}
    node = producers.get(proto.graph.output[0].name)
    while node is not None and node.op_type in ("QuantizeLinear", "DequantizeLinear", "Identity"):
        node = producers.get(node.input[0])
    if node is None or node.op_type != "Softmax":
        return None
    del proto.graph.output[:]
    proto.graph.output.append(
        onnx.helper.make_tensor_value_info(node.input[0], onnx.TensorProto.FLOAT, None)
    )
    return proto


def _as_tensors_data(ranges: Mapping[str, Range]) -> TensorsData:
    data = {
        name: TensorData(lowest=np.float32(low), highest=np.float32(high))
        for name, (low, high) in ranges.items()
    }
    return TensorsData(CalibrationMethod.MinMax, data)


def count_quantized_layers(proto: onnx.ModelProto) -> int:
    """Count convolutions and matrix products whose data and weights come dequantized (QDQ)."""
    dequantized = {
        name
        for node in proto.graph.node
        if node.op_type == "DequantizeLinear"
        for name in node.output
    }
    layers = [node for node in proto.graph.node if node.op_type in LAYERS]
    return sum(set(node.input[:2]) <= dequantized for node in layers)
