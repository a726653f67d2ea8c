"""A user's torch module, as a class and weights or as an object, as the source of the FP32 network.

The import of the class runs the user's own code. The weights are untrusted data: safetensors, or a
state dict that holds only tensors.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.core.records import names_of, pack
from resnet8ptq.core.text import no_such_name, one_line
from resnet8ptq.data.fields import find_masked, is_picture
from resnet8ptq.graph.torch_imports import import_torchvision
from resnet8ptq.models.contract import arranged, likely_layouts
from resnet8ptq.models.sources.contract import Network, Sample
from resnet8ptq.models.sources.exported_program import find_output_names, from_program


def read(source: Path, sample: Sample, name: str, arguments: Mapping[str, Any]) -> Network:
    """Build the module, give it the weights in `source`, and export it.

    A module declares no input shape. The export therefore tries channels first, as in torch's
    convolutions, then the samples' own layout; an array of integers is tried as floats first.
    Records fill the parameters with the same names, which must be the first ones of `forward`.

    Args:
        name: the dotted path of the class.
        arguments: the arguments of the class's constructor.

    Raises:
        ModelError: the class cannot be imported, the weights do not fit, there is no sample, or
            torch cannot export the module for it; or see `from_program`.
    """
    if sample is None:
        raise ModelError(f"{name}: its input shape is unknown; set data=")

    # Try each layout until the module takes one
    network = _build_module(name, arguments)
    _load_weights(network, source)
    network.eval()
    errors = []
    for inputs in _examples(network, sample):
        try:
            return from_program(_export_program(network, inputs), source, sample)
        except ModelError:
            raise
        except Exception as error:  # the module or torch may raise anything
            shapes = ", ".join(str(tuple(example.shape[1:])) for example in inputs.values())
            errors.append(f"{shapes}: {one_line(error)}")
    raise ModelError(f"{source}: {name} takes none of {'; '.join(errors)}")


def export(network: torch.nn.Module, example: Any, samples: Mapping[str, NDArray[Any]]) -> Any:
    """Return a module in memory as an exported program, in float32; the module does not change.

    Args:
        example: inputs [n, ...] of `forward` as a tensor, a tuple or list, or a dict by parameter
            name; by default zeros like `samples`, see `_examples`.
        samples: inputs [n, ...] by name, and labels.

    Raises:
        ModelError: example and samples are missing, the example names no parameter, or the module
            cannot be exported with any of the inputs.
    """
    copied = copy.deepcopy(network).cpu().float().eval()
    parameters = list(signature(copied.forward).parameters)
    inputs = dict(samples)
    inputs.pop("labels", None)
    if example is not None:
        tried = [_by_parameter(example, parameters)]
    elif not inputs:
        raise ModelError("model: got a module without samples, expected data= or example=INPUTS")
    elif len(inputs) == 1:
        tried = list(_examples(copied, next(iter(inputs.values()))))
    else:
        tried = list(_examples(copied, pack(inputs)))

    # Export with the first example that the module takes
    errors = []
    for one in tried:
        try:
            program = _export_program(copied, one)
        except Exception as error:  # the module or torch may raise anything
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in one.values())
            errors.append(f"{shapes}: {one_line(error)}")
        else:
            return _flatten_outputs(program)
    raise ModelError(f"model: the module takes none of {'; '.join(errors)}; try example=INPUTS")


def _flatten_outputs(program: Any) -> Any:
    """Make a program return its outputs as a flat tuple, in place.

    A single tensor stays, and so does a dict for which `find_output_names` returns names.
    """
    module = program.module_call_graph[0]  # the outermost module
    outputs = module.signature.out_spec
    if not outputs.is_leaf() and not find_output_names(outputs):
        flat = (None,) * outputs.num_leaves
        module.signature.out_spec = torch.utils._pytree.tree_structure(flat)
    return program


def _by_parameter(example: Any, parameters: list[str]) -> dict[str, torch.Tensor]:
    """Return an example, see `export`, as tensors by parameter name; floats become float32.

    Raises:
        ModelError: a name is not that of a parameter.
    """
    if isinstance(example, Mapping):
        for name in example:
            if name not in parameters:
                raise ModelError(no_such_name("example", name, parameters, in_help=False))
        named = {name: example[name] for name in parameters if name in example}
    else:
        values = example if isinstance(example, tuple | list) else (example,)
        named = dict(zip(parameters, values, strict=False))
    tensors = {}
    for name, value in named.items():
        tensor = torch.as_tensor(value)
        tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    return tensors


def _examples(network: torch.nn.Module, sample: NDArray[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield candidate inputs [2, ...] of zeros by parameter name, in different layouts.

    An array of integers is yielded as floats, then in its dtype.
    """
    parameters = list(signature(network.forward).parameters)
    if not names_of(sample.dtype):
        shape = sample.shape[1:]
        shapes = [arranged(shape, layout) for layout in likely_layouts(shape)]
        for sizes in dict.fromkeys(shapes):
            yield {parameters[0]: torch.zeros(2, *sizes)}
        if sample.dtype.kind in "iu":  # integers may be numbers of words
            yield {parameters[0]: torch.from_numpy(np.zeros((2, *shape), sample.dtype))}
        return

    # Fill the parameters that the samples have, by name
    kinds = {}
    for name in parameters:
        if name in names_of(sample.dtype):
            kinds[name] = sample.dtype[name]

    # Pictures may have their channels first or last
    orders = [False]
    if any(map(is_picture, kinds.values())):
        orders = [True, False]
    for channels_first in orders:
        inputs = {}
        for name, kind in kinds.items():
            shape = kind.shape
            if channels_first and is_picture(kind):
                shape = arranged(shape, likely_layouts(shape)[0])
            values = torch.from_numpy(np.zeros((2, *shape), kind.base))
            if is_picture(kind) or kind.base.kind == "f":
                values = values.float()
            inputs[name] = values
        yield inputs


