"""Simulates integer kernels in float, with the network as a torch module."""
