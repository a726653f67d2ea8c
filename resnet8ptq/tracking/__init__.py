"""A run's journal in its folder, and its run in MLflow."""
