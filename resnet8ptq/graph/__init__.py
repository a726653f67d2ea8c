"""ONNX graphs: layers, attention, weights, links, passes, sessions, and torch modules."""
