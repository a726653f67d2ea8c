"""An exported program (.pt2), read before torch sees it.

It is what `torch.export.save` writes, of operators of inference alone.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from resnet8ptq.core.errors import ModelError, QuantizationError
from resnet8ptq.core.text import one_line
from resnet8ptq.models.gates import torch_archive

# What `save` writes. Weights and constants are raw bytes, described in JSON.
_RECORDS = re.compile(
    r"archive/(archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
    r"|models/model\.json|data/sample_inputs/model\.pt|data/weights/weight_\d+"
    r"|data/constants/tensor_\d+|data/(weights|constants)/model_\w+_config\.json)"
)
# The same of a user's own, below a folder of any name.
_OWN_RECORDS = re.compile(_RECORDS.pattern.replace("archive/", r"[^/]+/", 1))
_SAVED_HERE = ("a program that was saved here", "a program of torch.export with a network alone")
_ORIGINS = ("metadata", "guards_code")
_GRAPH = "archive/models/model.json"
_SAMPLE = "archive/data/sample_inputs/model.pt"
_TARGET = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.\w+")
# Of symbolic sizes, and of operators with several outputs.
_PYTHON = re.compile(
    r"_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|pow|neg|eq|ne|ge|gt|le|lt|and_|or_)"
    r"|torch\.sym_(float|int|ite|max|min|not|sum)"
)
_NAME = re.compile(r"[\w./: -]*")  # of a tensor: nothing that could end a name in code
_TEXTS = {
    # A dimension: numbers and free dimensions, added and multiplied; nothing else is called, and
    # no power takes forever. Digits are matched once (`++`), so that neither does the match.
    "expr_str": re.compile(
        r"(?!.*(?:\d{13}|\*\*))"
        r"(?:Symbol\('[su]\d++'(?:, \w++=True)*+\)|(?:Add|Mul|Integer|FloorDiv|Mod|Max|Min)\("
        r"|[su]?\d++|[-+*/(), ])++"
    ),
    **dict.fromkeys(("fqn", "parameter_name", "buffer_name"), _NAME),
    **dict.fromkeys(
        ("in_spec", "out_spec"),
        re.compile(
            r"([\d\[\]{}:, ]|null"
            r'|"((builtins|torch\.fx\.immutable_collections)\.\w+|\w+|\[\])")*'
        ),
    ),
    "path_name": re.compile(r"(weight|tensor)_\d+"),
    "torch_version": re.compile(r"[\w.+-]+"),
    "name": re.compile(r"\w*"),
}


def read(path: Path) -> dict[str, bytes]:
    """Return the records of a program that is what `save` writes.

    Raises:
        QuantizationError: it is not; names what is strange in it.
    """
    return _checked(torch_archive.read(path, _RECORDS), path)


def read_network(path: Path) -> dict[str, bytes]:
    """Return the records of a program of a user's own, named as ours are.

    Sample inputs, which are pickled, are left out, and so are what says where in the Python code
    each operator came from, and the guards: torch would look up and evaluate what they say.

    Raises:
        ModelError: it holds more than `torch.export.save` writes for a network; names what.
    """
    try:
        found = torch_archive.read(path, _OWN_RECORDS)
        if len({name.split("/")[0] for name in found}) > 1:
            raise torch_archive.refusal(path, "records of two programs")
        records = {f"archive/{name.partition('/')[2]}": found[name] for name in found}
        if _SAMPLE in records:
            records[_SAMPLE] = b""
        return _checked(records, path, own=True)
    except QuantizationError as error:
        raise ModelError(str(error).replace(*_SAVED_HERE)) from None


def _without_origins(content: bytes) -> bytes:
    graph = json.loads(content)
    for _, value in _items(graph):
        if isinstance(value, dict):
            value |= {key: type(value[key])() for key in _ORIGINS if key in value}
    return json.dumps(graph).encode()


def _checked(records: dict[str, bytes], path: Path, own: bool = False) -> dict[str, bytes]:
    try:
        if own and _GRAPH in records:
            records[_GRAPH] = _without_origins(records[_GRAPH])
        strange = next(_check(records), None)
    except (ValueError, RecursionError) as error:  # no JSON, or nested without end
        strange = one_line(error)
    if strange is not None:
        raise torch_archive.refusal(path, strange)
    return records


def _check(records: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what `torch.export.load` would unpickle, evaluate or look up by name.

    It takes pickled weights, sample inputs and older layouts without asking, evaluates the
    expressions of dynamic shapes and of guards, calls whatever function below `torch` a node names
    (`torch.os.system`), and writes Python code with the names of tensors in it.
    """
    if records.get(_SAMPLE):
        yield _SAMPLE
    for name, content in records.items():
        if name.endswith(".json"):
            for key, value in _items(json.loads(content)):
                if not _is_plain(key, value):
                    yield f"{name}: {key}"


def _is_plain(key: str, value: Any) -> bool:
    if key in ("use_pickle", "guards_code", "metadata"):
        return not value
    if not _NAME.fullmatch(key):
        return False
    if not isinstance(value, str):
        return key not in ("target", "as_operator", "path_name", *_TEXTS)
    if key in ("target", "as_operator"):
        found = _TARGET.fullmatch(value)
        allowed = found is not None and torch_archive.is_allowed(*found.groups())
        return allowed or bool(_PYTHON.fullmatch(value))
    return bool(_TEXTS.get(key, re.compile(r"[\w,.> -]*")).fullmatch(value))


def _items(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of nested JSON; of a list, each value under the list's key."""
    waiting = [("", content)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, list):
            waiting += [(key if isinstance(each, str) else "", each) for each in value]
        elif isinstance(value, dict):
            waiting += value.items()
