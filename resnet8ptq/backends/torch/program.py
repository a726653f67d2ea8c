"""A network as an exported program (.pt2): saved, checked, loaded, read."""

import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators of a quantized program
from numpy.typing import NDArray
from torch.export import ExportedProgram

from resnet8ptq.backends.torch.annotate import LAYERS, SOFTMAX
from resnet8ptq.backends.torch.torchscript import copy_reproducibly, infer, known_warnings
from resnet8ptq.core import files
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.core.text import one_line
from resnet8ptq.models.gates import torch_archive
from resnet8ptq.models.gates.exported_program import read

MODEL_FILE = "model.pt2"

_ops = torch.ops.quantized_decomposed
_ROUNDED = (
    _ops.quantize_per_tensor.default,
    _ops.dequantize_per_tensor.default,
    _ops.dequantize_per_channel.default,
)


@dataclass(frozen=True)
class ExportedPredictor:
    """An exported program, as a module."""

    module: Any

    def predict(self, batch: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        """Return each output [n, ...] for network inputs [n, ...]."""
        return infer(self.module, batch)

    def logits(self, batch: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return what the final softmax takes [n, classes]; None without a softmax."""
        return None if self._logits_module is None else infer(self._logits_module, batch)[0]

    @cached_property
    def _logits_module(self) -> Any | None:
        graph = torch.fx.Graph()
        (output,) = graph.graph_copy(self.module.graph, {}, return_output_node=True)[0]
        graph.set_codegen(self.module.graph._codegen)
        while output.target in _ROUNDED:
            output = output.args[0]
        if output.target not in SOFTMAX:
            return None
        graph.output((output.args[0],))
        graph.eliminate_dead_code()
        return torch.fx.GraphModule(self.module, graph)


def save(program: ExportedProgram, path: Path) -> None:
    """Write a program to `path`, all or nothing; the same program gives the same bytes."""
    program.example_inputs = None
    for node in program.graph.nodes:  # all but the shape: where in the Python code it was traced
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    archive = io.BytesIO()
    with known_warnings():
        torch.export.save(program, archive)
    with files.atomic(path) as temporary:
        copy_reproducibly(archive, temporary, compressed=(".json",))


def load(path: Path) -> ExportedPredictor:
    """Load a program that `save` wrote.

    Raises:
        QuantizationError: the file holds more than that; torch might run what it says.
    """
    packed = torch_archive.pack(read(path))
    try:
        with known_warnings():
            return ExportedPredictor(torch.export.load(packed).module())
    except Exception as error:  # torch's own, dozens
        raise QuantizationError(f"{path}: torch cannot load it ({one_line(error)})") from error


def count_quantized_layers(path: Path) -> int:
    """Count the convolutions and matrix products whose data and weights come dequantized."""
    layers = [node for node in load(path).module.graph.nodes if node.target in LAYERS]
    return sum(all(i.target in _ROUNDED for i in layer.args[:2]) for layer in layers)
