"""Measures each layer's sensitivity, and chooses the layers in float and the bits of each layer."""
