"""Modules that MLflow copies beside a TFLite or torch file to serve it; none imports another."""
