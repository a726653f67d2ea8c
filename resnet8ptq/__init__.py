"""Post-training quantization experiments: configured by Hydra, tracked by MLflow."""

__version__ = "0.1.0"
