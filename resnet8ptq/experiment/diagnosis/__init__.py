"""Why a quantized network is worse than FP32: measured tensor by tensor, and what helps."""
