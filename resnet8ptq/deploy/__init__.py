"""Exports a run: a folder with the model and its verification, and a registered model."""
