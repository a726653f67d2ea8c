"""Things that a setting chooses by name: found in a table, imported when they are asked for."""

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from resnet8ptq.core.errors import ConfigError

T = TypeVar("T")


def look_up(key: str, name: str, table: Mapping[str, T]) -> T:
    """Return the entry of that name.

    Args:
        key: the setting that names it, for the error.

    Raises:
        ConfigError: there is no such entry; lists the entries.
    """
    if name not in table:
        raise ConfigError(f"{key}: got {name!r}, takes {' | '.join(table)}")
    return table[name]


def import_from(place: str) -> Any:
    """Import what `place` names as `package.module:attribute`."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
