"""Readers of networks, one module for each file format and one for torch modules.

Each reader has `read(source, sample) -> Network`, some with further arguments. Readers run in a
separate process for each file (see `model.load_network`), because some import TensorFlow, and a
crash should end only that process.
"""

import copy
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from numpy.typing import NDArray

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.text import no_such_name
from resnet8ptq.graph.links import output_names
from resnet8ptq.graph.passes import remove_unused, rewrite
from resnet8ptq.models.sources.contract import Network, Sample
from resnet8ptq.models.sources.formats import EXPECTED, check_values, find_format


def read_network(source: Path, sample: Sample, config: ModelConfig) -> Network:
    """Read a network from its file or folder, or from the weights of `model.module`.

    Args:
        sample: a sample [1, ...] that the network must take, if there is one.

    Raises:
        ModelError: the file is not a model, its format takes no `model.inputs`, or its reader
            refuses it.
        Exception: a library, such as tf2onnx, cannot convert the network.
    """
    if config.module is not None:
        from resnet8ptq.models.sources import torch_module

        return torch_module.read(source, sample, config.module, config.module_args or {})
    file_format = find_format(source)
    if file_format is None:
        raise ModelError(f"{source}: is not a model; {EXPECTED}")
    check_values(source, config.inputs)
    reader = resolve_name(file_format.reader)
    values = [config.inputs] if config.inputs else []
    network: Network = reader(source, sample, *values)
    return network


def select_outputs(network: Network, names: Collection[str]) -> Network:
    """Return the network with only the outputs `names`, in the order of the file.

    Raises:
        ModelError: a name is not that of an output.
    """
    every = output_names(network.proto.graph)
    for name in names:
        if name not in every:
            raise ModelError(no_such_name("model.outputs", name, every, in_help=False))
    kept = [index for index, name in enumerate(every) if name in names]
    proto = copy.deepcopy(network.proto)
    del proto.graph.output[:]
    for index in kept:
        proto.graph.output.append(network.proto.graph.output[index])
    proto = rewrite(proto, [remove_unused])

    def predict(batch: NDArray[Any]) -> list[NDArray[Any]]:
        outputs = network.predict(batch)
        return [outputs[index] for index in kept]

    return replace(network, proto=proto, predict=predict)
