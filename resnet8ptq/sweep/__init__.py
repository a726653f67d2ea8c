"""A sweep: its parent run, its jobs, resuming it, and what a search optimizes."""
