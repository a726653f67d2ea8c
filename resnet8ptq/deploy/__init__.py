"""Exports a run's model as a folder, registers it, and reads measurements of another machine."""
