"""The FP32 network: converts the user's file to ONNX, checks and caches it."""
