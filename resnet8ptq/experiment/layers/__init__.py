"""Sensitivity of each layer, layers left in float, and bits of each layer."""
