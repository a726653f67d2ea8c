"""ONNX Runtime: quantizer, predictor, and changes to its files."""
