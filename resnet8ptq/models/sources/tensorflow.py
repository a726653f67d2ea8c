"""Settings of TensorFlow that must precede its import."""

import logging
import os


def prepare() -> None:
    """Silence TensorFlow and tf2onnx, and turn oneDNN off."""
    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # plain FP32 sums, without a banner
