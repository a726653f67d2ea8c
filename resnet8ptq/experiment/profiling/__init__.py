"""Where the time of a quantized network goes, operator by operator, beside FP32."""
