"""What the program costs beside the bare libraries: `python -m benchmarks`, or `make bench`."""
