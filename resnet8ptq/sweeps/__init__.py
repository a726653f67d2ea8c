"""A sweep: its parent run, its jobs, resuming, and the ladder of `experiment=auto`."""
