"""The record of a run, and its journal in its folder; `mlflow_store` keeps the run in MLflow."""
