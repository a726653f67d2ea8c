"""A sweep: its parent run, its jobs, resuming, and the search of `experiment=auto`."""
