"""PT2E with integer kernels: Inductor compiles the operators that `pt2e` places to calls of oneDNN.

The kernels are those of FX graph mode; the code between them is fused and compiled.
"""

from functools import partial

from resnet8ptq.backends.contract import Takes
from resnet8ptq.backends.torch import fx, pt2e

TAKES: Takes = {**pt2e.TAKES, **fx.WEIGHTS}

# Inductor's patterns of oneDNN's kernels need weights with a scale for each channel.
quantize = partial(pt2e.quantize, repeat_scales=True)
