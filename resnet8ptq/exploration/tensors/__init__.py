"""`+analysis=compare`: a quantized file of any format beside FP32, tensor by tensor."""
