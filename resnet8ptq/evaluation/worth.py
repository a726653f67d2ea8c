"""The rule that decides whether a quantized file is worth deploying instead of FP32."""

MOST_BYTES = 0.9  # fraction of FP32's bytes
LEAST_SPEED = 1.05  # fraction of FP32's speed; two loadings of one file differ by less

WORTH = (
    f"a file is worth deploying with at most {MOST_BYTES:.0%} of FP32's bytes, or "
    f"{LEAST_SPEED - 1:.0%} faster"
)


def saves(size_bytes: float, fp32_bytes: float, speedup: float | None = None) -> bool:
    """Return whether a file has at most 90% of FP32's bytes, or is at least 5% faster.

    Args:
        fp32_bytes: size of the FP32 file; 0 if unknown, in which case every file counts as smaller.
        speedup: speed relative to FP32; None if not measured.
    """
    if not fp32_bytes or size_bytes <= MOST_BYTES * fp32_bytes:
        return True
    return speedup is not None and speedup >= LEAST_SPEED
