"""What a run can be told, and the checks of it."""
