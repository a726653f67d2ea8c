"""What MLflow copies beside a TFLite or torch file, to serve it: each module imports no other."""
