"""What a run can be told: dataclass schemas, and the one place that makes a typed `RunConfig`.

Hydra checks names and types while it composes (`conf/` holds the values); `parse_config` checks
the ranges. Both errors name the key, what it got and what it takes.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from resnet8ptq.errors import ConfigError

DTYPES = ("fp32", "int8", "uint8", "u8s8")
CALIBRATIONS = ("minmax", "entropy", "percentile", "histogram")
DATASETS = ("cifar10", "shapes")
ANALYSES = ("sensitivity",)
MODES = ("one_at_a_time", "all_but_one")
ENGINES = ("auto", "fbgemm", "x86", "onednn", "qnnpack")


@dataclass
class BackendConfig:
    """Which framework quantizes; the base of each backend's own options."""

    name: str = MISSING


@dataclass
class TorchConfig(BackendConfig):
    """PyTorch, FX graph mode."""

    name: str = "torch"
    engine: str = "auto"
    reduce_range: bool | None = None  # null: as the engine's own default qconfig has it
    freeze: bool = True
    debug_records: bool = False


@dataclass
class DtypeConfig:
    """8-bit format; what it means in each framework stands in the backend's module."""

    name: str = MISSING


@dataclass
class CalibConfig:
    """How activation ranges are found. Every method takes the same keys, so that sweeps can mix."""

    name: str = MISSING
    samples_per_class: int = 100
    batch_size: int = 100
    percentile: float = 99.99
    num_bins: int = 2048
    num_quantized_bins: int = 128


@dataclass
class ModelConfig:
    """Where the FP32 network comes from."""

    name: str = MISSING
    path: str | None = None
    fold: bool = True


@dataclass
class DataConfig:
    """Which images."""

    name: str = MISSING
    root: str | None = None
    on_missing: str = "shapes"


@dataclass
class EvaluateConfig:
    """How the test images are run."""

    batch_size: int = 256


@dataclass
class LatencyConfig:
    """How the model is timed beside its FP32 baseline."""

    enabled: bool = True
    batch_size: int = 256
    threads: int = 1
    repeats: int = 200
    batch_repeats: int = 10


@dataclass
class TrackingConfig:
    """Where MLflow keeps the runs."""

    uri: str | None = None
    root: str = "mlruns"
    experiment_name: str = "resnet8ptq"


@dataclass
class ReportConfig:
    """What a model must keep to be recommended; fractions."""

    max_drop: float = 0.05
    min_accuracy: float = 0.85


@dataclass
class AnalysisConfig:
    """What is run instead of one quantization: `sensitivity` quantizes layer by layer."""

    name: str | None = None
    mode: str = "one_at_a_time"
    images: int = 2000


@dataclass
class RunConfig:
    """One run, whole: mirrors `conf/config.yaml`."""

    backend: BackendConfig = MISSING
    dtype: DtypeConfig = MISSING
    calib: CalibConfig = MISSING
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    per_channel: bool = False
    nodes_to_quantize: list[str] | None = None
    nodes_to_exclude: list[str] = field(default_factory=list)
    seed: int = 42
    threads: int | None = None
    cache_dir: str | None = None
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    # What a named sweep sets differently for each backend, read there by interpolation.
    per_backend: dict[str, Any] = field(default_factory=dict)


def register_schemas() -> None:
    """Tell Hydra the schemas, before it composes.

    `RunConfig` types every group; only a backend with options of its own needs a schema besides,
    kept below `hydra/`, where it is not offered as an option of the group.
    """
    store = ConfigStore.instance()
    store.store(name="schema", node=RunConfig)
    store.store(group="hydra/schema", name="torch", node=TorchConfig)


def parse_config(cfg: DictConfig) -> RunConfig:
    """Turn what Hydra composed into a checked `RunConfig`.

    Raises:
        ConfigError: a value is missing, does not resolve, or is out of range.
    """
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if not isinstance(config, RunConfig):  # composed without the schema
        raise ConfigError("conf/config.yaml: its defaults must begin with `schema`")
    _check_keys(config, "")
    _check(config)
    return config


