"""The report of a finished sweep, made from its records in MLflow."""
