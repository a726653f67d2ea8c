"""Checks and runs files of other programs, with the inputs and outputs of the FP32 network."""

from resnet8ptq.core.descriptor import FILE, Backend

BACKEND = Backend(
    name=FILE,
    rank=7,
    quantizer="resnet8ptq.backends.file.quantizer:FileQuantizer",
    options="resnet8ptq.backends.file.options:FileConfig",
    quantizes=False,
    has_ranges=False,
    not_served="the inputs of such a file are its own, not those of the network",
)
