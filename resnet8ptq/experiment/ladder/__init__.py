"""Changes that help quantized networks, and the order in which they are tried."""
