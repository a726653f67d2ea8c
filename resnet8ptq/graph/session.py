"""An ONNX graph as a session of ONNX Runtime, on the CPU."""

import logging

import onnxruntime


def open_session(model: str | bytes, threads: int) -> onnxruntime.InferenceSession:
    """Load a model, from a file or from bytes, to run on so many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = logging.ERROR // 10 - 1  # 3: errors
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
