"""Files quantized by other programs: checked, matched to the FP32 network, scored."""
