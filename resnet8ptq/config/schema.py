"""What a run can be told: dataclass schemas; `conf/` holds the values.

Hydra checks names and types against them while it composes.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

# dtype -> (activations, weights), as ONNX Runtime has them; the others' modules say what differs.
DTYPES = {
    "fp32": ("float32", "float32"),
    "int8": ("int8", "int8"),
    "uint8": ("uint8", "uint8"),
    "u8s8": ("uint8", "int8"),
}
METHODS = ("static", "dynamic", "qat")
FORMATS = ("qdq", "qoperator")
FLOWS = ("fx", "pt2e")
TFLITE_FLOWS = ("convert", "file")
SPLITS = ("test", "held_out")
ANALYSES = ("sensitivity", "inspect")
MODES = ("one_at_a_time", "all_but_one")
RESIZES = ("squash", "fit", "crop", "letterbox")
FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
CHANNELS = ("rgb", "bgr", "grey")
ON_BAD = ("error", "skip")
DIRECTIONS = ("maximize", "minimize")
ERRORS = ("mae", "rmse")  # of a regression
ENGINES = ("auto", "fbgemm", "x86", "onednn", "qnnpack")
# What a search can optimize, by the metric's name, and in which direction.
OBJECTIVES = {
    **dict.fromkeys(("accuracy", "expected_accuracy", "agreement", "sqnr_db"), "maximize"),
    **dict.fromkeys(("top5_accuracy", "macro_f1", "auc", "pauc"), "maximize"),
    **dict.fromkeys(("drop", "mae", "rmse", "relative_error"), "minimize"),
    **dict.fromkeys(("kl_divergence", "size_bytes", "peak_memory_bytes"), "minimize"),
    **dict.fromkeys(("latency_p50_ms", "latency_batch_p50_ms"), "minimize"),
    **dict.fromkeys(("speedup", "speedup_batch"), "maximize"),
}


@dataclass
class BackendConfig:
    """Which framework quantizes; the base of each backend's own options."""

    name: str = MISSING


@dataclass
class TorchConfig(BackendConfig):
    """PyTorch: FX graph mode, or PT2E (torch.export)."""

    name: str = "torch"
    flow: str = "fx"
    engine: str = "auto"
    freeze: bool = True
    debug_records: bool = False


@dataclass
class TfliteConfig(BackendConfig):
    """TensorFlow Lite: its converter, or a quantized file as it is."""

    name: str = "tflite"
    flow: str = "convert"
    file: str | None = None


@dataclass
class DtypeConfig:
    """8-bit format; what it means in each framework stands in the backend's module."""

    name: str = MISSING


@dataclass
class CalibConfig:
    """How activation ranges are found. Every method takes the same keys, so that sweeps can mix."""

    name: str = MISSING
    samples_per_class: int | None = 100
    batch_size: int = 100
    percentile: float = 99.99
    num_bins: int = 2048
    num_quantized_bins: int = 128
    averaging_constant: float = 0.01
    table: str | None = None


@dataclass
class ModelConfig:
    """Where the FP32 network comes from."""

    name: str = MISSING
    path: str | None = None
    fold: bool = True
    module: str | None = None
    state_dict: str | None = None
    module_args: Any = None  # a dict; Hydra would not let keys be added to a typed one


@dataclass
class DataConfig:
    """Which images."""

    name: str = MISSING
    root: str | None = None
    on_missing: str = "shapes"


@dataclass
class SplitConfig(DataConfig):
    """How samples without a split of their own are split."""

    split_seed: int = 0
    test_fraction: float = 0.5


@dataclass
class ArraysConfig(SplitConfig):
    """Array files, and what they hold; see `data.array_files`."""

    name: str = "arrays"
    inputs: str | None = None
    labels: str | None = None
    groups: str | None = None
    classes: list[str] | None = None
    offset: float = 0.0
    scale: float = 1.0


@dataclass
class FolderConfig(SplitConfig):
    """Pictures in class folders; see `data.folder`."""

    name: str = "folder"
    classes: list[str] | None = None
    on_bad: str = "error"


@dataclass
class TableConfig(ArraysConfig):
    """Rows of a file or a saved data set; see `data.table` and `data.huggingface`."""

    name: str = "table"
    inputs: Any = None  # a column's name, or a list of them
    shape: list[int] | None = None
    split: str | None = None
    folder: str | None = None
    on_bad: str = "error"


