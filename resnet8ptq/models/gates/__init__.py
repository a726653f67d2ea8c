"""Checks of untrusted files, one module for each format, before a library reads them."""

# The end of the message about a file that is already quantized.
EXPECTS_FP32 = "expected the FP32 model; to score this file beside it: resnet8ptq judge FP32 FILE"
