"""MLflow's pages of the runs, for one person."""
