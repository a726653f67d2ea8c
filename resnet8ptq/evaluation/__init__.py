"""Measures the accuracy and latency of an artifact and of its FP32 baseline."""
