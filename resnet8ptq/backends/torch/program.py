"""Saves a network as an exported program (.pt2), loads it, and counts its layers."""

import contextlib
import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators of a quantized program
from torch.export import ExportedProgram

from resnet8ptq.backends.contract import Predict, Predictor
from resnet8ptq.backends.torch.annotate import LAYERS, SOFTMAX
from resnet8ptq.backends.torch.torchscript import Example, copy_reproducibly, known_warnings
from resnet8ptq.core import files
from resnet8ptq.core.errors import QuantizationError, UnsupportedError, errors_as
from resnet8ptq.graph.torch_module import infer
from resnet8ptq.models.gates import exported_program, torch_archive

MODEL_FILE = "model.pt2"
FORMAT = "PT2"

_ops = torch.ops.quantized_decomposed
ROUNDED = (
    _ops.quantize_per_tensor.default,
    _ops.dequantize_per_tensor.default,
    _ops.dequantize_per_channel.default,
)


def export(module: Any, example: Example, most: int | None = None) -> ExportedProgram:
    """Export a network for any batch size up to `most`, and for the free lengths of `example`.

    Args:
        most: the largest batch size, with which the network is traced, because a program may refuse
            batches larger than the traced one. A free length is then at most the largest length in
            `example`. With 1, the batch size is fixed; with None, batch and length have no limit.

    Raises:
        UnsupportedError: torch.export cannot trace the network.
    """
    for weights in [*module.parameters(), *module.buffers()]:
        weights.data = weights.data.contiguous()  # torch would save a transposed view as a view
    axes = {}
    if most != 1:  # torch treats a batch of 1 as fixed
        axes[0] = torch.export.Dim("batch", max=most)
    longest = None
    if any(example.any_length) and most:
        longest = max(values.shape[1] for values in example.inputs)
    length = torch.export.Dim("length", max=longest)

    # Repeat each input into a batch, and name its free axes
    batch = []
    free = []
    for values, any_length in zip(example.inputs, example.any_length, strict=True):
        batch.append(values.repeat(most or 2, *[1] * (values.ndim - 1)))
        own_axes = dict(axes)
        if any_length:
            own_axes[1] = length
        free.append(own_axes)

    # Trace, and print nothing on an error
    printed = io.StringIO()  # torch prints the whole graph on an error
    why = "torch.export cannot trace the network, which backend=onnx takes"
    with errors_as(UnsupportedError, why), known_warnings(), contextlib.redirect_stderr(printed):
        program = torch.export.export(module, tuple(batch), dynamic_shapes=tuple(free))
    sys.stderr.write(printed.getvalue())
    return program


def save(module: Any, example: Example, path: Path, *_: bool) -> None:
    """Export a network and write it to `path` atomically; equal networks give equal bytes.

    Raises:
        UnsupportedError: see `export`; or `load` would refuse the file.
    """
    program = export(module, example)

    # Drop the parts that the gate refuses, and those that differ between processes
    program.example_inputs = None
    program._guards_code = []  # drop checks in Python code, which the gate refuses
    for node in program.graph.nodes:  # keep the shape; drop origins in Python code
        node.meta = {key: value for key, value in node.meta.items() if key == "val"}
    archive = io.BytesIO()
    with known_warnings():
        torch.export.save(program, archive)

    # Read the file as `load` does, before it is complete under its name
    with files.atomic(path) as temporary:
        copy_reproducibly(archive, temporary, compressed=(".json",))
        try:
            exported_program.read_records(temporary)
        except QuantizationError as error:
            reason = str(error).removeprefix(f"{temporary}: ")
            why = f"a saved program may not hold the whole network ({reason}); try backend=torch"
            raise UnsupportedError(why) from None


def load(path: Path) -> Predictor:
    """Load a program that `save` wrote; raise `QuantizationError` if it is damaged or unsafe."""
    module = _open(path)
    return Predictor(partial(infer, module), partial(_end_at_logits, module))


def _open(path: Path) -> Any:
    packed = torch_archive.pack(exported_program.read_records(path))
    with errors_as(QuantizationError, f"{path}: torch cannot load it"), known_warnings():
        return torch.export.load(packed).module()


def _end_at_logits(module: Any) -> Predict | None:
    """Return a copy that ends before the final softmax.

    Returns None if no softmax computes the only output.
    """
    graph = torch.fx.Graph()
    outputs = graph.graph_copy(module.graph, {}, return_output_node=True)[0]
    if len(outputs) != 1:
        return None
    [output] = outputs
    graph.set_codegen(module.graph._codegen)

    # The softmax's output may be rounded to its grid
    while output.target in ROUNDED:
        output = output.args[0]
    if output.target not in SOFTMAX:
        return None
    graph.output((output.args[0],))
    graph.eliminate_dead_code()
    return partial(infer, torch.fx.GraphModule(module, graph))


def count_layers(path: Path) -> tuple[int, int]:
    """Return the number of layers with quantized data and weights, and the number of others.

    Layers are the operators in `LAYERS`, which lacks transposed convolutions.
    """
    quantized = 0
    in_float = 0
    for node in _open(path).graph.nodes:
        if node.target not in LAYERS:
            continue
        data, weights = node.args[:2]
        if data.target in ROUNDED and weights.target in ROUNDED:
            quantized += 1
        else:
            in_float += 1
    return quantized, in_float
