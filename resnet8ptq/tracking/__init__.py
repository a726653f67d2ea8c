"""Writes and reads runs: in their folders (`journal`) and in MLflow (`mlflow_store`)."""
