"""Calibration: activation ranges from calibration images."""
