"""One module for each file format that a network may come in."""
