"""Changes of settings that may reduce the quantization loss."""

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from resnet8ptq.config import words
from resnet8ptq.config.schema import DTYPES, RunConfig
from resnet8ptq.core import machine


@dataclass(frozen=True)
class Change:
    """A change of settings.

    Attributes:
        settings: each as typed on the command line.
    """

    settings: tuple[str, ...]

    @property
    def words(self) -> str:
        """All settings in one line."""
        return " ".join(self.settings)

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the changed settings; a change of calibration drops `calib.table`."""
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
    elif is_dataclass(old):  # an option of a group
        value = replace(old, name=value)  # type: ignore[type-var]
    return replace(owner, **{first: value})


PER_CHANNEL = change("per_channel=true")
REDUCE_RANGE = change("reduce_range=true")
UINT8 = change("dtype=uint8")
EQUALIZE = change("corrections.equalization=true")
BIAS = change("corrections.bias_correction=true")
LEARN = change(
    "corrections.adaround=true corrections.adaround_iterations=500 corrections.bias_correction=true"
)
BLOCKS = change(
    "corrections.reconstruction=true corrections.reconstruction_iterations=500 "
    "corrections.bias_correction=true"
)
SMOOTH = change("corrections.smooth_quant=true")
FLOAT_OUTPUT = change("float_output=true")
# An average pool in 8 bits takes the range of its input, which is much too large for its output.
POOLS_IN_FLOAT = change("op_types=[Conv,Gemm,MatMul,Add,Relu,Clip,Softmax,MaxPool]")


def calibrate(method: str) -> Change:
    """Return the change to another calibration method."""
    return change(f"calib={method}")


def calibrate_with(samples_per_class: int) -> Change:
    """Return the change to another number of calibration samples."""
    return change(f"calib.samples_per_class={samples_per_class}")


def leave_in_float(config: RunConfig, nodes: Sequence[str]) -> Change:
    """Return the change that leaves more nodes in float."""
    every = list(dict.fromkeys([*config.nodes_to_exclude, *nodes]))
    return Change((f"nodes_to_exclude={words.as_list(every)}",))


def usual(config: RunConfig, worst: Sequence[str]) -> list[Change]:
    """Return the changes that are worth trying with any finding.

    Args:
        worst: nodes of the layer that loses most by itself; empty if unknown.
    """
    changes = [] if config.per_channel else [PER_CHANNEL]
    changes += [calibrate(name) for name in ("percentile", "minmax") if name != config.calib.name]
    if DTYPES[config.dtype.name][1] == "int8":
        changes.append(UINT8)
        if not (config.reduce_range or machine.sums_exactly()):
            changes.append(REDUCE_RANGE)
    if worst:
        changes.append(leave_in_float(config, worst))
    return changes if config.float_output else [*changes, FLOAT_OUTPUT]


def correct(config: RunConfig) -> list[Change]:
    """Return the corrections to try if weights cost more than activations.

    Empty with per-tensor scales, or if rounding is already learned.
    """
    learned = config.corrections.adaround or config.corrections.reconstruction
    return [BIAS, LEARN] if config.per_channel and not learned else []
