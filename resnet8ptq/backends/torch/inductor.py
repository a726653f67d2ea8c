"""PT2E onto integer kernels: what `pt2e` places, Inductor compiles to calls of oneDNN's.

They are the same as FX graph mode's, with the code between them fused and compiled.
"""

from functools import partial

from resnet8ptq.backends.contract import Takes
from resnet8ptq.backends.torch import fx, pt2e

TAKES: Takes = {
    **pt2e.TAKES,
    **fx.WEIGHTS,
}

# Inductor knows oneDNN's kernels by weights with a scale for each channel.
quantize = partial(pt2e.quantize, repeat_scales=True)
