"""Fuzzing of the readers, and kills of sweeps; see README.md.

`targets` is what tests/fuzz holds the readers to.
"""
