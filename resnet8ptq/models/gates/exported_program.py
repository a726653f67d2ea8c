"""Checks an untrusted exported program (.pt2) before torch reads it.

A program must hold only the records of `torch.export.save`, with operators of inference.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from resnet8ptq.core.errors import ModelError, QuantizationError
from resnet8ptq.core.text import one_line
from resnet8ptq.models.gates import torch_archive

# The records that `save` writes; weights and constants are raw bytes that JSON describes.
_RECORDS = re.compile(
    r"archive/(archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
    r"|models/model\.json|data/sample_inputs/model\.pt|data/weights/weight_\d+"
    r"|data/constants/tensor_\d+|data/(weights|constants)/model_\w+_config\.json)"
)
# The same records of a user's program, below a folder of any name.
_OWN_RECORDS = re.compile(_RECORDS.pattern.replace("archive/", r"[^/]+/", 1))
_SAVED_HERE = ("a program that was saved here", "a program of torch.export with a network alone")
_OTHER_FORMAT = (
    "; this operator is not on the list of operators of inference; try "
    "torch.onnx.export(module, inputs, 'my.onnx', dynamo=True) and the path of that file"
)
_ORIGINS = ("metadata", "guards_code")
_GRAPH = "archive/models/model.json"
_SAMPLE = "archive/data/sample_inputs/model.pt"
_TARGET = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.\w+")
# Blocks of `with torch.no_grad():` and `with torch.autocast(...):`; their nodes are checked too.
_BLOCK = re.compile(r"torch\.ops\.higher_order\.wrap_with_(autocast|set_grad_enabled)")
# Memory without values, by the operators that fill it with zeros.
_UNFILLED = {
    "torch.ops.aten.empty.memory_format": "torch.ops.aten.zeros.default",
    "torch.ops.aten.empty_like.default": "torch.ops.aten.zeros_like.default",
    "torch.ops.aten.new_empty.default": "torch.ops.aten.new_zeros.default",
}
_FIRST = {"as_int": 0}  # the axis of weight normalization by default
_WEIGHT_NORM = "torch.ops.aten._weight_norm.default"
# Arithmetic of symbolic sizes, and access to one of several outputs.
_PYTHON = re.compile(
    r"_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|pow|neg|eq|ne|ge|gt|le|lt|and_|or_)"
    r"|torch\.sym_(float|int|ite|max|min|not|sum)"
)
# The name of a tensor, without characters that end a string in code
_NAME = re.compile(r"[\w./: -]*")
_TEXTS = {
    # A dimension: sums and products of numbers and free dimensions, and squares of free dimensions.
    # No other call or power is allowed, because it may take forever. `++` does not backtrack, so
    # that the match itself ends soon.
    "expr_str": re.compile(
        r"(?!.*(?:\d{13}|\*\*))"
        r"(?:Pow\((?=Symbol\('[su]\d++'(?:, \w++=True)*+\), Integer\(2\)\))"
        r"|Symbol\('[su]\d++'(?:, \w++=True)*+\)|(?:Add|Mul|Integer|FloorDiv|Mod|Max|Min)\("
        r"|[su]?\d++|[-+*/(), ])++"
    ),
    **dict.fromkeys(("fqn", "parameter_name", "buffer_name"), _NAME),
    **dict.fromkeys(
        ("in_spec", "out_spec"),
        re.compile(
            r"([\d\[\]{}:, ]|null"
            r'|"((builtins|torch\.fx\.immutable_collections)\.\w+|collections\.OrderedDict|\w+|\[\]'
            r'|\[\\"\w+\\"(, \\"\w+\\")*\])")*'  # the keys of a dict
        ),
    ),
    "path_name": re.compile(r"(weight|tensor)_\d+"),
    "torch_version": re.compile(r"[\w.+-]+"),
    "name": re.compile(r"\w*"),
}


def read_records(path: Path) -> dict[str, bytes]:
    """Return the records of a program that this package has saved.

    Raises:
        QuantizationError: the file is damaged, or holds more than this package saves.
    """
    return _checked(torch_archive.read_archive(path, _RECORDS), path)


def read_network(path: Path) -> dict[str, bytes]:
    """Return the records of a user's program, under the names that this package uses.

    The pickled sample inputs are dropped. So are the operators' origins in Python code and the
    guards, which torch would look up and evaluate. Memory without values becomes zeros, because it
    would hold earlier values of the process. See `_clean` for the other changes.

    Raises:
        ModelError: the file is damaged, or holds more than `torch.export.save` writes for a network
            of operators of inference; the message names the excess.
    """
    try:
        content = torch_archive.read_archive(path, _OWN_RECORDS)
        folders = set()
        records = {}
        for name, record in content.items():
            folder, _, inner = name.partition("/")
            folders.add(folder)
            records[f"archive/{inner}"] = record
        if len(folders) > 1:
            raise torch_archive.refusal(path, "records of two programs")

        # torch would unpickle the samples, so they are dropped
        if _SAMPLE in records:
            records[_SAMPLE] = b""
        return _checked(records, path, own=True)
    except QuantizationError as error:
        message = str(error).replace(*_SAVED_HERE)
        if "target torch.ops." in message:
            message += _OTHER_FORMAT
        raise ModelError(message) from None


def _checked(records: dict[str, bytes], path: Path, own: bool = False) -> dict[str, bytes]:
    """Return the records if torch can load them safely; raise `QuantizationError` otherwise.

    Args:
        own: whether the program is a user's, so that it is cleaned (`_clean`).
    """
    try:
        if own and _GRAPH in records:
            records[_GRAPH] = _clean(records[_GRAPH])
        strange = next(_check(records), None)
    # The file is not JSON, nests too deeply, or has a graph without a part of it
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        strange = one_line(error)
    if strange is not None:
        raise torch_archive.refusal(path, strange)
    return records


def _clean(content: bytes) -> bytes:
    """Return a program's graph, in JSON, after replacing some of the parts that `_check` refuses.

    `_ORIGINS` are empty, outputs in a library's class are a tuple, `_UNFILLED` memory holds zeros,
    and weight normalization is written as products.
    """
    graph = json.loads(content)
    for _, value in _items(graph):
        if not isinstance(value, dict):
            continue

        # Empty what torch would look up or evaluate
        for key in _ORIGINS:
            if key in value:
                value[key] = type(value[key])()
        if "tensor_values" in value:  # the value is a graph
            value["nodes"] = [*_spell_out_weight_norms(value)]

        # Replace unfilled memory, and outputs in a class
        target = value.get("target")
        if isinstance(target, str) and target in _UNFILLED:
            _fill(value)
        outputs = value.get("out_spec")
        if isinstance(outputs, str) and not _TEXTS["out_spec"].fullmatch(outputs):
            value["out_spec"] = _flatten(outputs)
    return json.dumps(graph).encode()


def _flatten(spec: str) -> str:
    """Return a structure of outputs as a tuple, because torch would look up a library's class."""
    version, structure = json.loads(spec)
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    count = sum(item == leaf for _, item in _items(structure))
    flat = {"type": "builtins.tuple", "context": "null", "children_spec": [leaf] * count}
    return json.dumps([version, flat])


