"""The time of each operator of a quantized network, beside FP32."""
