"""What a TorchScript archive may hold, checked before `torch.jit.load` runs any of it.

Its code runs as it is loaded (`__setstate__`), and again as it predicts. It is text, which is
parsed here and refused where it calls anything but operators of inference. Its pickles are read by
an unpickler that builds stand-ins, and each tensor must lie within its record: torch trusts both.
"""

import ast
import pickle
import pickletools
import re
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from resnet8ptq.backends.torch import archive
from resnet8ptq.core.text import one_line

_RECORDS = re.compile(
    r"archive/(version|byteorder|\.data/serialization_id|(data|constants|traced_inputs)(/\d+|\.pkl)"
    r"|code/__torch__/\w+(/\w+)*\.py(\.debug_pkl)?)"
)
_UNUSED = re.compile(r"\.debug_pkl$|/traced_inputs|/serialization_id$")  # torch does without
# Printable, without comments and escapes: Python's parser and torch's split it the same way.
_TEXT = re.compile(rb"[\n -\"$-&(-\[\]-~]*")
_SYNTAX = (
    *(ast.Module, ast.ClassDef, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Expr),
    *(ast.Assign, ast.AnnAssign, ast.If, ast.Pass, ast.Call, ast.Attribute, ast.Subscript),
    *(ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Slice, ast.expr_context),
    *(ast.keyword, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.Compare, ast.cmpop),
    *(ast.BoolOp, ast.boolop, ast.IfExp),
)
_FUNCTIONS = {"annotate", "bool", "float", "getattr", "int", "len", "unchecked_cast"}
_FUNCTIONS |= {"uninitialized"}
# Of the network's own modules, whose code is in the archive, and of packed weights.
_METHODS = {"__getstate__", "__setstate__", "_weight_bias", "forward", "set_weight_bias", "unpack"}
_PACKED = re.compile(r"__torch__\.torch\.classes\.quantized\.(Conv[123]d|Linear)PackedParamsBase")
_OTHERS = ".torch.classes."  # whose methods are compiled: some load libraries, or write files

_OPCODES = """
PROTO STOP MARK TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT APPEND APPENDS SETITEM
SETITEMS NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE BINPUT LONG_BINPUT
BINGET LONG_BINGET GLOBAL REDUCE NEWOBJ BUILD BINPERSID
"""
_KNOWN_OPCODES = frozenset(_OPCODES.split())
_ITEM_BYTES = {
    **{"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2},
    **{"Char": 1, "Byte": 1, "Bool": 1, "QInt8": 1, "QUInt8": 1, "QInt32": 4},
}
_TYPE = re.compile(r"[A-Za-z\[\], ]+")


def read(path: Path) -> dict[str, bytes]:
    """Return what inference needs of a TorchScript file, if it is what `torchscript.save` writes.

    Raises:
        QuantizationError: it is not; names what is strange in it.
    """
    records = archive.read(path, _RECORDS)
    records = {name: found for name, found in records.items() if not _UNUSED.search(name)}
    try:
        strange = next(_strange(records), None)
    except Exception as error:  # whatever a damaged or hostile record makes of itself
        strange = one_line(error)
    if strange is not None:
        raise archive.refusal(path, strange)
    return records


def _strange(records: Mapping[str, bytes]) -> Iterator[str]:
    for name, content in records.items():
        if name.endswith(".py"):
            yield from (f"{name}: {found}" for found in _strange_code(content))
        elif name.endswith("pkl"):
            yield from (f"{name}: {found}" for found in _strange_opcodes(content))
            _Unpickler(content, name.removesuffix(".pkl"), records).load()


def _strange_code(content: bytes) -> Iterator[str]:
    if not _TEXT.fullmatch(content) or b'"""' in content:
        yield "characters that no code saved here has"
    for node in ast.walk(ast.parse(content)):
        if not isinstance(node, _SYNTAX):
            yield type(node).__name__
        elif isinstance(node, ast.Call):
            yield from _strange_call(node.func)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.count(".") > 3 and _OTHERS in name and not _is_part(name):
                yield name
        elif _bound(node) in ("torch", "ops"):
            yield f"another {_bound(node)}"


def _strange_call(function: ast.expr) -> Iterator[str]:
    name = ast.unparse(function)
    match name.split("."):
        case ["torch", operator]:
            known = archive.is_allowed("aten", operator)
        case ["ops", namespace, operator]:
            known = archive.is_allowed(namespace, operator)
        case ["torch" | "ops", *_]:
            known = False
        case _ if isinstance(function, ast.Attribute):
            known = function.attr in _METHODS
        case _:
            known = name in _FUNCTIONS
    if not known:
        yield f"calls {name}"


def _is_part(name: str) -> bool:
    """Tell whether a dotted name is a packed weight's class, or a part of its name."""
    return bool(_PACKED.fullmatch(name)) or name.endswith(".torch.classes.quantized")


def _bound(node: ast.AST) -> str | None:
    """Return the name that a node gives a value to, if it does."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def _strange_opcodes(content: bytes) -> Iterator[str]:
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in _KNOWN_OPCODES:
            yield f"opcode {opcode.name}"
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(content):
            yield "a memo larger than the file"  # the unpickler makes a table of that length


class _Storage(NamedTuple):
    items: int


class _Stand:
    """Stands for an object of the network's own classes."""

    def __setstate__(self, state: Any) -> None:
        """Keep nothing: its parts were checked as they were built."""


class _Unpickler(pickle.Unpickler):
    """Builds stand-ins, and checks that tensors lie within their records."""

    def __init__(self, content: bytes, folder: str, records: Mapping[str, bytes]) -> None:
        super().__init__(BytesIO(content))
        self.folder = folder
        self.records = records

    def find_class(self, module: str, name: str) -> Any:
        whole = f"{module}.{name}"
        if whole in _GLOBALS:
            return _GLOBALS[whole]
        if module == "torch" and name.removesuffix("Storage") in _ITEM_BYTES:
            return name.removesuffix("Storage")
        own = module.startswith("__torch__.") and _OTHERS not in whole
        if own or _PACKED.fullmatch(whole):
            return _Stand
        raise pickle.UnpicklingError(f"asks for {whole}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, item, key, device, items = pid
        content = self.records.get(f"{self.folder}/{key}", b"")
        if kind != "storage" or device != "cpu" or len(content) != items * _ITEM_BYTES[item]:
            raise pickle.UnpicklingError(f"{self.folder}/{key} is not what it says")
        return _Storage(items)


def _tensor(
    storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any
) -> None:
    """Check a tensor's place in its storage, in items."""
    if not isinstance(storage, _Storage) or len(shape) != len(strides):
        raise pickle.UnpicklingError("a tensor of nothing")
    if not all(type(n) is int and 0 <= n < 2**63 for n in (offset, *shape, *strides)):
        raise pickle.UnpicklingError("a tensor of no size")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 not in shape and last >= storage.items:
        raise pickle.UnpicklingError("a tensor beyond its record")


def _typed(value: Any, kind: str) -> Any:
    if not _TYPE.fullmatch(kind):
        raise pickle.UnpicklingError(f"a value of type {kind}")
    return value


_GLOBALS: Mapping[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_qtensor": _tensor,
    "torch.per_tensor_affine": "per_tensor_affine",
    "torch.per_channel_affine": "per_channel_affine",
    "torch.jit._pickle.restore_type_tag": _typed,
    "collections.OrderedDict": dict,
    **{f"torch.jit._pickle.build_{kind}list": list for kind in ("int", "tensor", "double", "bool")},
}
