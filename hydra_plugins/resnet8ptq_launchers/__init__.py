"""Launchers of a sweep's jobs.

Hydra looks for them in packages of this namespace only.

Hydra imports every module here at each start, so that Ray and submitit are imported where they are
used.
"""
