"""`method=qat`: from the FP32 network to one that quantization costs less."""
