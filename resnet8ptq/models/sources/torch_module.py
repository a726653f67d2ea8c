"""A `torch.nn.Module` of the user's own, by its dotted path, as the source of the FP32 network.

Importing it runs the user's code, which is what they ask for by naming it. Its weights are data:
safetensors, or a state dict of tensors alone.
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

    A module does not say what it takes. It is tried with the samples' channels first, as torch's
    convolutions have them, then with the samples as they are.

    Raises:
        ModelError: it does not import, the weights are not its own, or it does not run.
    """
    if shape is None:
        raise ModelError(f"{module.name}: what it takes is known from data alone")
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
    """Export a module, its batch free where it can be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.no_grad():
            network(torch.zeros(2, *sizes))
        try:
            free = ({0: torch.export.Dim.DYNAMIC},)
            return torch.export.export(network, (torch.zeros(2, *sizes),), dynamic_shapes=free)
        except Exception:  # torch's own, dozens
            return torch.export.export(network, (torch.zeros(1, *sizes),))


def _build(module: Module) -> torch.nn.Module:
    place, _, name = module.name.rpartition(".")
    try:
        import_torchvision()
        built = resolve_name(f"{place}:{name}")(**module.arguments)
    except Exception as error:  # the user's own, and ImportError
        raise ModelError(
            f"model.module: got {module.name!r}, which cannot be built ({one_line(error)}); "
            "takes package.module.Class, on PYTHONPATH or beside run.py, with model.module_args"
        ) from None
    if not isinstance(built, torch.nn.Module):
        raise ModelError(
            f"model.module: {module.name!r} makes a {type(built).__name__}; takes a torch.nn.Module"
        )
    return built


def _load_weights(network: torch.nn.Module, source: Path) -> None:
    """Load a state dict; all names and shapes must be the module's."""
    try:
        if source.suffix.lower() == ".safetensors":
            from safetensors.torch import load_file

            weights = load_file(source)
        else:
            weights = torch.load(source, map_location="cpu", weights_only=True)
        network.load_state_dict(weights, strict=True)
    except Exception as error:  # pickle's, zipfile's, safetensors' and torch's own
        raise ModelError(
            f"model.state_dict: {source} is none of its own ({one_line(error)}); takes "
            ".safetensors, or what torch.save makes of a state dict, of tensors alone"
        ) from None
