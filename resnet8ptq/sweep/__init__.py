"""A sweep: its parent run, its jobs, resuming it, and the ladder of `experiment=auto`."""
