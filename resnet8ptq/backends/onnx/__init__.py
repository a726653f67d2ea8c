"""ONNX Runtime: quantizer, predictor, and rewriting of its files."""
