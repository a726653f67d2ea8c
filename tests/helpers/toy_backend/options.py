"""The settings of `backend=toy`."""

from dataclasses import dataclass

from resnet8ptq.config.limits import NAME, limited
from resnet8ptq.config.schema import BackendConfig


@dataclass
class ToyConfig(BackendConfig):
    """The text that a file names as its producer."""

    name: str = "toy"
    producer: str = limited("toy", NAME)
