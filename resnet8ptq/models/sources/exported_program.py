"""A torch ExportedProgram (.pt2) as the source of the FP32 network."""

import contextlib
import io
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import onnx
import torch

from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.core.text import one_line
from resnet8ptq.graph.links import input_names, output_names
from resnet8ptq.graph.passes import rename, rewrite
from resnet8ptq.graph.torch_module import as_tensors
from resnet8ptq.models.batch_axis import Outputs, Predict, in_full_batches
from resnet8ptq.models.contract import SampleArray
from resnet8ptq.models.gates import exported_program as gate
from resnet8ptq.models.gates import onnx as onnx_gate
from resnet8ptq.models.gates import torch_archive
from resnet8ptq.models.normalization import opset
from resnet8ptq.models.sources.contract import Network, Sample
from resnet8ptq.models.sources.onnx import to_supported

_BATCH = 8  # batch size for a program whose batch size has bounds


def read(source: Path, sample: Sample) -> Network:
    """Read an exported program.

    Raises:
        ModelError: see `gates.exported_program.read_network` and `from_program`; or torch cannot
            load the file.
    """
    packed = torch_archive.pack(gate.read_network(source))
    silent = warnings.catch_warnings(action="ignore")
    with errors_as(ModelError, f"{source}: torch cannot load it"), silent:
        program = torch.export.load(packed)
    return from_program(program, source, sample)


def from_program(program: Any, source: Path, sample: Sample) -> Network:
    """Return a program as a network.

    Args:
        source: the file that messages name.

    Raises:
        ModelError: a node is in training mode, see `_trains`, or torch cannot export the program;
            or see `gates.onnx.check_graph` and `to_supported`.
    """
    if any(map(_trains, program.graph.nodes)):
        raise ModelError(
            f"{source}: was exported in training mode, in which batches change the outputs; call "
            "eval() on the module before torch.export.export"
        )
    original = _original(program)
    proto = _name_outputs(program, _to_onnx(program, source))
    onnx_gate.check_graph(proto, source)
    return Network(to_supported(proto, source, sample), original, opset(proto))


def find_output_names(outputs: Any) -> list[str]:
    """Return the names of outputs, from their tree.

    The list is empty unless the outputs are a dict without inner containers, whose keys differ as
    texts and are not empty.
    """
    is_dict = outputs.type in (dict, OrderedDict)
    if not is_dict or not all(child.is_leaf() for child in outputs.children()):
        return []
    names = list(map(str, outputs.context))
    are_different = len({*names}) == len(names)
    return names if are_different and all(names) else []


def _name_outputs(program: Any, proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a program's ONNX graph; the keys of a dict that the program returns name its outputs.

    The outputs keep torch's names if `find_output_names` finds none, if the graph does not have a
    different output for each key, or if an input has the name of a key.
    """
    names = find_output_names(program.call_spec.out_spec)
    former = output_names(proto.graph)
    if len({*former}) != len(names) or not {*names}.isdisjoint(input_names(proto.graph)):
        return proto
    return rewrite(proto, [rename(dict(zip(former, names, strict=True)))])


def _to_onnx(program: Any, source: Path) -> onnx.ModelProto:
    """Return a program in ONNX; errors name `source`.

    Raises:
        ModelError: torch cannot export it.
    """
    silent = warnings.catch_warnings(action="ignore")
    progress = contextlib.redirect_stdout(io.StringIO())
    with silent, progress:
        try:
            exported = torch.onnx.export(program, dynamo=True, verbose=False)
        except Exception:  # torch raises dozens of types; a view after attention may be the cause
            _store_attention(program)
            try:
                exported = torch.onnx.export(program, dynamo=True, verbose=False)
            except Exception as error:
                cause: BaseException = error  # torch wraps it in advice on reports
                while cause.__cause__ is not None:
                    cause = cause.__cause__
                raise ModelError(f"{source}: torch cannot export it ({one_line(cause)})") from None
    return onnx.ModelProto.FromString(exported.model_proto.SerializeToString())


def _store_attention(program: Any) -> None:
    """After each attention, write a node that copies its output to memory in the order of the axes.

    torch decomposes attention into products, whose outputs have another memory order than the
    kernel's. A view that fits one order may not fit the other.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default
    contiguous = {"memory_format": torch.contiguous_format}
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=attention):
        with graph.inserting_after(node):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,), contiguous)
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    program.graph_module.recompile()


def _trains(node: Any) -> bool:
    """Return whether a node is a batch normalization or a dropout in training mode.

    Other random operators, such as the dropout of whole channels, do not count.
    """
    schema = getattr(node.target, "_schema", None)
    switches = {"aten::batch_norm": "training", "aten::dropout": "train"}
    name = getattr(schema, "name", "")
    switch = switches.get(name.removesuffix("_"))  # `dropout_` works in place
    if switch is None or schema is None:
        return False
    names = [argument.name for argument in schema.arguments]
    return bool(node.args[names.index(switch)])


def _original(program: Any) -> Predict:
    """Return a function that runs a program on any number of samples."""
    module = program.module()

    def predict(samples: SampleArray) -> Outputs:
        with torch.inference_mode():
            outputs = module(*as_tensors(samples))
        return [output.numpy() for output in torch.utils._pytree.tree_leaves(outputs)]

    first_input = program.graph_signature.user_inputs[0]
    [placeholder] = [node for node in program.graph.nodes if node.name == first_input]
    example = placeholder.meta["val"]

    # The batch size may be fixed, free, or free between bounds
    batch = example.shape[0]
    if isinstance(batch, int):
        return in_full_batches(predict, batch)
    bounds = program.range_constraints.get(batch.node.expr)
    if bounds is None:
        return predict
    allowed = max(bounds.lower, min(bounds.upper, _BATCH))
    return in_full_batches(predict, int(allowed))
