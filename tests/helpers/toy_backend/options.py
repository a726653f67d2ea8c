"""The settings of `backend=toy`."""

from dataclasses import dataclass

from resnet8ptq.config.limits import at_least, limited
from resnet8ptq.config.schema import BackendConfig


@dataclass
class ToyConfig(BackendConfig):
    """Rounded weights."""

    name: str = "toy"
    levels: int = limited(127, at_least(1))
