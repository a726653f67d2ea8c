"""A run's journal in its own folder, and its run in MLflow."""
