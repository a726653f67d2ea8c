"""ONNX Runtime: quantizer, predictor, and what is special to its files."""
