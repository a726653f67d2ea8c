"""Files that other programs have quantized: read with care, matched to the FP32 network, scored."""
