"""ONNX graphs: reading, rewriting and running them, and conversion to torch modules."""
