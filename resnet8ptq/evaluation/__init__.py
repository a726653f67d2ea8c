"""Scores artifacts and their FP32 baselines, and measures latencies."""
