"""The device on which torch learns: rounding, ranges, fine-tuning and synthetic samples.

A GPU adds in another order, and `drop_rounding` draws other random numbers there. The results
therefore differ from those of the CPU. The evaluation of artifacts does not depend on this device.
"""

import torch

from resnet8ptq.core.errors import ConfigError


def find_device(setting: str) -> torch.device:
    """Return the device for `device=auto|cpu|cuda`; `auto` uses a GPU if torch sees one.

    Raises:
        ConfigError: the setting is `cuda`, and torch sees no GPU.
    """
    if setting != "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    if setting == "cuda":
        raise ConfigError("device: got cuda, expected a GPU that torch sees; try device=auto")
    return torch.device("cpu")
