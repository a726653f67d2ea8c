"""Changes of settings that may reduce the quantization loss."""

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from resnet8ptq.config import words
from resnet8ptq.config.schema import RunConfig


@dataclass(frozen=True)
class Change:
    """A change of settings.

    Attributes:
        settings: the changed settings, each as typed on the command line.
    """

    settings: tuple[str, ...]

    @property
    def words(self) -> str:
        """All settings in one line."""
        return " ".join(self.settings)

    def apply(self, config: RunConfig) -> RunConfig:
        """Return a config with the change; a change of calibration drops `calib.table`."""
        for setting in self.settings:
            override = words.parse(setting)
            path = override.key_or_group.split(".")
            config = _set(config, path, override.value())
            if path[0] == "calib":
                config = replace(config, calib=replace(config.calib, table=None))
        return config


def change(words: str) -> Change:
    """Return the change for settings in one line, separated by spaces.

    >>> change("calib=mse per_channel=true").settings
    ('calib=mse', 'per_channel=true')
    """
    return Change(tuple(words.split()))


def _set(owner: Any, path: Sequence[str], value: Any) -> Any:
    first, *rest = path
    old = getattr(owner, first)
    if rest:
        value = _set(old, rest, value)
    elif is_dataclass(old):  # the setting chooses an option of a group
        value = replace(old, name=value)  # type: ignore[type-var]
    return replace(owner, **{first: value})


def calibrate(method: str) -> Change:
    """Return the change to another calibration method."""
    return change(f"calib={method}")


def calibrate_with(samples_per_class: int) -> Change:
    """Return the change to another number of calibration samples of each class."""
    return change(f"calib.samples_per_class={samples_per_class}")


def leave_in_float(config: RunConfig, nodes: Sequence[str]) -> Change:
    """Return the change that leaves these nodes in float, and those that the config leaves.

    Args:
        config: its `nodes_to_exclude` must be a list, not `auto`.
    """
    every = list(dict.fromkeys([*config.nodes_to_exclude, *nodes]))
    return Change((f"nodes_to_exclude={words.as_list(every)}",))
