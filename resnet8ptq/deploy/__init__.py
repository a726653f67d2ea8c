"""Exports a run as a folder with the model and its verification, or as a registered model."""
