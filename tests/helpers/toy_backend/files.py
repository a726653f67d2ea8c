"""The format: a word, then an ONNX graph with rounded weights. Read as a file of others too."""

from pathlib import Path

import onnx

from resnet8ptq.backends.file.contents import Contents, Layer, Port, RawRun
from resnet8ptq.core.errors import ModelError
from resnet8ptq.graph.session import open_session

WORD = b"TOY1"
OPERATORS = {"Conv", "MatMul", "Gemm"}


def fetch(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(WORD):
        raise ModelError(f"{path}: not a toy file")
    return content


def read(content: bytes, path: Path) -> Contents:
    graph = onnx.load_from_string(content.removeprefix(WORD)).graph
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
    session = open_session(content.removeprefix(WORD), threads)
    names = [value.name for value in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))


def open_logits(content: bytes, threads: int) -> RawRun | None:
    return None
