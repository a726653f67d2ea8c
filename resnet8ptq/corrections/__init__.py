"""Corrections of the FP32 network that reduce the quantization loss, before a backend takes it."""
