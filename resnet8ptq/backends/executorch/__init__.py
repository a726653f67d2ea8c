"""ExecuTorch: PT2E's program, lowered to XNNPACK's kernels and run by ExecuTorch's runtime."""
