"""A TensorFlow SavedModel folder as the source of the FP32 network.

TensorFlow imports only the nodes that compute the signature's outputs and restore the variables,
after the gate has checked each operator. The rest of the file is never imported, such as
initialization, writers and Python objects.
"""

import logging
from itertools import chain
from pathlib import Path
from typing import Any

from resnet8ptq.core.records import feed
from resnet8ptq.graph.passes import rename, rewrite
from resnet8ptq.models.batch_axis import Outputs
from resnet8ptq.models.contract import SampleArray
from resnet8ptq.models.gates import onnx as onnx_gate
from resnet8ptq.models.gates import saved_model as gate
from resnet8ptq.models.normalization import OPSET
from resnet8ptq.models.sources.contract import Network, Sample, prepare_tensorflow
from resnet8ptq.models.sources.onnx import to_supported

# Attributes by which TensorFlow keeps a call, such as Keras's grouped convolutions, which tf2onnx
# cannot convert. Without these attributes, a call is replaced by the nodes of the function.
_KEEP_CALLS = ("_XlaMustCompile", "_noinline")


def read(source: Path, sample: Sample) -> Network:
    """Read a SavedModel folder; its variables become constants.

    Raises:
        ModelError: see `gates.saved_model.read_program`, `gates.onnx.check_graph` and
            `to_supported`.
    """
    prepare_tensorflow()
    import tensorflow as tf
    import tf2onnx

    # TensorFlow warns of deprecated functions
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    program = gate.read_program(source)
    frozen = freeze(program, source)
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(frozen, name="")
    session = tf.compat.v1.Session(graph=graph)
    inputs = program.inputs
    outputs = list(program.outputs.values())

    def predict(samples: SampleArray) -> Outputs:
        fed = {}
        for name, values in feed(samples, list(inputs)).items():
            fed[inputs[name]] = values
        return list(session.run(outputs, fed))

    # Convert the graph, under the names of the signature
    bodies = [function.node_def for function in frozen.library.function]
    for node in chain(frozen.node, *bodies):
        node.attr.pop("_lower_using_switch_merge", None)  # tf2onnx takes whole loops only
        _drop_attributes(node)
    for function in frozen.library.function:
        _drop_attributes(function)
    proto, _ = tf2onnx.convert.from_graph_def(
        frozen, input_names=list(inputs.values()), output_names=outputs, opset=OPSET
    )
    tensors = program.outputs | inputs
    proto = rewrite(proto, [rename(dict(zip(tensors.values(), tensors, strict=True)))])
    onnx_gate.check_graph(proto, source)
    return Network(to_supported(proto, source, sample), predict, OPSET)


def _drop_attributes(called: Any) -> None:
    """Remove the attributes `_KEEP_CALLS` from a node, or from a function that nodes call."""
    for name in _KEEP_CALLS:
        called.attr.pop(name, None)


def freeze(program: gate.Program, source: Path) -> Any:
    """Return the graph of the program's outputs, with the stored variables as constants."""
    import tensorflow as tf

    # Add a node that reads each variable, if there is none
    graph = program.graph
    names = {node.name for node in graph.node}
    for node in list(graph.node):
        read = f"{node.name}/Read/ReadVariableOp"  # TensorFlow reads the value by this name
        if node.op == "VarHandleOp" and read not in names:
            added = graph.node.add(name=read, op="ReadVariableOp", input=[node.name])
            added.attr["dtype"].CopyFrom(node.attr["dtype"])

    # Restore the variables, then write their values into the graph
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(graph, name="")
        if program.restore is not None:
            restore, filename = program.restore
            session.run(restore, {filename: str(source / "variables" / "variables")})
        ends = list(map(gate.node_of, program.outputs.values()))
        return tf.compat.v1.graph_util.convert_variables_to_constants(session, graph, ends)
