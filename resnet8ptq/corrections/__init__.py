"""Corrections of the FP32 network that reduce the loss by quantization, for every backend."""
