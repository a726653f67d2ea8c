"""Sweeps: the parent run, the jobs, resuming, and the search of `experiment=auto`."""
