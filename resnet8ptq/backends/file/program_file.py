"""Describes a quantized exported program of torch (.pt2), and runs it in torch, in float."""

import io
import operator
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from resnet8ptq.backends.file.contents import Contents, Inner, Layer, Port, RawRun, Tensors
from resnet8ptq.backends.torch.annotate import ACTIVATIONS, LAYERS
from resnet8ptq.backends.torch.program import ROUNDED
from resnet8ptq.backends.torch.torchscript import known_warnings
from resnet8ptq.models.gates import exported_program as gate
from resnet8ptq.models.gates import torch_archive

_QUANTIZE = ROUNDED[:1]
_DEQUANTIZE = ROUNDED[1:]


def fetch(path: Path) -> bytes:
    """Return an archive of a program's checked records; torch reads only these.

    Raises:
        ModelError: see `gates.exported_program.read_network`.
    """
    return torch_archive.pack(gate.read_network(path)).getvalue()


def read(content: bytes, path: Path) -> Contents:
    """Return the description of a file's content."""
    program = _load(content)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [_port(name, values[name]) for name in signature.user_inputs]
    outputs = [_port(name, values[name]) for name in signature.user_outputs]
    # Count the calls, without inputs, constants and outputs
    nodes = program.module().graph.nodes
    operators: Counter[str] = Counter()
    for node in nodes:
        if node.op == "call_function":
            operators[str(node.target)] += 1
    return Contents(
        format=f"exported program of torch, version {_read_version(content)}",
        producer="torch.export",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        layers=tuple(_layers(nodes)),
        operators=dict(operators),
        simulated=True,
    )


def _read_version(content: bytes) -> str:
    """Return the version of the archive's format; `?` if it has none."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            if name.endswith("archive_version"):
                return archive.read(name).decode().strip()
    return "?"


def open_run(content: bytes, threads: int) -> RawRun:
    """Load a program in torch; `threads` has no effect."""
    module = _load(content).module()

    def run(values: Any) -> list[Any]:
        with torch.inference_mode():
            outputs = module(*map(torch.from_numpy, values))
        return [output.numpy() for output in torch.utils._pytree.tree_leaves(outputs)]

    return run


def open_tensors(content: bytes, threads: int) -> Tensors:
    """Load a program so that it returns the float32 tensors that its nodes compute.

    A tensor that a quantize node reads is replaced by its rounded values, under its own name.
    Dequantized weights are left out.
    """
    module = _load(content).module()
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    rounded_from = {node.args[0].name for node in nodes if node.target in _QUANTIZE}

    # Keep each float tensor, or its rounded values if a quantize node reads it
    kept = {}
    for node in nodes:
        if node.target in _QUANTIZE or node.name in rounded_from or not _is_float(node):
            continue
        if node.target not in _DEQUANTIZE:
            kept[node] = replace(Inner(node.name), **_weights(module, node))
            continue
        source = node.args[0]
        if source.target in _QUANTIZE:  # without the weights, which are stored as integers
            kept[node] = replace(_rounded(source), **_weights(module, source.args[0]))

    def run(values: Any) -> list[Any]:
        recorder = _Recorder(module, kept)
        with torch.inference_mode():
            recorder.run(*map(torch.from_numpy, values))
        return [recorder.values[node].numpy() for node in kept]

    return Tensors(tuple(kept.values()), run)


def _weights(module: Any, node: Any) -> dict[str, Any]:
    """Return the attributes of `Inner` for a layer's stored weights.

    The result is empty for nodes that are no layer, and for weights that are floats or computed.

    Args:
        node: any node; an activation counts as the layer before it.
    """
    if node.target in ACTIVATIONS:
        node = node.args[0]
    if node.target not in LAYERS or node.args[1].target not in _DEQUANTIZE:
        return {}

    # Run the dequantize node on its stored arguments
    dequantize = node.args[1]
    values = []
    for value in dequantize.args:
        if getattr(value, "op", "") == "get_attr":
            values.append(operator.attrgetter(value.target)(module))
        elif isinstance(value, torch.fx.Node):  # a computed value
            return {}
        else:
            values.append(value)
    weights = dequantize.target(*values).detach().numpy()
    return {"weights": weights, "weight_dtype": _dtype(dequantize)}


class _Recorder(torch.fx.Interpreter):  # type: ignore[misc]
    """Runs a program node by node, and keeps the values of some nodes."""

    def __init__(self, module: Any, nodes: Any) -> None:
        super().__init__(module)
        self.nodes = nodes
        self.values = dict[Any, Any]()

    def run_node(self, n: Any) -> Any:
        """Run a node, and keep its value if the node is in `nodes`."""
        value = super().run_node(n)
        if n in self.nodes:
            self.values[n] = value
        return value


def _is_float(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def _rounded(quantize: Any) -> Inner:
    """Return the tensor that a quantize_per_tensor node rounds, with the range of its levels."""
    source, scale, zero_point, least, most = quantize.args[:5]
    low = scale * (least - zero_point)
    high = scale * (most - zero_point)
    return Inner(source.name, low, high, step=scale, dtype=_dtype(quantize))


def open_logits(content: bytes, threads: int) -> None:
    """Return None, because programs of other tools are not cut before their softmax."""


def _load(content: bytes) -> Any:
    with known_warnings():
        return torch.export.load(io.BytesIO(content))


def _port(name: str, value: Any) -> Port:
    sizes: list[int | None] = []
    for size in value.shape[1:]:
        sizes.append(size if isinstance(size, int) else None)  # a free size is a symbol
    return Port(name, tuple(sizes), str(value.dtype).removeprefix("torch."))


def _layers(nodes: Any) -> Iterator[Layer]:
    for node in nodes:
        if node.target in LAYERS:
            data, weights = node.args[:2]
            yield Layer(str(node.target), node.name, _dtype(weights), activations=_dtype(data))


def _dtype(value: Any) -> str:
    """Return the integer dtype that a tensor is rounded to; float32 if it is not rounded."""
    if value.target not in ROUNDED:
        return "float32"
    return str(value.args[-1]).removeprefix("torch.")
