"""What a run is called, wherever it is named: framework, dtype, calibration, granularity.

And what its network is called.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.config.schema import ModelConfig, QuantizationConfig


@dataclass(frozen=True)
class Combination:
    """The choices that tell the runs of a sweep apart, as the settings have them."""

    backend: str
    flow: str | None
    dtype: str
    method: str
    calib: str
    per_channel: bool

    @classmethod
    def of_config(cls, config: QuantizationConfig) -> "Combination":
        """Return that of a run to come; a composed config that is not checked yet will do."""
        flow = getattr(config.backend, "flow", None)
        names = (config.dtype.name, config.method, config.calib.name)
        return cls(config.backend.name, flow, *names, config.per_channel)

    @classmethod
    def of_params(cls, params: Mapping[str, str]) -> "Combination":
        """Return that of a logged run."""
        backend, dtype, calib = (params.get(key, "?") for key in ("backend", "dtype", "calib"))
        method, per_channel = params.get("method", "static"), params.get("per_channel") == "true"
        return cls(backend, params.get("backend.flow"), dtype, method, calib, per_channel)

    @property
    def framework(self) -> str:
        """The framework, and with another flow (PyTorch's PT2E, a TFLite file) that flow."""
        others = ("pt2e", "inductor", "file")
        return f"{self.backend} {self.flow}" if self.flow in others else self.backend

    @property
    def calibration(self) -> str:
        """How the activation ranges are found."""
        if self.method in ("static", "dynamic"):
            return self.calib if self.method == "static" else "dynamic"
        return f"{self.method}, {self.calib}"

    @property
    def granularity(self) -> str:
        """How many scales the weights of a layer have."""
        return "per channel" if self.per_channel else "per tensor"

    @property
    def cells(self) -> list[str]:
        """The four in words; of fp32, and of a file, the last two are empty."""
        if self.dtype == "fp32" or self.flow == "file":  # which was made elsewhere
            return [self.framework, self.dtype, "", ""]
        return [self.framework, self.dtype, self.calibration, self.granularity]

    @property
    def name(self) -> str:
        """The four in one word, such as `onnx-int8-minmax-per_tensor`; or what there is of them."""
        framework, dtype, calibration, granularity = self.cells
        if calibration:
            calibration = self.calib if self.method == "static" else self.method
        parts = filter(None, (framework, dtype, calibration, granularity))
        return "-".join(parts).replace(" ", "_")


def name_network(config: ModelConfig) -> str:
    """Return what the network is called where `model.name` does not say: its class or file."""
    if config.module:
        return config.module.rpartition(".")[2]
    return Path(config.path).stem if config.path else "resnet8"
