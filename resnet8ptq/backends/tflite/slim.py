"""`slim`: a .tflite file without what inference does not read."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Run
from resnet8ptq.backends.tflite import contents
from resnet8ptq.core.errors import QuantizationError


def slim(content: bytes) -> bytes:
    """Return a file without descriptions, metadata and names, and with equal vectors once.

    Inputs and outputs keep their names, and so does the signature.
    """
    model = contents.read(content)
    model.description = model.metadata = model.metadataBuffer = None
    graph = model.subgraphs[0]
    graph.name = None
    named = {*graph.inputs, *graph.outputs}
    for index, tensor in enumerate(graph.tensors):
        if index not in named:
            tensor.name = None
        if tensor.quantization is not None:
            tensor.quantization.min = tensor.quantization.max = None
    return contents.write(model, share=True)


def check_same(whole: Run, small: Run, batches: Iterable[NDArray[np.float32]]) -> None:
    """Run both on batches of samples.

    Raises:
        QuantizationError: one bit of one output differs.
    """
    for batch in batches:
        pairs = zip(whole(batch), small(batch), strict=True)
        if not all(np.array_equal(one, other) for one, other in pairs):
            raise QuantizationError("slim: the slimmed file predicts differently")
