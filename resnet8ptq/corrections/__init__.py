"""Corrections of the FP32 network so that quantization costs it less, for every backend."""
