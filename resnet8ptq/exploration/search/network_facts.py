"""Facts about the network and its data that the search needs before its first step."""

from dataclasses import dataclass
from pathlib import Path

import onnx

from resnet8ptq.config.schema import TaskConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.experiment.network_and_data import load_data_and_network, make_task
from resnet8ptq.experiment.network_properties import find_properties
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.models.model import Fp32Model


@dataclass(frozen=True)
class NetworkFacts:
    """Facts about the converted network and its data.

    Attributes:
        properties: see `network_properties`.
        nodes: names of the nodes; if an error names one, the next step may leave it in float.
        onnx_path: the FP32 file.
        reported: number of test samples.
        untuned: the reason why the task cannot score the training samples, so that no step can tune
            on them, see `preparation.tunes`; empty if it can.
    """

    properties: tuple[str, ...]
    nodes: tuple[str, ...]
    onnx_path: Path
    reported: int
    untuned: str


def read_network_facts(settings: Settings) -> NetworkFacts:
    """Return facts of network and data; the jobs then find the converted network in the cache.

    Raises:
        PtqError: network or data cannot be read, or do not fit each other, the settings or the
            task.
    """
    data, network = load_data_and_network(settings)
    graph = onnx.load(network.onnx_path).graph
    nodes = tuple(node.name for node in graph.node if node.name)
    return NetworkFacts(
        properties=tuple(find_properties(graph)),
        nodes=nodes,
        onnx_path=network.onnx_path,
        reported=len(data.test),
        untuned=_find_unscored(settings.config.task, data, network),
    )


def _find_unscored(config: TaskConfig, data: Dataset, network: Fp32Model) -> str:
    """Return the reason why the task cannot score the training samples; empty if it can."""
    name = f"the training samples of {data.name}"
    if not len(data.train):
        return f"{data.name} has no training samples"
    try:
        make_task(config, dataset=data, fp32=network, scored=data.train, name=name)
    except ConfigError as error:
        return str(error)
    return ""