def _check_keys(node: object, prefix: str) -> None:
    """Refuse keys that were forced in by `+key=value`: nothing would read them."""
    known = [item.name for item in fields(node)]  # type: ignore[arg-type]
    for key, value in vars(node).items():
        if key not in known:
            raise ConfigError(f"{prefix}{key}: no such key; takes {' | '.join(known)}")
        if is_dataclass(value):
            _check_keys(value, f"{prefix}{key}.")


def _check(config: RunConfig) -> None:
    from resnet8ptq.backends import BACKENDS

    calib = config.calib
    _one_of("backend.name", config.backend.name, tuple(BACKENDS))
    _one_of("dtype.name", config.dtype.name, DTYPES)
    _one_of("calib.name", calib.name, CALIBRATIONS)
    _one_of("data.name", config.data.name, DATASETS)
    _one_of("data.on_missing", config.data.on_missing, ("shapes", "error"))
    if isinstance(config.backend, TorchConfig):
        _one_of("backend.engine", config.backend.engine, ENGINES)
    elif config.backend.name == "torch":
        raise ConfigError("backend.name: got 'torch' by itself; takes backend=torch")
    _at_least("calib.samples_per_class", calib.samples_per_class, 1)
    _at_least("calib.batch_size", calib.batch_size, 1)
    _require("calib.percentile", calib.percentile, 50 < calib.percentile <= 100, "50 < p <= 100")
    _at_least("calib.num_quantized_bins", calib.num_quantized_bins, 2)
    wide_enough = calib.num_bins % 2 == 0 and calib.num_bins > 2 * calib.num_quantized_bins
    _require(
        "calib.num_bins",
        calib.num_bins,
        wide_enough,
        f"an even number > 2 * calib.num_quantized_bins = {2 * calib.num_quantized_bins}",
    )
    _at_least("evaluate.batch_size", config.evaluate.batch_size, 1)
    for key in ("batch_size", "threads", "repeats", "batch_repeats"):
        _at_least(f"latency.{key}", getattr(config.latency, key), 1)
    _require("seed", config.seed, 0 <= config.seed < 2**32, "0 <= seed < 2**32")
    for key in ("max_drop", "min_accuracy"):
        value = getattr(config.report, key)
        _require(f"report.{key}", value, 0 <= value <= 1, "a fraction, 0 to 1")
    if config.threads is not None:
        _at_least("threads", config.threads, 1)
    if not config.tracking.experiment_name.strip():
        raise ConfigError("tracking.experiment_name: got '', takes a name")
    nodes = config.nodes_to_quantize
    _require("nodes_to_quantize", nodes, nodes is None or len(nodes) > 0, "null or a list of names")
    _check_analysis(config, config.analysis)


def _check_analysis(config: RunConfig, analysis: AnalysisConfig) -> None:
    if analysis.name is None:
        if analysis != AnalysisConfig():
            raise ConfigError("analysis: nothing reads its keys without +analysis=sensitivity")
        return
    _one_of("analysis.name", analysis.name, ANALYSES)
    _one_of("analysis.mode", analysis.mode, MODES)
    _at_least("analysis.images", analysis.images, 1)
    with_it = f"with analysis={analysis.name}"
    dtypes = " | ".join(name for name in DTYPES if name != "fp32")
    _require("dtype.name", "'fp32'", config.dtype.name != "fp32", f"{dtypes} {with_it}")
    chosen, excluded = config.nodes_to_quantize, config.nodes_to_exclude
    _require("nodes_to_quantize", chosen, chosen is None, f"null {with_it}")
    _require("nodes_to_exclude", excluded, not excluded, f"[] {with_it}")


def _require(key: str, got: object, ok: bool, takes: str) -> None:
    if not ok:
        raise ConfigError(f"{key}: got {got}, takes {takes}")


def _one_of(key: str, got: str, choices: tuple[str, ...]) -> None:
    _require(key, repr(got), got in choices, " | ".join(choices))


def _at_least(key: str, got: int, least: int) -> None:
    _require(key, got, got >= least, f"an integer >= {least}")
