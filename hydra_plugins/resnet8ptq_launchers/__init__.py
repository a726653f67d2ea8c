"""Launchers of a sweep's jobs, and the user's config folder, in Hydra's namespace for plugins.

Hydra imports every module here at each start, so Ray and submitit are imported inside the functions
that need them.
"""
