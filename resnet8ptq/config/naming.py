"""Names of runs, such as `onnx-int8-minmax-per_tensor`, and of networks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.config.schema import (
    DTYPES,
    FLOATS,
    ModelConfig,
    QuantizationConfig,
    RunConfig,
)
from resnet8ptq.core.descriptor import FILE, find_readers

_BLOCK_SIZE = "weight_only.block_size"


@dataclass(frozen=True)
class Combination:
    """The settings that name a run.

    Attributes:
        path: path of a file quantized by another program; else empty.
        fp32: the framework of such a file's FP32 baseline, once it is known; else empty.
        in_blocks: with method=weight_only, whether blocks of weights share a scale.
    """

    backend: str
    flow: str | None
    dtype: str
    method: str
    calib: str
    per_channel: bool
    path: str = ""
    fp32: str = ""
    in_blocks: bool = True

    @classmethod
    def of_config(cls, config: QuantizationConfig) -> "Combination":
        """Return the combination of a config, which need not be checked yet."""
        backend = config.backend
        if backend.name == FILE:
            return cls(
                backend.name,
                flow=None,
                dtype="",  # unknown until the file is read
                method=config.method,
                calib=config.calib.name,
                per_channel=config.per_channel,
                path=backend.path or "",
            )

        # A backend that quantizes
        return cls(
            backend.name,
            flow=getattr(backend, "flow", None),
            dtype=config.dtype.name,
            method=config.method,
            calib=config.calib.name,
            per_channel=config.per_channel,
            in_blocks=config.weight_only.block_size is not None,
        )

    @classmethod
    def of_params(cls, params: Mapping[str, str]) -> "Combination":
        """Return the combination of a logged run."""
        backend = params.get("backend", "?")
        method = params.get("method", "static")
        calib = params.get("calib", "?")
        per_channel = params.get("per_channel") == "true"
        if backend == FILE:
            path = params.get("backend.path", "")
            if path == "null":
                path = ""
            return cls(
                backend,
                flow=None,
                dtype=_dtype_of_file(params),
                method=method,
                calib=calib,
                per_channel=per_channel,
                path=path,
                fp32=params.get("fp32_framework", ""),
            )

        # A backend that quantizes
        return cls(
            backend,
            flow=params.get("backend.flow"),
            dtype=params.get("dtype", "?"),
            method=method,
            calib=calib,
            per_channel=per_channel,
            in_blocks=params.get(_BLOCK_SIZE) != "null",
        )

    @property
    def framework(self) -> str:
        """The framework, with the flow if it is pt2e or onnx2tf.

        For a file, it is `READER file`, or `file` if the reader is unknown.
        """
        if self.backend == FILE:
            reader = find_readers().get(Path(self.path).suffix.lower())
            return f"{reader.name} file" if reader else "file"
        if self.flow in ("pt2e", "onnx2tf"):
            return f"{self.backend} {self.flow}"
        return self.backend

    @property
    def baseline(self) -> str:
        """The framework of the FP32 network; for a file, `framework` until `fp32` is known."""
        return self.fp32 or self.framework

    @property
    def cells(self) -> list[str]:
        """The four cells of a table: framework, dtype, calibration and granularity.

        Floats and files have empty texts in place of the last two. A file's name follows its
        framework.
        """
        if self.backend == FILE:
            return [f"{self.framework} {Path(self.path).name}".rstrip(), self.dtype, "", ""]
        if self.dtype in FLOATS:
            return [self.framework, self.dtype, "", ""]

        # Dynamic ranges and weights alone have no calibration method
        calibration = self.calib if self.method == "static" else self.method
        if self.method in ("mixed", "qat"):
            calibration = f"{self.method}, {self.calib}"
        granularity = "per channel" if self.per_channel else "per tensor"
        if self.method == "weight_only":
            granularity = "in blocks" if self.in_blocks else "per channel"
        return [self.framework, self.dtype, calibration, granularity]

    def describe(self, subject: str, kind: str) -> str:
        """Return a title in one line: the subject, the parts of the combination, and the kind."""
        return " · ".join(filter(None, (subject, *self.cells, kind)))

    @property
    def name(self) -> str:
        """The known parts, joined by hyphens, such as `onnx-int8-minmax-per_tensor`."""
        framework, dtype, calibration, granularity = self.cells
        parts = (framework, dtype, calibration.partition(",")[0], granularity)
        return "-".join(filter(None, parts)).replace(" ", "_")


def name_run(config: RunConfig, varied: str = "") -> str:
    """Return the name of a run; the config need not be checked yet.

    Args:
        varied: the end of the name, see `name_varied`.
    """
    parts = (config.benchmark.name, Combination.of_config(config).name, config.analysis.name)
    return f"{'-'.join(filter(None, parts))} {varied}".rstrip()


# Settings whose values are already part of the combination's name.
_NAMED = ("backend", "dtype", "method", "calib", "per_channel", "backend.path")
_MOST = 40  # most characters of a value in a name


def name_varied(words: Sequence[str], varied: Collection[str]) -> str:
    """Return the end of a run's name: the settings that vary in its sweep.

    The settings of `_NAMED`, which the combination names already, are left out.

    Args:
        words: the job's settings, as key=value.
        varied: the keys that differ between the jobs.

    >>> name_varied(["dtype=int8", "corrections.adaround=true", "seed=3"], ["dtype", "seed"])
    'seed=3'
    """
    parts = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key in varied and key not in _NAMED:
            short = value.rpartition("/")[2][:_MOST]
            parts.append(f"{key.rpartition('.')[2]}={short}")
    return " ".join(parts)


def _dtype_of_file(params: Mapping[str, str]) -> str:
    """Return the dtype of a file: its name in `DTYPES`, or the dtypes of weights and activations.

    For weights in 16-bit floats, it is the weights' dtype; it is empty if nothing is logged.
    """
    weights = params.get("weight_dtype", "")
    activations = params.get("activation_dtype", "")
    if weights in ("float16", "bfloat16") or (activations, weights) == ("", ""):
        return weights
    names = {pair: name for name, pair in DTYPES.items()}
    return names.get((activations, weights), f"{weights} weights, {activations}")


def name_network(config: ModelConfig) -> str:
    """Return the default of `model.name`: the name of the callable, of the file, or `resnet8`."""
    if config.module:
        return config.module.rpartition(".")[2]
    if config.path:
        return Path(config.path).stem
    return "resnet8"
