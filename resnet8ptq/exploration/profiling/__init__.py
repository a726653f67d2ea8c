"""The time of each operator of a quantized network and of FP32."""
