"""Sweepers, in Hydra's namespace for plugins."""
