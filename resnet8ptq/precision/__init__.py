"""Grids for rounding, the bits of each layer, and the selection of nodes to quantize."""
