"""Looks up a registry entry by the name in a setting."""

from collections.abc import Mapping
from typing import TypeVar

from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import no_such_name

T = TypeVar("T")


def look_up(key: str, name: str, table: Mapping[str, T]) -> T:
    """Return the entry `name` of a table.

    Args:
        key: the setting that holds the name, for the error.

    Raises:
        ConfigError: the name is unknown; the message is that of `no_such_name`.
    """
    if name not in table:
        raise ConfigError(no_such_name(key, name, table))
    return table[name]
