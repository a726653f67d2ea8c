"""Grids of rounding, bits of each layer, and the selection of nodes to quantize."""
