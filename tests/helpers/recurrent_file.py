"""A .tflite file with a recurrent operator, which keeps its state in the interpreter."""

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.tools import flatbuffer_utils
from numpy.typing import NDArray

STEPS = 5
WIDTH = 4
UNITS = 8


def make_recurrent_file() -> bytes:
    """Return a file with one recurrent layer: [1, STEPS, WIDTH] to [1, STEPS, UNITS]."""
    code = schema.BuiltinOperator.UNIDIRECTIONAL_SEQUENCE_RNN
    random = np.random.default_rng(0)
    buffers = [schema.BufferT()]
    tensors: list[Any] = []

    def add(name: str, *shape: int, values: NDArray[Any] | None = None, state: bool = False) -> int:
        buffer = 0
        if values is not None:
            content = np.frombuffer(values.astype(np.float32).tobytes(), np.uint8)
            buffer = len(buffers)
            buffers.append(schema.BufferT(data=content))
        tensor = schema.TensorT(
            name=name.encode(),
            shape=list(shape),
            type=schema.TensorType.FLOAT32,
            buffer=buffer,
            isVariable=state,
            hasRank=True,
        )
        tensors.append(tensor)
        return len(tensors) - 1

    steps = add("x", 1, STEPS, WIDTH)
    weights = add("weights", UNITS, WIDTH, values=random.normal(size=(UNITS, WIDTH)))
    recurrent = add("recurrent", UNITS, UNITS, values=random.normal(size=(UNITS, UNITS)))
    bias = add("bias", UNITS, values=np.zeros(UNITS))
    state = add("state", 1, UNITS, state=True)
    result = add("y", 1, STEPS, UNITS)
    layer = schema.OperatorT(
        opcodeIndex=0,
        inputs=[steps, weights, recurrent, bias, state],
        outputs=[result],
        builtinOptionsType=schema.BuiltinOptions.SequenceRNNOptions,
        builtinOptions=schema.SequenceRNNOptionsT(
            fusedActivationFunction=schema.ActivationFunctionType.TANH
        ),
    )
    graph = schema.SubGraphT(
        tensors=tensors, inputs=[steps], outputs=[result], operators=[layer], name=b"main"
    )
    operator = schema.OperatorCodeT(deprecatedBuiltinCode=code, builtinCode=code, version=1)
    model = schema.ModelT(version=3, operatorCodes=[operator], subgraphs=[graph], buffers=buffers)
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))
