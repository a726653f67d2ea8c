"""`method=qat`: fine-tuning of the FP32 network with fake quantization."""
