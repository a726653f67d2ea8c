"""Samples and labels: sources, preprocessing, and draws for calibration and choices."""
