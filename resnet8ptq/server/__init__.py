"""The tracking server: MLflow on PostgreSQL, and access to it."""
