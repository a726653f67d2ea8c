"""The settings of `backend=torch`."""

from dataclasses import dataclass

from resnet8ptq.config.limits import limited, one_of
from resnet8ptq.config.schema import BackendConfig


@dataclass
class TorchConfig(BackendConfig):
    """The settings of `backend=torch`, which `conf/backend/torch.yaml` explains."""

    name: str = "torch"
    flow: str = limited("fx", one_of("fx", "pt2e"))
    engine: str = limited("auto", one_of("auto", "fbgemm", "x86", "onednn", "qnnpack"))
    reduced: str = limited("auto", one_of("auto", "activations", "weights"))
    freeze: bool = True
    debug_records: bool = False
