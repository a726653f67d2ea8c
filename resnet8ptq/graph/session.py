"""An ONNX graph as a session of ONNX Runtime, on the CPU."""

import logging

import onnxruntime

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import machine


def open_session(model: str | bytes, config: RunConfig) -> onnxruntime.InferenceSession:
    """Load a model, from a file or from bytes, with the run's number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = machine.threads(config.threads)
    options.inter_op_num_threads = 1
    options.log_severity_level = logging.ERROR // 10 - 1  # 3: errors
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
