"""Fuzzing of the readers, and kills of sweeps; see README.md.

tests/fuzz checks the readers with the same `targets`.
"""
