"""Explores a network: how to quantize it, where its loss lies, and what its layers cost."""
