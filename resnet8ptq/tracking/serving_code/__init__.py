"""Modules that MLflow copies beside the files that it cannot load itself; none imports another."""
