"""`+analysis=compare`: compares a quantized file of any format with FP32, tensor by tensor."""
