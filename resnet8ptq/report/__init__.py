"""Verdicts, recommendations and reports of runs and sweeps, from their records and files."""
