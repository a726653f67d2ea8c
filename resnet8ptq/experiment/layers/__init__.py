"""Which layers lose most when they are quantized, and which are then left in float."""
