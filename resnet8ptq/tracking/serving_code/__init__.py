"""Modules that MLflow copies beside TFLite, torch or OpenVINO files; none imports another."""
