"""A run's record: in its own folder, and in MLflow."""
