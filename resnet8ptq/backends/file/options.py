"""The settings of `backend=file`."""

from dataclasses import dataclass
from typing import Any

from resnet8ptq.config.limits import limited, one_of
from resnet8ptq.config.schema import BackendConfig
from resnet8ptq.core.descriptor import FILE, find_readers

_FRAMEWORKS = dict.fromkeys(backend.name for backend in find_readers().values())  # each once


@dataclass
class FileConfig(BackendConfig):
    """The options of `backend=file`, which scores a file that another program has quantized."""

    name: str = FILE
    inputs: Any = None  # an untyped dict, because Hydra adds no keys to typed dicts
    outputs: Any = None
    fp32: str | None = limited(None, one_of(*_FRAMEWORKS))

    @property
    def framework(self) -> str:
        """The backend that runs the FP32 network; `file` while `fp32` is None."""
        return self.fp32 or self.name
