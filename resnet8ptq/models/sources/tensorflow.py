"""Settings of TensorFlow that must precede its import."""

import os


def prepare() -> None:
    """Silence TensorFlow and turn oneDNN off, by environment variables."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # plain FP32 sums, without a banner
