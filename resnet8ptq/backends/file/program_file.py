"""Describes a quantized exported program of torch (.pt2), and runs it in torch, in float."""

import io
import operator
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator
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
_ops = torch.ops.quantized_decomposed
# They read the scales that `_MEASURE` nodes compute while the program runs.
_ROUNDED_DYNAMICALLY = (_ops.quantize_per_tensor.tensor, _ops.dequantize_per_tensor.tensor)
_MEASURE = (_ops.choose_qparams.tensor, _ops.choose_qparams_symmetric.tensor)


def fetch(path: Path) -> bytes:
    """Return an archive of a program's checked records; torch reads only these.

    It has about the size of the file, which a run reports.

    Raises:
        ModelError: see `gates.exported_program.read_network`.
    """
    return torch_archive.pack(gate.read_network(path), like=path).getvalue()


def read(content: bytes, path: Path) -> Contents:
    """Return the description of a file's content."""
    program = _load(content)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [_port(name, values[name]) for name in signature.user_inputs]
    outputs = [_port(name, values[name]) for name in signature.user_outputs]
    # Count the calls, without inputs, constants and outputs
    module = program.module()
    operators: Counter[str] = Counter()
    for node in module.graph.nodes:
        if node.op == "call_function":
            operators[str(node.target)] += 1
    return Contents(
        format=f"exported program of torch, version {_read_version(content)}",
        producer="torch.export",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        layers=tuple(_layers(module)),
        operators=dict(operators),
        dynamic=any(str(target) in operators for target in _MEASURE),
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

    A tensor that is rounded with a stored scale is replaced by its rounded values, under its own
    name. Constants, such as dequantized weights, are left out.
    """
    module = _load(content).module()
    constants = _find_constants(module)
    computed = []
    for node in module.graph.nodes:
        if node.op == "call_function" and node not in constants:
            computed.append(node)
    rounded_from = {node.args[0].name for node in computed if node.target in _QUANTIZE}

    # Keep each float tensor, or its rounded values if a quantize node reads it
    kept = {}
    for node in computed:
        if node.target in _QUANTIZE or node.name in rounded_from or not _is_float(node):
            continue
        if node.target in _ROUNDED_DYNAMICALLY or node.target in _MEASURE:
            continue
        if node.target not in _DEQUANTIZE:
            kept[node] = replace(Inner(node.name), **_weights(module, constants, node))
            continue
        source = node.args[0]
        if source.target in _QUANTIZE:
            kept[node] = replace(_rounded(source), **_weights(module, constants, source.args[0]))

    def run(values: Any) -> list[Any]:
        recorder = _Recorder(module, kept)
        with torch.inference_mode():
            recorder.run(*map(torch.from_numpy, values))
        return [recorder.values[node].numpy() for node in kept]

    return Tensors(tuple(kept.values()), run)


def _find_constants(module: Any) -> set[Any]:
    """Return the nodes that depend on no input: stored tensors, and what is computed from them."""
    constants: set[Any] = set()
    for node in module.graph.nodes:
        is_call = node.op == "call_function"
        if node.op == "get_attr" or (is_call and constants.issuperset(node.all_input_nodes)):
            constants.add(node)
    return constants


def _weights(module: Any, constants: Collection[Any], node: Any) -> dict[str, Any]:
    """Return the attributes of `Inner` for a layer's narrow weights.

    The result is empty for nodes that are no layer, and for weights that are stored as float32 or
    depend on an input.

    Args:
        node: any node; an activation counts as the layer before it.
    """
    if node.target in ACTIVATIONS:
        node = node.args[0]
    if node.target not in LAYERS or node.args[1] not in constants:
        return {}
    dtype = _weight_dtype(module, constants, node.args[1])
    if dtype == "float32":
        return {}
    return {"weights": _compute(module, node.args[1]).detach().numpy(), "weight_dtype": dtype}


def _compute(module: Any, constant: Any) -> Any:
    """Return the value of a node of `_find_constants`."""
    if constant.op == "get_attr":
        return operator.attrgetter(constant.target)(module)
    arguments = (constant.args, constant.kwargs)
    args, kwargs = torch.fx.map_arg(arguments, lambda source: _compute(module, source))
    return constant.target(*args, **kwargs)


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
    return Port(name, tuple(sizes), _name(value.dtype))


def _layers(module: Any) -> Iterator[Layer]:
    constants = _find_constants(module)
    for node in module.graph.nodes:
        if node.target in LAYERS:
            data, weights = node.args[:2]
            dtype = _weight_dtype(module, constants, weights)
            yield Layer(str(node.target), node.name, dtype, activations=_dtype(data))


def _weight_dtype(module: Any, constants: Collection[Any], weights: Any) -> str:
    """Return the dtype that weights are rounded to or, if a layer widens them, stored in."""
    node = weights
    while node in constants and node.op != "get_attr" and node.target not in ROUNDED:
        if not node.all_input_nodes:
            return "float32"
        node = node.all_input_nodes[0]  # levels come before their scale
    if node.op != "get_attr":
        return _dtype(node)
    return _name(_compute(module, node).dtype)


def _dtype(value: Any) -> str:
    """Return the integer dtype that a tensor is rounded to; float32 if it is not rounded."""
    if value.target not in (*ROUNDED, *_ROUNDED_DYNAMICALLY):
        return "float32"
    return _name(value.args[-1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
