"""A TFLite file, run by LiteRT's interpreter."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from ai_edge_litert.tools import flatbuffer_utils as flatbuffer
from numpy.typing import NDArray


@dataclass(frozen=True)
class TflitePredictor:
    """An interpreter on the file at `path`; XNNPACK's kernels where it has them."""

    interpreter: Any
    path: Path
    threads: int

    def predict(self, batch: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        """Return each output [n, ...] for network inputs [n, ...]."""
        return _run(self.interpreter, batch)

    def logits(self, batch: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return what the final softmax takes [n, classes]; None without a softmax."""
        if self._logits_interpreter is None:
            return None
        return _run(self._logits_interpreter, batch)[0]

    @cached_property
    def _logits_interpreter(self) -> Any | None:
        """A copy cut before the softmax: an interpreter that keeps all tensors has no XNNPACK."""
        content = _end_at_logits(self.path.read_bytes())
        return None if content is None else open_interpreter(content, self.threads)


def open_interpreter(content: bytes, threads: int) -> Any:
    """Return an interpreter of a file's content, ready to run."""
    interpreter = Interpreter(model_content=content, num_threads=threads)
    interpreter.allocate_tensors()
    return interpreter


def _run(interpreter: Any, batch: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
    """Run a batch of any size; integers in and out are scaled by the tensors' own parameters."""
    (taken,) = interpreter.get_input_details()
    if tuple(taken["shape"]) != batch.shape:
        interpreter.resize_tensor_input(taken["index"], batch.shape)
        interpreter.allocate_tensors()
    if taken["dtype"] == np.int8:
        scale, zero_point = taken["quantization"]
        levels = np.rint(batch / np.float32(scale)) + np.float32(zero_point)
        batch = np.clip(levels, -128, 127).astype(np.int8)
    interpreter.set_tensor(taken["index"], batch)
    interpreter.invoke()
    return tuple(_read(interpreter, given) for given in interpreter.get_output_details())


def _read(interpreter: Any, given: dict[str, Any]) -> NDArray[np.float32]:
    output = interpreter.get_tensor(given["index"])
    if given["dtype"] == np.int8:
        scale, zero_point = given["quantization"]
        output = (output.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
    return np.asarray(output)


def _end_at_logits(content: bytes) -> bytes | None:
    """Make the final softmax's input the only output; None where the graph does not end in one."""
    model = flatbuffer.convert_bytearray_to_object(content)
    graph = model.subgraphs[0]
    last = graph.operators[-1]
    ends = flatbuffer.opcode_to_name(model, last.opcodeIndex) == "SOFTMAX"
    if not ends or list(last.outputs) != list(graph.outputs):
        return None
    graph.operators.pop()
    graph.outputs = [last.inputs[0]]
    model.signatureDefs = None  # which name the old output
    return bytes(flatbuffer.convert_object_to_bytearray(model))
