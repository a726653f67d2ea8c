"""The embedded data set `phrases`: its short texts and an encoder trained on them."""

from pathlib import Path

NETWORK = Path(__file__).with_name("encoder.onnx")
