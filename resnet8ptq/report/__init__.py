"""A finished sweep, read back from MLflow, compared and explained."""
