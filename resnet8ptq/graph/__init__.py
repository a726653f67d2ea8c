"""ONNX graphs: their layers and weights, running them, cutting them, as a torch module."""
