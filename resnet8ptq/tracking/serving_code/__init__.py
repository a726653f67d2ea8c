"""Modules that MLflow copies beside files without a flavor; none imports another."""
