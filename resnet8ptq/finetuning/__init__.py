"""Fine-tuning of the FP32 network with fake quantization, for `method=qat`."""
