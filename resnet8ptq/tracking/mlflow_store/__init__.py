"""The MLflow store: its address, its runs and models, and the upload to it."""
