"""Time and memory compared with the bare libraries: `python -m benchmarks`, or `make bench`."""
