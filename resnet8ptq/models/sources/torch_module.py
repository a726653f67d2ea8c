"""A user's `torch.nn.Module` class, by its dotted path, as the source of the FP32 network.

Importing it runs the user's code, as they ask for by naming it. Its weights are untrusted data:
safetensors, or a state dict that holds only tensors.
"""

import warnings
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.text import one_line
from resnet8ptq.graph.torch_module import import_torchvision
from resnet8ptq.models.contract import arranged, likely_layouts
from resnet8ptq.models.sources import Module, Network, Shape
from resnet8ptq.models.sources.exported_program import from_program


def read(source: Path, shape: Shape, module: Module) -> Network:
    """Build the module, give it the weights in `source`, and export it.

    A module declares no input shape. It is tried with the samples' channels first, as in torch's
    convolutions, then with the samples' own layout.

    Raises:
        ModelError: it does not import, the weights do not fit it, or it does not run.
    """
    if shape is None:
        raise ModelError(f"{module.name}: its input shape is unknown; set data=")
    network = _build(module)
    _load_weights(network, source)
    network.eval()
    errors = []
    for sizes in dict.fromkeys(arranged(shape, layout) for layout in likely_layouts(shape)):
        try:
            return from_program(_export(network, sizes), source)
        except ModelError:
            raise
        except Exception as error:  # the user's, and torch's own
            errors.append(f"{sizes}: {one_line(error)}")
    raise ModelError(f"{source}: {module.name} takes none of {'; '.join(errors)}")


def _export(network: torch.nn.Module, sizes: tuple[int, ...]) -> Any:
    """Export a module, with a free batch size if torch can."""
    with warnings.catch_warnings(action="ignore"):
        with torch.no_grad():
            network(torch.zeros(2, *sizes))
        try:
            free = ({0: torch.export.Dim.DYNAMIC},)
            return torch.export.export(network, (torch.zeros(2, *sizes),), dynamic_shapes=free)
        except Exception:  # torch's own, dozens
            return torch.export.export(network, (torch.zeros(1, *sizes),))


def _build(module: Module) -> torch.nn.Module:
    package, _, name = module.name.rpartition(".")
    try:
        import_torchvision()
        built = resolve_name(f"{package}:{name}")(**module.arguments)
    except Exception as error:  # the user's own, and ImportError
        raise ModelError(
            f"model.module: got {module.name!r}, which cannot be built ({one_line(error)}); "
            "takes package.module.Class, in the current folder or on PYTHONPATH, with "
            "model.module_args"
        ) from None
    if not isinstance(built, torch.nn.Module):
        raise ModelError(
            f"model.module: {module.name!r} makes a {type(built).__name__}; takes a torch.nn.Module"
        )
    return built


def _load_weights(network: torch.nn.Module, source: Path) -> None:
    """Load a state dict, whose names and shapes must all match the module's."""
    try:
        if source.suffix.lower() == ".safetensors":
            from safetensors.torch import load_file

            weights = load_file(source)
        else:
            weights = torch.load(source, map_location="cpu", weights_only=True)
        network.load_state_dict(weights, strict=True)
    except Exception as error:  # pickle's, zipfile's, safetensors' and torch's own
        raise ModelError(
            f"model.state_dict: {source} does not fit it ({one_line(error)}); takes .safetensors, "
            "or a state dict of only tensors, written by torch.save"
        ) from None
