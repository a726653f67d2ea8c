"""ONNX graphs: layers, weights, links, passes, sessions, and conversion to torch modules."""
