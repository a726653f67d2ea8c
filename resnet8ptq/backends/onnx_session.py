"""Run an ONNX file in ONNX Runtime, on the CPU."""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import machine

_PASSES_ON = ("QuantizeLinear", "DequantizeLinear", "Identity")


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
        return None if proto is None else open_session(proto.SerializeToString(), self.config)


def open_session(model: str | bytes, config: RunConfig) -> onnxruntime.InferenceSession:
    """Load a model, from a file or from bytes, with the run's number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = machine.threads(config.threads)
    options.inter_op_num_threads = 1
    options.log_severity_level = logging.ERROR // 10 - 1  # 3: errors
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def last_node(graph: onnx.GraphProto, skipped: tuple[str, ...]) -> onnx.NodeProto | None:
    """Return the node that makes the output, going back through operators in `skipped`."""
    producers = {name: node for node in graph.node for name in node.output}
    node = producers.get(graph.output[0].name)
    while node is not None and node.op_type in skipped:
        node = producers.get(node.input[0])
    return node


def _end_at_logits(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Make the final softmax's input the only output; None where the graph ends in no softmax."""
    node = last_node(proto.graph, _PASSES_ON)
    if node is None or node.op_type not in ("Softmax", "QLinearSoftmax"):
        return None
    name = node.input[0]
    if node.op_type == "QLinearSoftmax":
        proto.graph.node.append(helper.make_node("DequantizeLinear", node.input[:3], ["logits"]))
        name = "logits"
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return proto
