"""Time and memory beside the bare libraries: `python -m benchmarks`, or `make bench`."""
