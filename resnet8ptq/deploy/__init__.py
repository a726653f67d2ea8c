"""Exports a run's model as a folder, registers it, and adds figures of another machine."""
