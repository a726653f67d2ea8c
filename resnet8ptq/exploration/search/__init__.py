"""Changes of settings that reduce the quantization loss, and the order in which they are tried."""
