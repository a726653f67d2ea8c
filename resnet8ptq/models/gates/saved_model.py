"""Cuts an untrusted TensorFlow SavedModel to its inference graph, and checks its operators.

TensorFlow's operators can read and write files and call Python. The check allows stateless
operators that tf2onnx can convert, calls of functions, branches, loops, assertions, variables, and
the few operators that restore variables. TensorFlow imports the graph only after the check.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from resnet8ptq.core.errors import ModelError, errors_as

FILE = "saved_model.pb"
MAX_BYTES = 2**31 - 1  # protobuf's limit

_CALLS = {"PartitionedCall", "StatefulPartitionedCall", "NoOp", "Identity", "IdentityN"}
_CHECKS = {"Assert"}  # an operator that changes no value
_VARIABLES = {"VarHandleOp", "ReadVariableOp", "VariableV2", "Variable"}
_RESTORE = {
    *_CALLS,
    *_VARIABLES,
    "AssignVariableOp",
    "Assign",
    "RestoreV2",
    "Const",
    "Pack",
    "Cast",
    "Placeholder",
    "PlaceholderWithDefault",
    "ExpandDims",
    "Reshape",
    "Shape",
    "StridedSlice",
}


@dataclass(frozen=True)
class Program:
    """The inference part of a SavedModel.

    Attributes:
        graph: a GraphDef that computes the outputs and restores the variables.
        inputs, outputs: tensors, such as `serving_default_input_1:0`, by their names in the
            signature.
        restore: the operation that restores the variables, and the tensor for the path of their
            file; None without variables.
    """

    graph: Any
    inputs: dict[str, str]
    outputs: dict[str, str]
    restore: tuple[str, str] | None


def read_program(folder: Path) -> Program:
    """Parse a SavedModel, and check its inference part.

    Raises:
        ModelError: the folder is damaged, its graph is too large, or no graph is for inference; or
            there is neither the signature `serving_default` nor a single one; or the graph has
            operators beyond inference, or reads variables of another folder.
    """
    path = folder / FILE
    for stored in (folder / "variables").glob("*"):
        if not stored.is_file():
            raise ModelError(f"{folder}: variables/{stored.name} is not a regular file")
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{folder}: {FILE} is larger than 2 GiB")
    with errors_as(ModelError, f"{folder}: not a SavedModel"):
        return _cut_to_inference(path.read_bytes(), folder)


def _cut_to_inference(content: bytes, folder: Path) -> Program:
    """Return the inference part of a SavedModel from the content of its file.

    Raises:
        ModelError: see `read_program`.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import saved_model_pb2

    metas = saved_model_pb2.SavedModel.FromString(content).meta_graphs
    served = [meta for meta in metas if "serve" in meta.meta_info_def.tags]
    if not served:
        raise ModelError(f"{folder}: has no graph tagged 'serve'; expected an export for inference")
    whole = served[0].graph_def
    saver = served[0].saver_def
    signature = _signature(served[0], folder)
    inputs = _tensor_names(signature.inputs)
    outputs = _tensor_names(signature.outputs)
    cut = tf.compat.v1.graph_util.extract_sub_graph

    # Find the nodes that compute the outputs, and the nodes that restore the variables
    ends = list(map(node_of, outputs.values()))
    inference = _imported_ops()
    restores = []
    if saver.restore_op_name:
        restores.append(node_of(saver.restore_op_name))
        restoring = cut(whole, restores)
        reader = next(_foreign_reads(restoring, node_of(saver.filename_tensor_name)), None)
        if reader is not None:
            raise ModelError(
                f"{folder}: its operator {reader!r} restores variables from another path; "
                "expected variables in the folder"
            )

    # Check both parts against their own lists
    _check_operators(cut(whole, ends), inference, folder)
    if restores:
        _check_operators(restoring, _RESTORE, folder)

    # TensorFlow imports only these nodes, with the functions that they call
    graph = cut(whole, [*ends, *restores])
    if restores:
        _read_copies(graph, _find_copies(whole), _variables(restoring))
    functions = _reachable(graph)
    kept = [item for item in graph.library.function if item.signature.name in functions]
    del graph.library.function[:], graph.library.gradient[:]
    graph.library.function.extend(kept)
    restore = (saver.restore_op_name, saver.filename_tensor_name) if restores else None
    return Program(graph, inputs, outputs, restore)


def _read_copies(graph: Any, copies: Mapping[str, str], restored: Collection[str]) -> None:
    """Let the nodes read the restored copy of each variable that is not restored, in place.

    `tf.saved_model.save` of a Keras 3 model stores a copy of each variable, and restores only the
    copies. TensorFlow 2 assigns the copies to the variables through Python objects, which are not
    read here.
    """
    for node in graph.node:
        for position, name in enumerate(node.input):
            copy = copies.get(name)
            if name not in restored and copy in restored:
                node.input[position] = copy