@dataclass
class TaskConfig:
    """What makes a result good; the base of each task's own options."""

    name: str = "auto"


@dataclass
class BinaryConfig(TaskConfig):
    """Two classes; see `tasks.binary`."""

    name: str = "binary"
    threshold: float = 0.5


@dataclass
class AnomalyConfig(TaskConfig):
    """Reconstruction errors; see `tasks.anomaly`."""

    name: str = "anomaly"
    max_fpr: float = 0.1


@dataclass
class RegressionConfig(TaskConfig):
    """Values; see `tasks.regression`."""

    name: str = "regression"
    primary: str = "mae"
    resamples: int = 9999


@dataclass
class CustomConfig(TaskConfig):
    """The user's own metric; see `tasks.custom`."""

    name: str = "custom"
    metric: Any = None  # a dict with `_target_`; Hydra would not let keys be added to a typed one
    direction: str = "maximize"
    percent: bool = False
    resamples: int = 9999


@dataclass
class PreprocessConfig:
    """What makes network inputs of samples, the same for every framework."""

    name: str = "raw"
    size: Any = None  # a number, or [height, width]
    resize: str = "squash"
    crop_fraction: float = 0.875
    filter: str = "bilinear"
    pad: int = 0
    channels: str = "rgb"
    scale: float = 1.0
    mean: list[float] = field(default_factory=lambda: [0.0])
    std: list[float] = field(default_factory=lambda: [1.0])


@dataclass
class EvaluateConfig:
    """How the test images are run."""

    batch_size: int | None = None
    split: str = "test"


@dataclass
class LatencyConfig:
    """How the model is timed beside its FP32 baseline."""

    enabled: bool = True
    batch_size: int = 64
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
    """What a model must keep to be recommended, as fractions; and what to compare with."""

    max_drop: float = 0.05
    min_accuracy: float = 0.85
    reference: str | None = None
    expected_accuracy: float | None = None


@dataclass
class SweepConfig:
    """What a sweep does about runs that it finds."""

    resume: bool = False


@dataclass
class BenchmarkConfig:
    """A task of a suite: where its files lie, and what it asks; see `experiment.suite`."""

    name: str | None = None
    folder: str | None = None
    target: float | None = None


@dataclass
class AnalysisConfig:
    """What is run instead of one quantization.

    `sensitivity` quantizes layer by layer; `inspect` says what the network is and takes.
    """

    name: str | None = None
    mode: str = "one_at_a_time"


@dataclass
class SymmetricConfig:
    """Whether the range of a tensor is made symmetric around zero; null: as the dtype has it."""

    activations: bool | None = None
    weights: bool | None = None


@dataclass
class CorrectionsConfig:
    """What is done to the FP32 network so that quantization costs it less; see `corrections`."""

    equalization: bool = False
    bias_correction: bool = False
    adaround: bool = False
    adaround_iterations: int = 1000


@dataclass
class QatConfig:
    """How `method=qat` fine-tunes."""

    epochs: int = 3
    batch_size: int = 128
    learning_rate: float = 1e-3
    temperature: float = 4.0


@dataclass
class QuantizationConfig:
    """How a network is quantized: all that a backend knows of a run."""

    backend: BackendConfig = MISSING
    dtype: DtypeConfig = MISSING
    calib: CalibConfig = MISSING
    method: str = "static"
    per_channel: bool = False
    format: str | None = None
    reduce_range: bool | None = None
    symmetric: SymmetricConfig = field(default_factory=SymmetricConfig)
    float_output: bool = False
    op_types: list[str] | None = None
    nodes_to_quantize: list[str] | None = None
    nodes_to_exclude: Any = field(default_factory=list)  # list of names, or "auto"
    corrections: CorrectionsConfig = field(default_factory=CorrectionsConfig)
    slim: bool = False


@dataclass
class RunConfig(QuantizationConfig):
    """One run, whole: mirrors `conf/config.yaml`."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    max_drop: float = 0.002
    held_out_images: int = 2000
    qat: QatConfig = field(default_factory=QatConfig)
    seed: int = 42
    threads: int | None = None
    cache_dir: str | None = None
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    objectives: list[str] | None = None
    # What a named sweep sets differently for each backend, read there by interpolation.
    per_backend: dict[str, Any] = field(default_factory=dict)
