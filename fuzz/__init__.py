"""Fuzzing of the readers; see README.md. `targets` is what tests/test_fuzz.py holds them to."""
