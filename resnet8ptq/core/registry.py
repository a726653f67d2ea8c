"""Things that a setting chooses by name, found in a table."""

from collections.abc import Mapping
from typing import TypeVar

from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import or_nearest

T = TypeVar("T")


def look_up(key: str, name: str, table: Mapping[str, T]) -> T:
    """Return the entry of that name.

    Args:
        key: the setting that names it, for the error.

    Raises:
        ConfigError: there is no such entry; lists the entries, with the nearest.
    """
    if name not in table:
        raise ConfigError(f"{key}: got {name!r}, takes {or_nearest(name, table)}")
    return table[name]
