"""ONNX graphs: layers, weights, sessions, the logits, and the graph as a torch module."""
