"""The report of a finished sweep, which is read back from MLflow."""
