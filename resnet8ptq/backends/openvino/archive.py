"""OpenVINO's two files of a network, .xml and .bin, in one zip archive, as one artifact."""

import io
import zipfile
from typing import Any

from resnet8ptq.backends.openvino.library import core, library

SUFFIX = ".zip"

_GRAPH, _WEIGHTS = "model.xml", "model.bin"


def pack(graph: bytes, weights: bytes) -> bytes:
    """Return an archive with both files, stored unchanged."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        for name, content in ((_GRAPH, graph), (_WEIGHTS, weights)):
            packed.writestr(zipfile.ZipInfo(name), content)  # without a date
    return archive.getvalue()


def read(content: bytes) -> Any:
    """Return the graph of an archive; each input has a name."""
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        graph = core().read_model(packed.read(_GRAPH), packed.read(_WEIGHTS))
    for value in graph.inputs:
        if not value.get_names():
            value.set_names({value.get_node().get_friendly_name()})
    return graph


def end_at_logits(graph: Any) -> Any | None:
    """Return the graph without its final softmax; None if it has no softmax."""
    if len(graph.outputs) != 1:
        return None
    last = graph.get_results()[0].input_value(0).get_node()
    if last.get_type_name() not in ("Softmax", "SoftMax"):
        return None
    return library().Model([last.input_value(0)], graph.get_parameters())
