"""TensorFlow, made quiet and exact before it is imported."""

import os


def prepare() -> None:
    """Set what TensorFlow reads from the environment as it is imported."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # plain FP32 sums, and no banner about others
