"""The tracking server: MLflow on PostgreSQL, and who may reach it."""
