"""OpenVINO: runs the QDQ files of `backends.onnx`, with its own fusions and kernels."""
