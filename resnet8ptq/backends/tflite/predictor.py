"""Runs a TFLite file in LiteRT's interpreter."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predict, Predictor
from resnet8ptq.backends.tflite import contents
from resnet8ptq.models.batch_axis import in_batches

_REFERENCE = OpResolverType.BUILTIN_REF


def load(path: Path, threads: int) -> Predictor:
    """Load a file, to run on `threads` threads, with XNNPACK's kernels where they exist."""
    content = path.read_bytes()
    return Predictor(open_run(content, threads), partial(_open_logits, content, threads))


def open_interpreter(
    content: bytes, threads: int, keeps_all: bool = False, reference: bool = False
) -> Any:
    """Return LiteRT's interpreter of a file's content.

    Args:
        keeps_all: whether every tensor can be read after a run; XNNPACK then fuses no operators.
        reference: whether LiteRT's slow reference kernels run.
    """
    resolver = OpResolverType.AUTO
    if reference:
        resolver = _REFERENCE

    # LiteRT warns of the memory that all kept tensors take
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Enabling `experimental_preserve_all_tensors`")
        interpreter = Interpreter(
            model_content=content,
            num_threads=threads,
            experimental_preserve_all_tensors=keeps_all,
            experimental_op_resolver_type=resolver,
        )
    interpreter.allocate_tensors()
    return interpreter


def open_run(content: bytes, threads: int, reference: bool = False) -> Predict:
    """Return a function that runs the network on batches of any size."""
    return LoadedFile(open_interpreter(content, threads, reference=reference), read_output)


def _open_logits(content: bytes, threads: int) -> Predict | None:
    """Open a copy of the file without the final softmax; return None if `end_at_logits` does.

    The interpreter of the whole file does not keep the softmax's input.
    """
    cut = end_at_logits(content)
    return None if cut is None else open_run(cut, threads)


@dataclass
class LoadedFile:
    """Runs a file; float values for int8 and int16 inputs are quantized.

    Attributes:
        read: a function that returns an output, given the interpreter and the details of the
            output's tensor.
    """

    interpreter: Any
    read: Callable[[Any, dict[str, Any]], NDArray[Any]]
    _inputs: list[dict[str, Any]] = field(init=False)
    _outputs: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self._describe()

    def _describe(self) -> None:
        """Store the details of inputs and outputs, because reading them takes time."""
        self._inputs = self.interpreter.get_input_details()
        self._outputs = self.interpreter.get_output_details()

    def __call__(self, batch: NDArray[Any]) -> list[NDArray[Any]]:
        """Return each output [n, ...] of a network with one input, for a batch of any size."""
        if len(batch) > 1 and self._inputs[0]["shape_signature"][0] == 1:  # a fixed batch size of 1
            return in_batches(self, batch, 1)
        return self.run([batch])

    def run(self, values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return each output for one array per input; inputs are resized to the arrays' shapes."""
        # Resize only for new shapes, because the tensors are then allocated again
        pairs = list(zip(self._inputs, values, strict=True))
        if any(tuple(details["shape"]) != array.shape for details, array in pairs):
            for details, array in pairs:
                self.interpreter.resize_tensor_input(details["index"], array.shape)
            self.interpreter.allocate_tensors()
            self._describe()

        # Run; the details are new after a resize
        for details, array in zip(self._inputs, values, strict=True):
            self.interpreter.set_tensor(details["index"], to_input(array, details))
        self.interpreter.reset_all_variables()  # recurrent operators keep their state
        self.interpreter.invoke()
        return [self.read(self.interpreter, details) for details in self._outputs]


def to_input(batch: NDArray[Any], details: dict[str, Any]) -> NDArray[Any]:
    """Return samples in the form of an input: as levels if the input is int8 or int16.

    Samples that already have the input's dtype stay unchanged, and so do samples for inputs of
    other dtypes.
    """
    if details["dtype"] not in (np.int8, np.int16) or batch.dtype == details["dtype"]:
        return batch
    ends = np.iinfo(details["dtype"])
    scale, zero_point = details["quantization"]
    levels = np.rint(batch / np.float32(scale)) + np.float32(zero_point)
    return np.clip(levels, ends.min, ends.max).astype(details["dtype"])


def read_output(interpreter: Any, details: dict[str, Any]) -> NDArray[np.float32]:
    """Return an output; integers with a scale become float32."""
    output = interpreter.get_tensor(details["index"])
    scale, zero_point = details["quantization"]
    if scale and output.dtype.kind in "iu":
        output = (output.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
    return np.asarray(output)


def end_at_logits(content: bytes) -> bytes | None:
    """Return the file with the final softmax's input as its only output.

    Returns None if the last operator is no softmax, or does not compute all outputs.
    """
    model = contents.read_model(content)
    graph = model.subgraphs[0]
    code, last = list(contents.operators(model))[-1]
    if code != "SOFTMAX" or list(last.outputs) != list(graph.outputs):
        return None

    # Cut the softmax off
    graph.operators.pop()
    graph.outputs = [last.inputs[0]]
    model.signatureDefs = None  # the signatures name the old output
    return contents.write_model(model)
