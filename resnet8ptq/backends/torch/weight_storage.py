"""Stores the weights of a torch module in float16 or 8 bits; the module still computes in float32.

On a CPU without float16 arithmetic, computing in float16 would take many times as long.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

from resnet8ptq.backends.contract import LARGEST_HALF
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.embeddings import round_rows


class _Widened(torch.nn.Module):  # type: ignore[misc]
    """Returns a float16 weight as float32."""

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.float()


class _Scaled(torch.nn.Module):  # type: ignore[misc]
    """Returns 8-bit levels times the scales of their channels."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        return levels.float() * self.scale


def store(module: Any, layers: Collection[str], half: bool) -> int:
    """Store the weights of layers in fewer bits, in place; return the number of changed layers.

    Vectors, such as biases, stay in float32.

    Args:
        module: result of `load_torch_module`.
        layers: names of modules in `module`.
        half: whether to store float16; a tensor with a value beyond its range then stays in
            float32. Otherwise weights have 8 bits, with a scale for each output channel, or for
            each row of an embedding.

    Raises:
        UnsupportedError: no layer has constant float32 weights that can be stored.
    """
    stored: dict[tuple[str, str], bool] = {}  # whether weights are stored, by path and attribute
    count = 0
    for call in module.graph.find_nodes(op="call_module"):
        if call.target not in layers:
            continue

        # A layer counts if one of its weights is stored
        has_stored = False
        for path, key in [*_find_weights(module, call)]:
            if (path, key) not in stored:  # layers may share weights
                owner = module.get_submodule(path)
                stored[path, key] = _halve(owner, key) if half else _round(owner, key)
            has_stored = has_stored or stored[path, key]
        count += has_stored
    if count == 0:
        asked = "dtype=fp16" if half else "method=weight_only"
        raise UnsupportedError(f"{asked}: the module has no layer with constant float32 weights")
    return count


def _find_weights(module: Any, call: torch.fx.Node) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a call's module, and the graph's constants that the call reads.

    Each is a pair: the path of the module that owns it, and its attribute there.
    """
    for path, _ in module.get_submodule(call.target).named_parameters():
        owner, _, key = f"{call.target}.{path}".rpartition(".")
        yield owner, key
    for node in call.all_input_nodes:
        if node.op == "get_attr":
            owner, _, key = node.target.rpartition(".")
            yield owner, key


def _halve(owner: Any, key: str) -> bool:
    """Store a float32 weight in float16; return whether it can be stored.

    Vectors, other dtypes, and weights with a value beyond the range of float16 cannot.
    """
    values = getattr(owner, key)
    if values.dtype != torch.float32 or values.ndim < 2 or values.abs().amax() > LARGEST_HALF:
        return False
    _replace(owner, key, stored=values.half(), restore=_Widened())
    return True


def _round(owner: Any, key: str) -> bool:
    """Store a float32 weight in 8 bits; return whether it can be stored.

    Vectors and other dtypes cannot.
    """
    values = getattr(owner, key)
    if values.dtype != torch.float32 or values.ndim < 2:
        return False

    # A layer's own weights have the output channel first; constants of products have it last
    is_constant = key in owner._buffers
    shared = (values.ndim - 2,) if is_constant else tuple(range(1, values.ndim))
    levels, scale = round_rows(values.detach().numpy(), shared)
    _replace(owner, key, stored=torch.from_numpy(levels), restore=_Scaled(torch.from_numpy(scale)))
    return True


def _replace(owner: Any, key: str, stored: torch.Tensor, restore: torch.nn.Module) -> None:
    """Store a weight in another type; each access to it returns the float32 values."""
    if key in owner._buffers:
        owner._buffers[key] = stored
    else:
        setattr(owner, key, torch.nn.Parameter(stored, requires_grad=False))
    parametrize.register_parametrization(owner, key, restore, unsafe=True)
