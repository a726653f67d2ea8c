"""What is known to help a quantized network, and the order in which it is tried."""
