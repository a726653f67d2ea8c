"""A network as an exported program (.pt2): saved, checked, loaded, read."""

import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators of a quantized program
from numpy.typing import NDArray
from torch.export import ExportedProgram

from resnet8ptq.backends.torch import archive
from resnet8ptq.backends.torch.annotate import LAYERS, SOFTMAX
from resnet8ptq.backends.torch.torchscript import copy_reproducibly, infer, known_warnings
from resnet8ptq.core import files
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.core.text import one_line

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
_TARGET = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.\w+")
# Of symbolic sizes, and of operators with several outputs.
_PYTHON = re.compile(
    r"_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|pow|neg|eq|ne|ge|gt|le|lt|and_|or_)"
    r"|torch\.sym_(float|int|ite|max|min|not|sum)"
)
_NAME = re.compile(r"[\w./: -]*")  # of a tensor: nothing that could end a name in code
_TEXTS = {
    # A dimension: numbers and free dimensions, added and multiplied; nothing else is called, and
    # no power takes forever. Digits are matched once (`++`), so that neither does the match.
    "expr_str": re.compile(
        r"(?!.*(?:\d{13}|\*\*))"
        r"(?:Symbol\('[su]\d++'(?:, \w++=True)*+\)|(?:Add|Mul|Integer|FloorDiv|Mod|Max|Min)\("
        r"|[su]?\d++|[-+*/(), ])++"
    ),
    **dict.fromkeys(("fqn", "parameter_name", "buffer_name"), _NAME),
    **dict.fromkeys(
        ("in_spec", "out_spec"), re.compile(r'([\d\[\]{}:, ]|null|"(builtins\.\w+|\w+|\[\])")*')
    ),
    "path_name": re.compile(r"(weight|tensor)_\d+"),
    "torch_version": re.compile(r"[\w.+-]+"),
    "name": re.compile(r"\w*"),
}


@dataclass(frozen=True)
class ExportedPredictor:
    """An exported program, as a module."""

    module: Any

    def predict(self, batch: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return probabilities [n, classes] for raw pixels [n, H, W, C]."""
        return infer(self.module, batch)

    def logits(self, batch: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return what the final softmax takes [n, classes]; None without a softmax."""
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
    packed = archive.pack(read(path))
    try:
        with known_warnings():
            return ExportedPredictor(torch.export.load(packed).module())
    except Exception as error:  # torch's own, dozens
        raise QuantizationError(f"{path}: torch cannot load it ({one_line(error)})") from error


def read(path: Path) -> dict[str, bytes]:
    """Return the records of a program that is what `save` writes.

    Raises:
        QuantizationError: it is not; names what is strange in it.
    """
    records = archive.read(path, _RECORDS)
    try:
        strange = next(_check(records), None)
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
        strange = one_line(error)
    if strange is not None:
        raise archive.refusal(path, strange)
    return records


def count_quantized_layers(path: Path) -> int:
    """Count the convolutions and matrix products whose data and weights come dequantized."""
    layers = [node for node in load(path).module.graph.nodes if node.target in LAYERS]
    return sum(all(i.target in _ROUNDED for i in layer.args[:2]) for layer in layers)


def _check(records: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what `torch.export.load` would unpickle, evaluate or look up by name.

    It takes pickled weights, sample inputs and older layouts without asking, evaluates the
    expressions of dynamic shapes and of guards, calls any function below `torch` that a node names
    (`torch.os.system`), and writes Python code with the names of tensors in it.
    """
    if records.get(_SAMPLE):
        yield _SAMPLE
    for name, content in records.items():
        if name.endswith(".json"):
            for key, value in _items(json.loads(content)):
                if not _is_plain(key, value):
                    yield f"{name}: {key}"


def _is_plain(key: str, value: Any) -> bool:
    if key in ("use_pickle", "guards_code", "metadata"):
        return not value
    if not _NAME.fullmatch(key):
        return False
    if not isinstance(value, str):
        return key not in ("target", "as_operator", "path_name", *_TEXTS)
    if key in ("target", "as_operator"):
        target = _TARGET.fullmatch(value)
        allowed = target is not None and archive.is_allowed(*target.groups())
        return allowed or bool(_PYTHON.fullmatch(value))
    return bool(_TEXTS.get(key, re.compile(r"[\w,.> -]*")).fullmatch(value))


def _items(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of nested JSON; of a list, each value under the list's key."""
    waiting = [("", content)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, list):
            waiting += [(key if isinstance(each, str) else "", each) for each in value]
        elif isinstance(value, dict):
            waiting += value.items()
