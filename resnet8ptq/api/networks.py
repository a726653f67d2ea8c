"""Writes a network from memory to a file in the cache, under the hash of its content.

The process that quantizes reads this file. A second call with an equal network reuses the file, and
the cache entries that depend on it.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.api.keywords import to_words
from resnet8ptq.core import cache, files
from resnet8ptq.core.errors import ModelError, errors_as

KIND = "networks_from_memory"  # the kind of the cache's entries


def find_network(
    model: Any, example: Any, samples: Mapping[str, NDArray[Any]], root: Path
) -> list[str]:
    """Return the command-line words that name a network; write one from memory to the cache.

    Args:
        model: a path, an ONNX model, a `torch.nn.Module` or a Keras model; None for no words.
        example: inputs of a module, if their shapes do not follow from the samples.
        samples: a few samples, for the shapes of a module's inputs.
        root: the cache's root.

    Raises:
        ModelError: `model` has none of these types, is a module that cannot be exported, or is a
            Keras model that `_check_layers` refuses.
    """
    if model is None:
        return []
    if isinstance(model, str | Path):
        return to_words({"model.path": files.expand(model).absolute()})
    return to_words({"model.path": _write_network(model, example, samples, root)})


def list_inputs(model: Any) -> list[str]:
    """Return the names of the inputs of a network in memory, in order; empty if not known.

    The inputs of a file are not read.
    """
    if is_of(model, "torch", "nn.Module"):
        try:
            parameters = signature(model.forward).parameters.values()
        except (TypeError, ValueError):  # a ScriptModule has none; its export raises the error
            return []
        by_position = Parameter.POSITIONAL_OR_KEYWORD
        return [parameter.name for parameter in parameters if parameter.kind is by_position]
    if is_of(model, "keras", "Model"):
        tensors = getattr(model, "inputs", None) or ()
        return [tensor.name for tensor in tensors]
    if is_of(model, "onnx", "ModelProto"):
        from resnet8ptq.graph.links import Links, input_names

        constants = Links(model.graph).constants  # some exporters list them as inputs
        return [name for name in input_names(model.graph) if name not in constants]
    return []


def _write_network(
    model: Any, example: Any, samples: Mapping[str, NDArray[Any]], root: Path
) -> Path:
    if hasattr(model, "SerializeToString"):  # an ONNX model
        content = model.SerializeToString()
        key = hashlib.sha256(content).hexdigest()
        return _entry(root, key, name="model.onnx", write=lambda path: path.write_bytes(content))
    if is_of(model, "torch", "nn.Module"):
        return _write_module(model, example, samples, root)
    if is_of(model, "keras", "Model"):
        _check_layers(model)
        architecture = model.to_json().encode()
        key = _hash_arrays([architecture], model.get_weights())
        return _entry(root, key, name="model.keras", write=lambda path: model.save(path))
    raise ModelError(
        f"model: got a {type(model).__name__}, expected a path, an ONNX model, a torch.nn.Module "
        "or a Keras model"
    )


def _check_layers(model: Any) -> None:
    """Raise `ModelError` for a Keras model with a Lambda, or with a class from outside Keras.

    Loading its file would need code that is not Keras's.
    """
    import keras

    own = set()
    for kind in (type(model), *map(type, model._flatten_layers(include_self=False))):
        if kind is keras.layers.Lambda or not kind.__module__.startswith("keras."):
            own.add(kind)
    if own:
        names = ", ".join(sorted(kind.__name__ for kind in own))
        raise ModelError(
            f"model: got a Keras model with code that is not Keras's ({names}), which its file "
            "would lack; expected Keras's own layers; try model.export(FOLDER), and FOLDER as "
            "the model"
        )


def _write_module(
    model: Any, example: Any, samples: Mapping[str, NDArray[Any]], root: Path
) -> Path:
    """Export a module in evaluation mode to the cache; its mode and device do not change.

    Raises:
        ModelError: torch cannot export the module.
    """
    from resnet8ptq.models.sources import torch_module

    with errors_as(ModelError, "model: torch cannot export the module", "try example=INPUTS"):
        program = torch_module.export(model, example, dict(samples))
    # The key must cover all weights. Non-persistent buffers and plain tensors are in no state dict.
    weights = []
    for value in (*program.state_dict.values(), *program.constants.values()):
        if hasattr(value, "detach"):
            weights.append(value.detach().numpy())
    key = _hash_arrays([program.graph_module.code.encode(), str(program).encode()], weights)

    def save(path: Path) -> None:
        import torch

        torch.export.save(program, path)

    return _entry(root, key, name="model.pt2", write=save)


def _entry(root: Path, key: str, name: str, write: Callable[[Path], object]) -> Path:
    folder = cache.entry(
        root, kind=KIND, key={"content": key}, make=lambda made: _write_to(made / name, write)
    )
    return folder / name


def _write_to(path: Path, write: Callable[[Path], object]) -> None:
    write(path)


def _hash_arrays(texts: Iterable[bytes], arrays: Iterable[NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text)
    for values in arrays:
        digest.update(json.dumps([str(values.dtype), values.shape]).encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def is_of(value: Any, package: str, name: str) -> bool:
    """Return whether a value is an instance of a library's class, without importing the library.

    While a library is not imported, no value can be an instance of its classes.
    """
    kind: Any = sys.modules.get(package)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    return kind is not None and isinstance(value, kind)
