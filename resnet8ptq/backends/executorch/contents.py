"""Reads a .pte file: its operators, which of them XNNPACK runs, and which of these in 8 bits."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from resnet8ptq.core.console import silenced

_LAYERS = re.compile(
    r"XNN(Conv2d|DepthwiseConv2d|ConvTranspose2d|FullyConnected|BatchMatrixMultiply)"
    r"|aten::(convolution|linear|matmul|addmm|bmm|mm)"
)
# Conversions between float and 8 bits, and operators that only read or name shapes.
_NO_WORK = ("XNNConvert", "quantized_decomposed::", "executorch_prim::", "aten::sym_size")


@dataclass(frozen=True)
class Operator:
    """An operator of a program.

    Attributes:
        kind: XNNPACK's name of a delegated operator; the program's name of any other.
        delegated: whether XNNPACK runs the operator.
        integer: whether XNNPACK runs the operator, and its input and output activations have 8
            bits.
        data: the dtype of a layer's first input in XNNPACK, such as `int8`; `float32` for layers
            outside XNNPACK.
        weights: the same of a layer's weights or second input, such as `int4`.
        dynamic: whether XNNPACK measures the range of the first input while it runs.
    """

    kind: str
    delegated: bool
    integer: bool
    data: str = "float32"
    weights: str = "float32"
    dynamic: bool = False

    @property
    def is_layer(self) -> bool:
        """Whether the operator is a convolution or a matrix product."""
        return _LAYERS.fullmatch(self.kind) is not None


def read_operators(content: bytes) -> list[Operator]:
    """Return the operators of a program in order, except those of `_NO_WORK`."""
    with silenced():
        from executorch.exir._serialize._program import deserialize_pte_binary
        from executorch.exir.schema import DelegateCall, KernelCall

        program = deserialize_pte_binary(content).program

    # A delegate is a graph of several operators
    [plan] = program.execution_plan
    operators: list[Operator] = []
    for instruction in plan.chains[0].instructions:
        call = instruction.instr_args
        if isinstance(call, DelegateCall):
            index = plan.delegates[call.delegate_index].processed.index
            operators += _read_delegate(program.backend_delegate_data[index].data)
        elif isinstance(call, KernelCall):
            operators.append(Operator(plan.operators[call.op_index].name, False, False))
    return [operator for operator in operators if not operator.kind.startswith(_NO_WORK)]


def _read_delegate(payload: bytes) -> Iterator[Operator]:
    """Yield the operators of a graph that XNNPACK runs, from the content of the graph."""
    graph = _decode(payload)
    types = {}
    for value in graph["xvalues"]:
        union = value["xvalue_union"]
        tensor = union.get("tensor_value", union)
        types[tensor["id_out"]] = tensor["datatype"]

    # An operator names its tensors by numbers; weights and biases do not decide
    for node in graph["xnodes"]:
        union = node["xnode_union"]
        known = set()
        for key, number in union.items():
            if _TENSOR.fullmatch(key) and number in types:
                known.add(types[number])
        integer = bool(known) and known <= _INTEGERS

        # A product of two inputs has no filter
        first = types.get(union.get("input1_id"), "")
        second = types.get(union.get("filter_id", union.get("input2_id")), first)
        yield Operator(
            node["xnode_union_type"],
            delegated=True,
            integer=integer,
            data=_find_dtype(first),
            weights=_find_dtype(second),
            dynamic=first in _MEASURED,
        )


_TENSOR = re.compile(r"(input\d*|output)_id")
_INTEGERS = {"xnn_datatype_qint8", "xnn_datatype_qcint8"}
_MEASURED = {"xnn_datatype_qdint8", "xnn_datatype_qpint8"}
_LEVELS = re.compile(r"xnn_datatype_q[a-z]*?(u?int\d+)")
_FLOATS = {"xnn_datatype_fp16": "float16", "xnn_datatype_bf16": "bfloat16"}


def _find_dtype(datatype: str) -> str:
    """Return the dtype of XNNPACK's name of a datatype; float32 for unknown ones.

    >>> _find_dtype("xnn_datatype_qbint4"), _find_dtype("xnn_datatype_quint8")
    ('int4', 'uint8')
    """
    levels = _LEVELS.fullmatch(datatype)
    return levels[1] if levels else _FLOATS.get(datatype, "float32")


def _decode(payload: bytes) -> Any:
    """Return XNNPACK's graph of a delegate, parsed from the JSON of ExecuTorch's flatc."""
    from executorch.backends.xnnpack.serialization import xnnpack_graph_serialize as xnnpack
    from executorch.exir._serialize._flatbuffer import _flatc_decompile

    # The header says where the graph is in the payload
    header = xnnpack.XNNHeader.from_bytes(payload[: xnnpack.XNNHeader.EXPECTED_LENGTH])
    start = header.flatbuffer_offset
    size = header.flatbuffer_size

    # flatc reads and writes files only
    with TemporaryDirectory() as scratch:
        schema = Path(scratch, "schema.fbs")
        graph = Path(scratch, "graph.bin")
        schema.write_bytes(xnnpack._get_schema_bytes())
        graph.write_bytes(payload[start : start + size])
        _flatc_decompile(scratch, str(schema), str(graph))
        text = graph.with_suffix(".json").read_text()
    return json.loads(re.sub(r": -?(?:inf|nan)\b", ": null", text))  # infinite bounds clip nothing
