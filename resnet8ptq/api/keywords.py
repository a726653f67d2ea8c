"""Converts the keywords of a Python call to the words of a command line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from resnet8ptq.config import words
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ConfigError

_GROUPS = {name for name, kind in get_type_hints(RunConfig).items() if is_dataclass(kind)}
_ADDED = ("analysis",)  # a group that the defaults do not list: Hydra takes +analysis=


def to_words(settings: Mapping[str, Any], swept: bool = False) -> list[str]:
    """Return keywords as `key=value` words in Hydra's grammar.

    Two underscores stand for a dot, and a dict for the keys of a group.

    >>> to_words({"dtype": "u8s8", "calib__percentile": 99.9, "per_channel": True})
    ['dtype=u8s8', 'calib.percentile=99.9', 'per_channel=true']
    >>> to_words({"calib": {"name": "percentile", "percentile": 99.9}})
    ['calib=percentile', 'calib.percentile=99.9']
    >>> to_words({"backend": ["onnx", "torch"]}, swept=True)
    ['backend=onnx,torch']

    Args:
        swept: whether a list holds the values to sweep; settings whose values are lists then take
            a list of lists.

    Raises:
        ConfigError: a value has a type that no setting takes, such as an array, or a list of values
            to sweep is empty.
    """
    result = []
    for keyword, value in settings.items():
        key = keyword.replace("__", ".")
        if isinstance(value, Mapping) and key in _GROUPS:
            result += _group_words(key, value, swept)
        else:
            result.append(_word(key, value, swept))
    return result


def _group_words(group: str, values: Mapping[str, Any], swept: bool) -> list[str]:
    """Return a word for each key of a group; `name`, which chooses the option, comes first."""
    result = []
    if "name" in values:
        result.append(_word(group, values["name"], swept))
    for key, value in values.items():
        if key != "name":
            result.append(_word(f"{group}.{key}", value, swept))
    return result


def _word(key: str, value: Any, swept: bool) -> str:
    plus = "+" if key in _ADDED else ""
    if swept and isinstance(value, list | tuple):
        if not value:
            raise ConfigError(f"{key}: got an empty list, expected one or more values")
        shown = ",".join(_show(key, item) for item in value)
    else:
        shown = _show(key, value)
    return f"{plus}{key}={shown}"


def _show(key: str, value: Any) -> str:
    """Return a value in Hydra's grammar.

    Raises:
        ConfigError: the value has a type that no setting takes.
    """
    # A bool is an int, so it comes before the numbers
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return _show_text(str(value))

    # A text is a sequence too, so containers come last
    if isinstance(value, Mapping):
        pairs = []
        for name, item in value.items():
            pairs.append(f"{_escape(str(name))}: {_show(key, item)}")
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_show(key, item) for item in value) + "]"
    raise ConfigError(f"{key}: got a {type(value).__name__}, expected a text, number, list or dict")


def _escape(name: str) -> str:
    """Return a dict's key with special characters escaped: Hydra's grammar has no quotes there."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", name)


def _show_text(text: str) -> str:
    """Return a text, quoted if it has a backslash or Hydra would not read it as the same text."""
    try:
        # A backslash at the end would escape the comma behind it.
        if "\\" not in text and words.parse(f"key={text}").value() == text:
            return text
    except ConfigError:
        pass
    return words.quote(text)
