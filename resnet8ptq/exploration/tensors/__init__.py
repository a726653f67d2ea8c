"""`+analysis=compare`: compares a quantized file with FP32, tensor by tensor."""
