"""A sweep: its parent run, its jobs, and going on with it."""
