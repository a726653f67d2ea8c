"""Fuzzing of the readers; see README.md. `targets` is what tests/fuzz holds them to."""