def _export_program(network: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
    """Export a module with a free batch size and, if torch can, a free length of texts.

    If torch cannot free the batch size either, the program takes one sample.

    Raises:
        ModelError: `inputs` skip a parameter of `forward`, which gets them by position.
    """
    examples = tuple(inputs.values())
    parameters = list(signature(network.forward).parameters)
    for name, parameter in zip(inputs, parameters, strict=False):
        if name != parameter:
            raise ModelError(
                f"model: got {name!r}, expected {parameter!r} before it, in the order of forward; "
                "try a forward that takes only the inputs"
            )

    # Find the texts among the inputs, whose length may be free
    fields = []
    for name, example in inputs.items():
        fields.append((name, "i8", tuple(example.shape[1:])))
    kinds = np.dtype(fields)
    texts = set(find_masked(kinds))
    with warnings.catch_warnings(action="ignore"):
        with torch.no_grad():
            network(*examples)

        # Try from the most general form down to one sample of one length
        forms: list[set[str]] = [set()]
        if texts:
            forms.insert(0, texts)
        for free in forms:
            shapes = []
            for name in inputs:
                axes = [0, 1] if name in free else [0]
                shapes.append(dict.fromkeys(axes, torch.export.Dim.DYNAMIC))
            try:
                return torch.export.export(network, examples, dynamic_shapes=tuple(shapes))
            except Exception:  # torch raises dozens of types
                continue
        first = tuple(example[:1] for example in examples)
        return torch.export.export(network, first)


def _build_module(path: str, arguments: Mapping[str, Any]) -> torch.nn.Module:
    """Return an object of the class with this dotted path.

    Raises:
        ModelError: the class cannot be imported or built, or is no class of torch modules.
    """
    package, _, name = path.rpartition(".")
    why = f"model.module: got {path!r}, which cannot be built"
    takes = "expected package.module.Class, in the current folder or on PYTHONPATH, with "
    with errors_as(ModelError, why, f"{takes}model.module_args"):
        import_torchvision()
        built = resolve_name(f"{package}:{name}")(**arguments)
    if not isinstance(built, torch.nn.Module):
        raise ModelError(
            f"model.module: {path!r} makes a {type(built).__name__}; expected a torch.nn.Module"
        )
    return built


def _load_weights(network: torch.nn.Module, source: Path) -> None:
    """Load weights into a module, whose names and shapes they must match exactly.

    Raises:
        ModelError: the file is damaged, holds more than tensors, or does not match.
    """
    why = f"model.state_dict: {source} does not fit it"
    takes = "expected .safetensors, or a state dict of only tensors, written by torch.save"
    with errors_as(ModelError, why, takes):
        if source.suffix.lower() == ".safetensors":
            from safetensors.torch import load_file

            weights = load_file(source)
        else:
            weights = torch.load(source, map_location="cpu", weights_only=True)
        network.load_state_dict(weights, strict=True)
