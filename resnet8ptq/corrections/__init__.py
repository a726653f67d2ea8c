"""Corrections of the FP32 network that reduce the quantization loss, for every backend."""
