"""Reads numbers from untrusted files."""

import math


def as_finite(value: object) -> float | None:
    """Return the number in `value`, a number or a nested array of one; None for anything else.

    An array may be a list, or an object with `data`, as ONNX Runtime writes it. The result is also
    None for NaN, and for numbers whose magnitude is 2**128 or more.
    """
    while isinstance(value, dict | list):
        if isinstance(value, list) and len(value) != 1:
            return None
        value = value.get("data") if isinstance(value, dict) else value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    number = float(value) if abs(value) < 2**128 else math.inf  # an int may be beyond any float
    return number if math.isfinite(number) else None
