"""Runs the network as a torch module: with fake quantization, or to make synthetic samples."""
