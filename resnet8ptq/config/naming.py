"""Names of runs (framework, dtype, calibration, granularity) and of networks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.config.schema import ModelConfig, QuantizationConfig


@dataclass(frozen=True)
class Combination:
    """The settings that distinguish the runs of a sweep."""

    backend: str
    flow: str | None
    dtype: str
    method: str
    calib: str
    per_channel: bool

    @classmethod
    def of_config(cls, config: QuantizationConfig) -> "Combination":
        """Return the combination of a config, which need not be checked yet."""
        flow = getattr(config.backend, "flow", None)
        names = (config.dtype.name, config.method, config.calib.name)
        return cls(config.backend.name, flow, *names, config.per_channel)

    @classmethod
    def of_params(cls, params: Mapping[str, str]) -> "Combination":
        """Return the combination of a logged run."""
        backend, dtype, calib = (params.get(key, "?") for key in ("backend", "dtype", "calib"))
        method, per_channel = params.get("method", "static"), params.get("per_channel") == "true"
        return cls(backend, params.get("backend.flow"), dtype, method, calib, per_channel)

    @property
    def framework(self) -> str:
        """The framework, followed by a flow other than the default (pt2e, file)."""
        others = ("pt2e", "file")
        return f"{self.backend} {self.flow}" if self.flow in others else self.backend

    @property
    def cells(self) -> list[str]:
        """Framework, dtype, calibration, granularity; the last two are empty for fp32 and files."""
        if self.dtype == "fp32" or self.flow == "file":  # another program quantized the file
            return [self.framework, self.dtype, "", ""]
        calibration = self.calib if self.method == "static" else self.method
        if self.method == "qat":
            calibration = f"qat, {self.calib}"
        granularity = "per channel" if self.per_channel else "per tensor"
        if self.method == "weight_only":
            granularity = "in blocks"
        return [self.framework, self.dtype, calibration, granularity]

    @property
    def name(self) -> str:
        """The known parts, joined by hyphens, such as `onnx-int8-minmax-per_tensor`."""
        framework, dtype, calibration, granularity = self.cells
        parts = (framework, dtype, calibration.partition(",")[0], granularity)
        return "-".join(filter(None, parts)).replace(" ", "_")


def name_network(config: ModelConfig, data_name: str = "") -> str:
    """Return the default of `model.name`: the name of the class, of the file or of the default."""
    if config.module:
        return config.module.rpartition(".")[2]
    if config.path:
        return Path(config.path).stem
    return "encoder" if data_name == "phrases" else "resnet8"
