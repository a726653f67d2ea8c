"""The Pareto front: no other point is as good on every objective and better on one."""

import numpy as np
from numpy.typing import NDArray


def mask(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which points [n, objectives] are on the front [n]; lower costs are better.

    A point is dominated by one that is nowhere worse and somewhere better; equal points are not.
    """
    dominated = [
        ((costs <= point).all(axis=1) & (costs < point).any(axis=1)).any()
        for point in costs  # one by one: all pairs would take n * n of memory
    ]
    return ~np.array(dominated, dtype=bool)