def _find_copies(graph: Any) -> dict[str, str]:
    """Return each variable that gets the value of another, by the name of the other."""
    read = {}
    for node in graph.node:
        if node.op == "ReadVariableOp":
            read[node.name] = node.input[0]
    copies = {}
    for node in graph.node:
        if node.op == "AssignVariableOp" and node.input[1] in read:
            copies[read[node.input[1]]] = node.input[0]
    return copies


def _variables(graph: Any) -> set[str]:
    return {node.name for node in graph.node if node.op == "VarHandleOp"}


def _check_operators(graph: Any, allowed: Collection[str], folder: Path) -> None:
    """Check that all operators of a graph are allowed.

    Raises:
        ModelError: one is not; the message names the first.
    """
    strange = next(_strange(graph, allowed), None)
    if strange is None:
        return
    mend = ""
    if strange.startswith("Assign"):
        mend = "; in training mode? try Keras's model.save('NAME.keras')"
    raise ModelError(
        f"{folder}: its operator {strange!r} is not an operator of inference; expected "
        f"operators that compute outputs from inputs and variables{mend}"
    )


def node_of(tensor: str) -> str:
    """Return the name of the node that computes a tensor.

    >>> node_of("serving_default_input_1:0")
    'serving_default_input_1'
    """
    return tensor.split(":")[0]


def _tensor_names(infos: Any) -> dict[str, str]:
    """Return the tensor of each input or output, by its name in the signature."""
    return {name: infos[name].name for name in sorted(infos)}


def _signature(meta: Any, folder: Path) -> Any:
    """Return the signature `serving_default`, or the only one.

    Signatures without inputs or outputs do not count.

    Raises:
        ModelError: there is no such signature.
    """
    signatures = {}
    for name, item in meta.signature_def.items():
        if item.inputs and item.outputs:
            signatures[name] = item
    if "serving_default" in signatures:
        return signatures["serving_default"]
    if len(signatures) != 1:
        names = ", ".join(sorted(signatures)) or "none"
        raise ModelError(
            f"{folder}: has signatures {names}; expected 'serving_default', or only one"
        )
    return next(iter(signatures.values()))


def _imported_ops() -> set[str]:
    """Return the operators that inference may have, see the module's docstring."""
    import tf2onnx.onnx_opset  # noqa: F401  fills the table
    from tensorflow.python.framework import op_def_registry
    from tf2onnx.handler import tf_op

    from resnet8ptq.models import tensorflow_ops  # noqa: F401  adds to the table

    stateless = set()
    for versions in tf_op.get_opsets().values():
        for table in versions:
            for name in table:
                operator = op_def_registry.get(name)
                if operator is not None and not operator.is_stateful:
                    stateless.add(operator.name)
    return stateless | _CALLS | _CHECKS | _VARIABLES | {"If", "While"}


def _strange(graph: Any, allowed: Collection[str]) -> Iterator[str]:
    """Yield the operators that are not allowed, in a graph and in the functions that it calls."""
    bodies = [function.node_def for function in _reachable(graph).values()]
    for node in chain(graph.node, *bodies):
        if node.op not in allowed:
            yield node.op


def _foreign_reads(graph: Any, filename: str) -> Iterator[str]:
    """Yield the nodes that read another checkpoint, or pass another path to a function.

    A text argument of a function counts as a path.

    Args:
        filename: the node for the path of the folder's own checkpoint.
    """
    from tensorflow import string

    bodies = [(graph.node, {filename})]  # nodes, and the origins of allowed paths
    for function in _reachable(graph).values():
        arguments = {argument.name for argument in function.signature.input_arg}
        bodies.append((function.node_def, arguments))

    # Follow each path back to its origin
    for nodes, allowed in bodies:
        passed_on = {}  # the source of each Identity
        for node in nodes:
            if node.op == "Identity":
                passed_on[node.name] = node.input[0]
        for node in nodes:
            paths = []  # indices of the inputs that are paths
            if node.op == "RestoreV2":
                paths.append(0)
            elif node.op in _CALLS:
                for index, kind in enumerate(node.attr["Tin"].list.type):
                    if kind == string.as_datatype_enum:
                        paths.append(index)
            for index in paths:
                if _origin(node.input[index], passed_on) not in allowed:
                    yield node.name


def _origin(tensor: str, passed_on: Mapping[str, str]) -> str:
    """Return the node or argument that a tensor comes from, through operators that pass it on."""
    name = node_of(tensor)
    for _ in passed_on:
        name = node_of(passed_on.get(name, name))
    return name


def _reachable(graph: Any) -> dict[str, Any]:
    """Return the functions that the nodes of a graph call, directly or indirectly, by name."""
    library = {function.signature.name: function for function in graph.library.function}
    reachable: dict[str, Any] = {}
    waiting = list(graph.node)  # nodes whose calls are not yet followed
    while waiting:
        node = waiting.pop()
        for value in node.attr.values():
            for called in (value.func, *value.list.func):
                if called.name in library and called.name not in reachable:
                    reachable[called.name] = library[called.name]
                    waiting += library[called.name].node_def
    return reachable
