"""What is measured of an artifact: accuracy, speed, and the FP32 baseline beside it."""
