"""Corrections of the FP32 network that make quantization cost less, for every backend."""
