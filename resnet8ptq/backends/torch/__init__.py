"""PyTorch: FX graph mode and PT2E, and the checks of the files that are loaded."""
