"""OpenVINO's two files of a network, .xml and .bin, in one zip archive, as one artifact."""

import io
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from resnet8ptq.backends.openvino.library import library, open_front_end

SUFFIX = ".zip"

_GRAPH = "model.xml"
_WEIGHTS = "model.bin"
_ROOT = re.compile(rb"(<\?xml [^>]*\?>\s*)?<net\s")


def pack(graph: bytes, weights: bytes) -> bytes:
    """Return an archive with both files, uncompressed."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        for name, content in ((_GRAPH, graph), (_WEIGHTS, weights)):
            # Has no date, so equal files give equal bytes
            packed.writestr(zipfile.ZipInfo(name), content)
    return archive.getvalue()


def read(content: bytes) -> Any:
    """Return the graph of an archive; inputs without a name get that of their operator.

    OpenVINO's own `read_model` detects the format by content and ignores the name of the file, so
    an ONNX network would bypass the checks of ONNX files. The front end of one format is used
    instead; it reads from disk only.

    Raises:
        ValueError: the graph does not begin with the element <net>.
        zipfile.BadZipFile: the content is no archive, or a damaged one.
        KeyError: the archive lacks one of the two files.
        RuntimeError: OpenVINO cannot read the graph.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as packed, tempfile.TemporaryDirectory() as folder:
        for name in (_GRAPH, _WEIGHTS):
            Path(folder, name).write_bytes(packed.read(name))
        path = Path(folder, _GRAPH)
        if not _ROOT.match(path.read_bytes()):
            raise ValueError("its root element is not <net>")

        # Read with OpenVINO, which may leave inputs without names
        front_end = open_front_end("ir")
        graph = front_end.convert(front_end.load(str(path), enable_mmap=False))
    for value in graph.inputs:
        if not value.get_names():
            value.set_names({value.get_node().get_friendly_name()})
    return graph


def end_at_logits(graph: Any) -> Any | None:
    """Return the graph without its final softmax; None if no softmax computes the only output."""
    if len(graph.outputs) != 1:
        return None
    last = graph.get_results()[0].input_value(0).get_node()
    if last.get_type_name() not in ("Softmax", "SoftMax"):
        return None
    return library().Model([last.input_value(0)], graph.get_parameters())
