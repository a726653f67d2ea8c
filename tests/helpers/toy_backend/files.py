"""The format: a word, then a compressed ONNX graph. It is read as a file of other programs too."""

import zlib
from pathlib import Path

import onnx

from resnet8ptq.backends.file.contents import Contents, Layer, Port, RawRun
from resnet8ptq.core.errors import ModelError
from resnet8ptq.graph.session import open_session

WORD = b"TOY1"
OPERATORS = {"Conv", "MatMul", "Gemm"}


def pack(proto: onnx.ModelProto) -> bytes:
    """Return the content of a file. Rounded weights have 256 values, so they are compressed."""
    return WORD + zlib.compress(proto.SerializeToString())


def unpack(content: bytes) -> onnx.ModelProto:
    """Return the graph of a file."""
    return onnx.load_from_string(zlib.decompress(content.removeprefix(WORD)))


def fetch(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(WORD):
        raise ModelError(f"{path}: not a toy file")
    return content


def read(content: bytes, path: Path) -> Contents:
    graph = unpack(content).graph
    nodes = [node for node in graph.node if node.op_type in OPERATORS]
    layers = tuple(Layer(node.op_type, node.name, "int8", "float32") for node in nodes)
    return Contents(
        format="Toy",
        producer="a test",
        inputs=tuple(map(_port, graph.input)),
        outputs=tuple(map(_port, graph.output)),
        layers=layers,
        operators={"Conv": len(layers)},
        simulated=True,
    )


def _port(value: onnx.ValueInfoProto) -> Port:
    sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    return Port(value.name, tuple(sizes[1:]), "float32")


def open_run(content: bytes, threads: int) -> RawRun:
    session = open_session(unpack(content).SerializeToString(), threads)
    names = [value.name for value in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))


def open_logits(content: bytes, threads: int) -> RawRun | None:
    return None
