"""OpenVINO: runs the QDQ files of `backends.onnx` with OpenVINO's fusions and kernels."""
