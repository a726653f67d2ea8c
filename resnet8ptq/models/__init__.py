"""The FP32 network: from the user's file to ONNX that is checked and cached."""
