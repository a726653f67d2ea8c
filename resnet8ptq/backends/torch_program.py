"""A network as an exported program (.pt2): saved, checked, loaded, read."""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators of a quantized program
from numpy.typing import NDArray
from torch.export import ExportedProgram

from resnet8ptq import files
from resnet8ptq.backends.torch_annotate import LAYERS, SOFTMAX
from resnet8ptq.backends.torchscript import copy_reproducibly, infer, known_warnings
from resnet8ptq.errors import QuantizationError

MODEL_FILE = "model.pt2"

# What `save` writes. Weights and constants are raw bytes, described in JSON.
_RECORDS = re.compile(
    r"archive/(archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
    r"|models/model\.json|data/sample_inputs/model\.pt|data/weights/weight_\d+"
    r"|data/constants/tensor_\d+|data/(weights|constants)/model_\w+_config\.json)"
)
_ops = torch.ops.quantized_decomposed
_ROUNDED = (
    _ops.quantize_per_tensor.default,
    _ops.dequantize_per_tensor.default,
    _ops.dequantize_per_channel.default,
)
_SAMPLE = "archive/data/sample_inputs/model.pt"
# A dimension: numbers and free dimensions, added and multiplied; no name that could be called.
_EXPRESSION = re.compile(r"(Symbol\('[su]\d+'(, \w+=True)*\)|[su]?\d+|[-+*/() ])+")


@dataclass(frozen=True)
class ExportedPredictor:
    """An exported program, as a module."""

    module: Any

    def predict(self, batch: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return probabilities [n, classes] for raw pixels [n, H, W, C]."""
        return infer(self.module, batch)

    def logits(self, batch: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return what the final softmax takes [n, classes]; None where the graph ends in none."""
        return None if self._logits_module is None else infer(self._logits_module, batch)

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
    _check(path)
    with known_warnings():
        return ExportedPredictor(torch.export.load(path).module())


def count_quantized_layers(path: Path) -> int:
    """Count the convolutions and matrix products whose data and weights come dequantized."""
    layers = [node for node in load(path).module.graph.nodes if node.target in LAYERS]
    return sum(all(i.target in _ROUNDED for i in layer.args[:2]) for layer in layers)


def _check(path: Path) -> None:
    """Refuse what `torch.export.load` would unpickle or evaluate.

    It takes pickled weights, sample inputs and older layouts without asking, and evaluates the
    expressions of dynamic shapes and of guards.
    """
    with zipfile.ZipFile(path) as archive:
        strange = [n for n in archive.namelist() if not _RECORDS.fullmatch(n)]
        described = [n for n in archive.namelist() if n.endswith(".json")]
        contents = {name: json.loads(archive.read(name)) for name in described}
        if _SAMPLE in archive.namelist() and archive.read(_SAMPLE):
            strange.append(_SAMPLE)
    for name, content in contents.items():
        for key, value in _items(content):
            plain = key != "expr_str" or _EXPRESSION.fullmatch(str(value))
            if (key in ("use_pickle", "guards_code") and value) or not plain:
                strange.append(f"{name}: {key}")
    if strange:
        raise QuantizationError(f"{path}: not a program that was saved here ({strange[0]})")


def _items(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of nested JSON."""
    if isinstance(content, list):
        for value in content:
            yield from _items(value)
    elif isinstance(content, dict):
        for key, value in content.items():
            yield key, value
            yield from _items(value)
