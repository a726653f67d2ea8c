"""Samples and labels: their sources, preprocessing, and draws for calibration and choices."""
