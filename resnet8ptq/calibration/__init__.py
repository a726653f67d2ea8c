"""Calibration: activation ranges from calibration samples."""
