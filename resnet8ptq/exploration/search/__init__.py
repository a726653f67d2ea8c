"""Changes of settings that reduce the quantization loss, and the order of trying them."""
