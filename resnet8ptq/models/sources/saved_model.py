"""A TensorFlow SavedModel folder as the source of the FP32 network.

Of the file's graph, only what the signature's outputs are computed from is imported, and what puts
the stored variables in their place; the gate looks at each of these operators first. TensorFlow
never sees the rest: the file's own initialization, its writers, its Python objects.
"""

import logging
from pathlib import Path
from typing import Any

from resnet8ptq.models.batch import Outputs, Samples
from resnet8ptq.models.gates import onnx as onnx_gate
from resnet8ptq.models.gates import saved_model as gate
from resnet8ptq.models.normalization import OPSET, rename
from resnet8ptq.models.sources import Network, Shape
from resnet8ptq.models.sources.onnx import take
from resnet8ptq.models.sources.tensorflow import prepare


def read(source: Path, shape: Shape) -> Network:
    """Read a SavedModel folder. Its variables become constants.

    Raises:
        ModelError: damaged, with operators that are no part of inference, several inputs, or
            nothing to quantize.
    """
    prepare()
    import tensorflow as tf
    import tf2onnx

    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # says that all of this is old
    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    program = gate.read(source)
    frozen = freeze(program, source)
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(frozen, name="")
    session = tf.compat.v1.Session(graph=graph)
    given = list(program.outputs.values())

    def predict(samples: Samples) -> Outputs:
        return list(session.run(given, {program.input: samples}))

    proto, _ = tf2onnx.convert.from_graph_def(
        frozen, input_names=[program.input], output_names=given, opset=OPSET
    )
    names = {tensor: name for name, tensor in program.outputs.items()}
    rename(proto.graph, {**names, program.input: program.input_name})
    onnx_gate.check(proto, source)
    return Network(take(proto, source), predict, OPSET)


def freeze(program: gate.Program, source: Path) -> Any:
    """Return the graph with the variables that are stored in the folder as constants."""
    import tensorflow as tf

    graph = program.graph
    known = {node.name for node in graph.node}
    for node in [node for node in graph.node if node.op == "VarHandleOp"]:
        read = f"{node.name}/Read/ReadVariableOp"  # by which TensorFlow looks for the value
        if read not in known:
            added = graph.node.add(name=read, op="ReadVariableOp", input=[node.name])
            added.attr["dtype"].CopyFrom(node.attr["dtype"])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(graph, name="")
        if program.restore is not None:
            restore, filename = program.restore
            session.run(restore, {filename: str(source / "variables" / "variables")})
        ends = [name.split(":")[0] for name in program.outputs.values()]
        return tf.compat.v1.graph_util.convert_variables_to_constants(session, graph, ends)