def _spell_out_weight_norms(graph: dict[str, Any]) -> Iterator[Any]:
    """Yield the nodes of a graph, with weight normalization as products: v * (g / norm(v)).

    torch's own kernel does not check sizes: it writes out of bounds if `g` is too small (2.13).
    """
    values = graph["tensor_values"]
    for node in graph["nodes"]:
        if node["target"] != _WEIGHT_NORM:
            yield node
            continue
        arguments = {item["name"]: item["arg"] for item in node["inputs"]}
        [output] = node["outputs"]
        name = output["as_tensor"]["name"]
        norm = {"as_tensor": {"name": f"{name}_norm"}}
        factor = {"as_tensor": {"name": f"{name}_factor"}}
        for made in (norm, factor):
            values[made["as_tensor"]["name"]] = values[arguments["g"]["as_tensor"]["name"]]

        # Each step is a node with the name of its output
        weights = arguments["v"]
        axis = arguments.get("dim", _FIRST)
        norm_inputs = {"v": weights, "pow": {"as_int": 2}, "dim": axis}
        yield _make_node("norm_except_dim.default", norm_inputs, norm)
        yield _make_node("div.Tensor", {"self": arguments["g"], "other": norm}, factor)
        yield _make_node("mul.Tensor", {"self": weights, "other": factor}, output)


def _make_node(operator: str, inputs: Mapping[str, Any], output: dict[str, Any]) -> dict[str, Any]:
    arguments = [{"name": name, "arg": value, "kind": 1} for name, value in inputs.items()]
    return {
        "target": f"torch.ops.aten.{operator}",
        "inputs": arguments,
        "outputs": [output],
        "metadata": {},
        "is_hop_single_tensor_return": None,
        "name": output["as_tensor"]["name"],
    }


def _fill(node: dict[str, Any]) -> None:
    """Replace a node of `_UNFILLED`, in place, by one of zeros in the default memory format."""
    node["target"] = _UNFILLED[node["target"]]
    kept = []
    for argument in node.get("inputs", ()):
        if not isinstance(argument, dict) or argument.get("name") != "memory_format":
            kept.append(argument)
    node["inputs"] = kept


def _check(records: Mapping[str, bytes]) -> Iterator[str]:
    """Yield the parts that are not allowed, because `torch.export.load` may execute them.

    torch unpickles weights, sample inputs and older layouts, and evaluates the expressions of
    dynamic shapes and of guards. It calls any function below `torch` that a node names, such as
    `torch.os.system`, and writes and runs Python code that contains the names of tensors.
    """
    if records.get(_SAMPLE):
        yield _SAMPLE
    for name, content in records.items():
        if name.endswith(".json"):
            for key, value in _items(json.loads(content)):
                if not _is_plain(key, value):
                    yield f"{name}: {key} {str(value)[:60]}"


def _is_plain(key: str, value: Any) -> bool:
    """Return whether a JSON value is data, an allowed operator, or a text of its key's form."""
    if key in ("use_pickle", "guards_code", "metadata"):
        return not value
    if not _NAME.fullmatch(key):
        return False
    if not isinstance(value, str):
        return key not in ("target", "as_operator", "path_name", *_TEXTS)
    if key in ("target", "as_operator"):
        target = _TARGET.fullmatch(value)
        allowed = target is not None and torch_archive.is_allowed(*target.groups())
        return allowed or bool(_PYTHON.fullmatch(value) or _BLOCK.fullmatch(value))
    return bool(_TEXTS.get(key, re.compile(r"[\w,.> -]*")).fullmatch(value))


def _items(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of nested JSON.

    A text in a list has the list's key; other items of a list have an empty one.
    """
    waiting = [("", content)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, list):
            for item in value:
                key_of_item = ""
                if isinstance(item, str):
                    key_of_item = key
                waiting.append((key_of_item, item))
        elif isinstance(value, dict):
            waiting += value.items()
