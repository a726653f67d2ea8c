"""The settings of a run as dataclasses; `conf/` holds their values and explains them.

Hydra checks names and types against these classes, `limits.check` the values.
"""

from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Self, get_type_hints

from omegaconf import MISSING

from resnet8ptq.config import limits
from resnet8ptq.config.limits import Limit, at_least, at_most, limited, one_of
from resnet8ptq.core.descriptor import FILE, Backend, find_backends
from resnet8ptq.core.registry import look_up

# dtype -> (activations, weights) in ONNX Runtime; other backends differ, see their `resolve()`.
DTYPES = {
    "fp32": ("float32", "float32"),
    "int8": ("int8", "int8"),
    "uint8": ("uint8", "uint8"),
    "u8s8": ("uint8", "int8"),
    "w4a8": ("uint8", "int4"),
    "w8a16": ("uint16", "int8"),
    "w4": ("float32", "int4"),
    "w8": ("float32", "int8"),
    "fp16": ("float32", "float16"),
}
FP32 = "fp32"  # the dtype of the baseline
CPU = "CPUExecutionProvider"  # repeated from `target.measure`, which would import numpy
F32 = "f32"  # equals the constant of `target.measure`
FLOATS = (FP32, "fp16")  # dtypes without integers, for which nothing is calibrated
WEIGHT_ONLY = ("w4", "w8")  # dtypes of method=weight_only
BY_BATCH = ("dynamic", "mixed")  # methods whose ranges depend on the batch
_THREADS = (*limits.COUNT, at_most(1024))
_ON_BAD = one_of("error", "skip")


def _with(key: str, *values: str) -> dict[str, Limit]:
    """Return the condition that a setting has one of these values."""
    return {key: one_of(*values)}


# Conditions: the values of other settings without which a setting has no effect.
_QUANTIZED = _with("dtype.name", *(name for name in DTYPES if name not in FLOATS))
_STORED = _with("dtype.name", *(name for name in DTYPES if name != FP32))
_CALIBRATED = {**_QUANTIZED, **_with("method", "static", "mixed", "qat")}
_HISTOGRAM = _with("calib.name", "entropy", "percentile", "mse")
_AVERAGE = _with("calib.name", "moving_average")
_LETTERBOX = _with("preprocess.resize", "letterbox")
_MODULE = {"model.module": limits.SET}
_SUITE = {"benchmark.name": limits.SET}
_TOKENIZED = {"data.tokenizer": limits.SET}
_TIMED = {"latency.enabled": limits.TRUE}
_TARGETED = {"target.command": limits.SET}
_ADAROUND = {"corrections.adaround": limits.TRUE}
_RECONSTRUCTION = {"corrections.reconstruction": limits.TRUE}
_WEIGHT_ONLY = {**_QUANTIZED, **_with("method", "weight_only")}


@dataclass
class BackendConfig:
    """The backend of a run; the base class of each backend's options.

    A backend's folder defines its further options in a subclass, see `core.descriptor`.
    """

    name: str = MISSING
    path: str | None = limited(None, only=_with("backend.name", FILE), is_path=True)

    @property
    def descriptor(self) -> Backend:
        """The backend's descriptor; raises `ConfigError` for an unknown name."""
        return look_up("backend.name", self.name, find_backends())

    @property
    def quantizes(self) -> bool:
        """Whether the backend quantizes; otherwise another program has made the artifact."""
        return self.descriptor.quantizes

    @property
    def framework(self) -> str:
        """The backend that runs the FP32 network."""
        return self.name

    @property
    def provider(self) -> str:
        """ONNX Runtime's execution provider that runs the files; other backends run on the CPU."""
        return CPU

    @property
    def inference_precision(self) -> str:
        """OpenVINO's type of the layers that stay in float; other backends leave it at float32."""
        return F32

    @property
    def takes_every_operator(self) -> bool:
        """Whether the backend's converter quantizes all operators, so `attention` has no effect."""
        return False

    def on_cpu(self) -> Self:
        """Return the settings for this machine's CPU, for runs whose files a target runs."""
        return self


@dataclass
class DtypeConfig:
    """Types of activations and weights; each backend defines them for a name in its `resolve`."""

    name: str = limited(MISSING, one_of(*DTYPES))

    @property
    def is_fp32(self) -> bool:
        """Whether this is the dtype of the FP32 baseline."""
        return self.name == FP32

    @property
    def is_float(self) -> bool:
        """Whether nothing is rounded to integers."""
        return self.name in FLOATS


@dataclass
class CalibConfig:
    """Calibration of activation ranges. All methods share the keys, so that sweeps can mix them."""

    name: str = MISSING
    samples_per_class: int | None = limited(100, *limits.COUNT)
    batch_size: int = limited(100, *limits.COUNT)
    percentile: float = limited(99.99, limits.PERCENTILE, only=_with("calib.name", "percentile"))
    num_bins: int = limited(2048, at_most(2**15), only=_HISTOGRAM)  # the observer has no finer bins
    num_quantized_bins: int = limited(128, at_least(2), only=_with("calib.name", "entropy"))
    averaging_constant: float = limited(0.01, limits.SHARE, only=_AVERAGE)
    table: str | None = limited(None, is_path=True)
    trust: bool = False  # accepts a table of any origin
    images: str | None = limited(None, is_path=True)
    synthetic: bool = False


@dataclass
class ModelConfig:
    """The source of the FP32 network."""

    name: str = ""
    path: str | None = limited(None, is_path=True)
    fold: bool = True
    module: str | None = None
    state_dict: str | None = limited(None, only=_MODULE, is_path=True)
    # An untyped dict, because Hydra adds no keys to typed dicts
    module_args: Any = limited(None, only=_MODULE)
    inputs: Any = None  # untyped, because Hydra adds no keys to typed dicts
    outputs: list[str] | None = None

    @property
    def is_own(self) -> bool:
        """Whether the network is the user's own, which the data set `shapes` does not fit."""
        return self.path is not None or self.module is not None


@dataclass
class DataConfig:
    """The data set; the base class of each source's options."""

    name: str = MISSING
    root: str | None = limited(None, is_path=True)
    on_missing: str = limited(
        "shapes", one_of("shapes", "error"), only=_with("data.name", "cifar10")
    )


@dataclass
class SplitConfig(DataConfig):
    """The base class of the options of sources that may have to split their samples."""

    split_seed: int = limited(0, limits.SEED)
    test_fraction: float = limited(0.5, limits.PART)


@dataclass
class ArraysConfig(SplitConfig):
    """Options of `data=arrays`; see `data.sources.arrays`."""

    name: str = "arrays"
    inputs: Any = limited(None, limits.INPUTS)  # a name, or a dict of names by input
    labels: str | None = None
    groups: str | None = None
    classes: list[str] | None = limited(None, limits.CLASSES)
    offset: float = limited(0.0, limits.FINITE)
    scale: float = limited(1.0, limits.FACTOR)


@dataclass
class FolderConfig(SplitConfig):
    """Options of `data=folder`; see `data.sources.folder`."""

    name: str = "folder"
    labels: str | None = limited(None, one_of("none"))
    masks: str | None = limited(None, is_path=True)
    targets: str | None = limited(None, is_path=True)
    classes: list[str] | None = limited(None, limits.CLASSES)
    on_bad: str = limited("error", _ON_BAD)


@dataclass
class TableConfig(ArraysConfig):
    """Options of `data=table`; see `data.sources.table`."""

    name: str = "table"
    inputs: Any = limited(None, limits.COLUMNS)
    labels: Any = limited(None, limits.COLUMNS)
    shape: list[int] | None = limited(None, limits.SIZES)
    split: str | None = None
    test: str | None = limited(None, only=_with("data.name", "table"), is_path=True)
    folder: str | None = limited(None, is_path=True)
    tokenizer: str | None = limited(None, is_path=True)
    text: Any = limited(None, limits.TEXTS, only=_TOKENIZED)
    pairs: str = limited("together", one_of("together", "apart"), only=_TOKENIZED)
    max_tokens: int | None = limited(None, *limits.COUNT, at_most(2**20), only=_TOKENIZED)
    on_bad: str = limited("error", _ON_BAD)


@dataclass
class HuggingFaceConfig(TableConfig):
    """Options of `data=huggingface`; see `data.sources.huggingface`."""

    name: str = "huggingface"


@dataclass
class CocoConfig(SplitConfig):
    """Options of `data=coco`; see `data.sources.coco`."""

    name: str = "coco"
    images: str | None = limited(None, is_path=True)
    annotations: str | None = limited(None, is_path=True)
    classes: list[str] | None = limited(None, limits.CLASSES)
    on_bad: str = limited("error", _ON_BAD)
    test_fraction: float = limited(0.5, limits.SHARE)


@dataclass
class TaskConfig:
    """The task of a run; the base class of each task's options."""

    name: str = "auto"
    join: str | None = limited(None, one_of("mean", "max", "vote"))


@dataclass
class BinaryConfig(TaskConfig):
    """Options of `task=binary`; see `tasks.binary`."""

    name: str = "binary"
    threshold: float = limited(0.5, limits.FRACTION)


@dataclass
class MultilabelConfig(TaskConfig):
    """Options of `task=multilabel`; see `tasks.multilabel`."""

    name: str = "multilabel"
    threshold: float = limited(0.5, limits.PART)
    resamples: int = limited(2000, at_least(100))


@dataclass
class AnomalyConfig(TaskConfig):
    """Options of `task=anomaly`; see `tasks.anomaly`."""

    name: str = "anomaly"
    join: str | None = limited("mean", one_of("mean", "max"))
    max_fpr: float = limited(0.1, limits.SHARE)


@dataclass
class RegressionConfig(TaskConfig):
    """Options of `task=regression`; see `tasks.regression`."""

    name: str = "regression"
    primary: str = limited("mae", one_of("mae", "rmse"))
    resamples: int = limited(9999, at_least(100))


@dataclass
class SimilarityConfig(TaskConfig):
    """Options of `task=similarity`; see `tasks.similarity`."""

    name: str = "similarity"
    resamples: int = limited(9999, at_least(100))


@dataclass
class VerificationConfig(TaskConfig):
    """Options of `task=verification`; see `tasks.verification`."""

    name: str = "verification"
    primary: str = limited("eer", one_of("eer", "tar", "recall"))
    far: float = limited(0.01, limits.PART)
    k: int = limited(1, *limits.COUNT)
    resamples: int = limited(2000, at_least(100))


@dataclass
class CtcConfig(TaskConfig):
    """Options of `task=ctc`; see `tasks.ctc`."""

    name: str = "ctc"
    primary: str = limited("cer", one_of("cer", "wer"))
    alphabet: str | None = limited(None, is_path=True)
    blank: int = 0
    resamples: int = limited(9999, at_least(100))


@dataclass
class TokensConfig(TaskConfig):
    """Options of `task=tokens`; see `tasks.tokens`."""

    name: str = "tokens"
    primary: str = limited("entity_f1", one_of("entity_f1", "token_accuracy"))
    classes: str | None = limited(None, is_path=True)
    strict: bool = False
    resamples: int = limited(2000, at_least(100))


@dataclass
class PerplexityConfig(TaskConfig):
    """Options of `task=perplexity`; see `tasks.perplexity`."""

    name: str = "perplexity"
    resamples: int = limited(9999, at_least(100))


@dataclass
class DetectionConfig(TaskConfig):
    """Options of `task=detection`; see `tasks.detection`."""

    name: str = "detection"
    head: str = "auto"
    strides: list[int] = limited([8, 16, 32], limits.SIZES)
    anchors: Any = limited(None, limits.ANCHORS)
    boxes: str | None = limited(None, one_of("xyxy", "yxyx", "xywh", "cxcywh"))
    normalized: bool = False
    background: int | None = None
    labels: str = limited("indices", one_of("indices", "ids"))
    nms: bool | None = None
    score_threshold: float = limited(0.01, limits.FRACTION)
    iou_threshold: float = limited(0.65, limits.FRACTION)
    max_detections: int = limited(300, *limits.COUNT)
    resamples: int = limited(2000, at_least(100))


@dataclass
class InstanceSegmentationConfig(DetectionConfig):
    """Options of `task=instance_segmentation`; see `tasks.detection`."""

    name: str = "instance_segmentation"


@dataclass
class KeypointsConfig(DetectionConfig):
    """Options of `task=keypoints`; see `tasks.detection`."""

    name: str = "keypoints"
    sigmas: list[float] | None = limited(None, limits.SIGMAS)


@dataclass
class SegmentationConfig(TaskConfig):
    """Options of `task=segmentation`; see `tasks.segmentation`."""

    name: str = "segmentation"
    ignored: list[int] = limited([255])
    threshold: float = limited(0.5, limits.FINITE)
    resamples: int = limited(2000, at_least(100))


@dataclass
class DenseConfig(TaskConfig):
    """Options of `task=dense`; see `tasks.dense`."""

    name: str = "dense"
    primary: str = limited("psnr", one_of("psnr", "ssim", "rmse", "delta"))
    peak: float = limited(1.0, limits.POSITIVE)
    resamples: int = limited(9999, at_least(100))


@dataclass
class CustomConfig(TaskConfig):
    """Options of `task=custom`, the user's metric; see `tasks.custom`."""

    name: str = "custom"
    metric: Any = limited(None, limits.CALL)  # untyped, because Hydra adds no keys to typed dicts
    direction: str = limited("maximize", one_of("maximize", "minimize"))
    percent: bool = False
    resamples: int = limited(9999, at_least(100))


@dataclass
class PreprocessConfig:
    """Preprocessing of samples to network inputs, the same for every framework."""

    name: str = "raw"
    size: Any = limited(None, limits.SIZE)
    resize: str = limited("squash", one_of("squash", "fit", "crop", "letterbox"))
    crop_fraction: float = limited(0.875, limits.SHARE, only=_with("preprocess.resize", "crop"))
    filter: str = limited(
        "bilinear", one_of("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
    )
    pad: int = limited(0, limits.PIXEL, only=_LETTERBOX)
    align: str = limited("center", one_of("center", "top_left"), only=_LETTERBOX)
    channels: str = limited("rgb", one_of("rgb", "bgr", "grey"))
    scale: float = limited(1.0, limits.FACTOR)
    mean: Any = limited([0.0], limits.NUMBERS)  # a list of floats after loading
    std: Any = limited([1.0], limits.NUMBERS, limits.ALL_POSITIVE)


@dataclass
class EvaluateConfig:
    """The evaluation: its batch size, the samples to score and to choose by, and when it stops."""

    batch_size: int | None = limited(None, *limits.COUNT)
    split: str = limited("test", one_of("test", "held_out", "choice"))
    choice: str = limited("auto", one_of("auto", "held_out", "half", "none"))
    stop: str = limited("all", one_of("all", "decided"))
    models: int | None = limited(None, *limits.COUNT, only=_with("evaluate.stop", "decided"))


@dataclass
class LatencyConfig:
    """Latency measurement of the model and its FP32 baseline."""

    enabled: bool = True
    batch_size: int | None = limited(None, *limits.COUNT, only=_TIMED)
    threads: int = limited(1, *_THREADS, only=_TIMED)
    repeats: int = limited(100, *limits.COUNT, only=_TIMED)
    batch_repeats: int = limited(5, *limits.COUNT, only=_TIMED)
    max_seconds: float = limited(5.0, limits.POSITIVE, only=_TIMED)


@dataclass
class TargetConfig:
    """Another machine that runs the files; see `target`."""

    command: str | None = None
    timeout_s: float = limited(120.0, limits.POSITIVE, only=_TARGETED)


@dataclass
class TrackingConfig:
    """The MLflow store."""

    uri: str | None = None
    root: str = "mlruns"
    experiment_name: str = limited("resnet8ptq", limits.NAME)


@dataclass
class ReportConfig:
    """The limits of a pass, and options of verdict, recommendation and table."""

    max_drop: float = limited(0.01, limits.LOSS)
    min_sqnr_db: float = limited(25.0, limits.FINITE)
    min_accuracy: float | None = limited(None, limits.FRACTION)
    prefer: str = limited("speed", one_of("speed", "size", "accuracy"))
    columns: list[str] = field(default_factory=list)
    expected_accuracy: float | None = limited(None, limits.FRACTION)
    confirmations: int = limited(1, *limits.COUNT)


@dataclass
class SweepConfig:
    """Whether a sweep takes over the finished runs of an earlier one."""

    resume: bool = False


@dataclass
class BenchmarkConfig:
    """A benchmark of a suite: its files and its target value; see `experiment.mlperf_tiny`."""

    name: str | None = None
    folder: str | None = limited(None, only=_SUITE, is_path=True)
    target: float | None = limited(None, only=_SUITE)


@dataclass
class AnalysisConfig:
    """An analysis in place of a quantization run.

    `sensitivity` ranks the layers; `diagnose` reports causes of the loss against FP32;
    `compare` compares the tensors of a file with FP32; `profile` times each operator; `plan_test`
    reports the losses that the test samples can prove; `inspect` describes a network or a file.
    """

    name: str | None = limited(
        None, one_of("sensitivity", "diagnose", "compare", "profile", "plan_test", "inspect")
    )
    mode: str = limited("one_at_a_time", one_of("one_at_a_time", "all_but_one"))
    changed: float | None = limited(None, limits.SHARE)
    try_changes: bool = True


@dataclass
class SymmetricConfig:
    """Whether ranges are symmetric around zero; null for the default of dtype and backend."""

    activations: bool | None = None
    weights: bool | None = None


@dataclass
class PrecisionConfig:
    """The bits of each layer's weights, and layers in float where 8 bits are not faster."""

    plan: Any = limited(None, limits.PLAN)  # bits by layer, 32 for float, or "auto"
    max_bytes: int | None = limited(None, *limits.COUNT)
    max_drop: float | None = limited(None, limits.LOSS)
    placement: str | None = limited(None, one_of("measured"), only=_QUANTIZED)


@dataclass
class CorrectionsConfig:
    """Changes to the FP32 network that reduce the quantization loss; see `corrections`."""

    smooth_quant: bool = False
    equalization: bool = False
    bias_correction: bool = False
    adaround: bool = False
    adaround_iterations: int = limited(1000, *limits.COUNT, only=_ADAROUND)
    reconstruction: bool = False
    reconstruction_iterations: int = limited(1000, *limits.COUNT, only=_RECONSTRUCTION)


# The switches above; `corrections.sequence` applies them, in its own order.
CORRECTIONS = tuple(item.name for item in fields(CorrectionsConfig) if item.type is bool)


@dataclass
class WeightOnlyConfig:
    """Quantization of weights alone by `method=weight_only`; see `backends.onnx.weight_only`."""

    block_size: int | None = limited(32, limits.BLOCK)
    algorithm: str = limited("rtn", one_of("rtn", "hqq"))
    int8_products: bool = False


@dataclass
class QatConfig:
    """Fine-tuning by `method=qat`."""

    epochs: int = limited(3, *limits.COUNT)
    batch_size: int = limited(128, *limits.COUNT)
    learning_rate: float = limited(1e-3, limits.POSITIVE)
    temperature: float = limited(4.0, limits.POSITIVE)


@dataclass
class QuantizationConfig:
    """The settings of quantization; every backend receives them."""

    backend: BackendConfig = MISSING
    dtype: DtypeConfig = MISSING
    calib: CalibConfig = limited(MISSING, only=_CALIBRATED)
    method: str = limited("static", one_of("static", "dynamic", "mixed", "qat", "weight_only"))
    weight_only: WeightOnlyConfig = limited(WeightOnlyConfig, only=_WEIGHT_ONLY)
    per_channel: bool = limited(False, only=_QUANTIZED)
    format: str | None = limited(None, one_of("auto", "qdq", "qoperator"), only=_QUANTIZED)
    reduce_range: bool | None = limited(None, only=_QUANTIZED)
    symmetric: SymmetricConfig = limited(SymmetricConfig, only=_QUANTIZED)
    float_output: bool = limited(False, only=_QUANTIZED)
    float_tail: bool | None = limited(None, only=_QUANTIZED)
    attention: str = limited("weights", one_of("weights", "products", "all"), only=_QUANTIZED)
    op_types: list[str] | None = limited(None, limits.NAMES, only=_QUANTIZED)
    nodes_to_quantize: list[str] | None = limited(None, limits.NAMES, only=_QUANTIZED)
    nodes_to_exclude: Any = limited(list, only=_STORED)  # list of names, or "auto"
    corrections: CorrectionsConfig = limited(CorrectionsConfig, only=_QUANTIZED)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    slim: bool = False

    @property
    def computes_in_float(self) -> bool:
        """Whether the dtype is a float type, or weights alone are quantized.

        Activations then stay in float, except inside the products of `weight_only.int8_products`.
        """
        return self.dtype.is_float or self.method == "weight_only"

    @property
    def inference_precision(self) -> str:
        """The float type of the layers that stay in float, by OpenVINO's name, such as `f32`.

        FP32 is always computed in float32, so that the loss includes the other type's rounding.
        """
        return F32 if self.dtype.is_fp32 else self.backend.inference_precision

    @property
    def runs_elsewhere(self) -> bool:
        """Whether a target runs the files."""
        return False


@dataclass
class RunConfig(QuantizationConfig):
    """All settings of one run."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    max_drop: float = limited(0.01, limits.LOSS, only=_with("nodes_to_exclude", "auto"))
    held_out_images: int | None = limited(None, *limits.COUNT)
    qat: QatConfig = limited(QatConfig, only={**_QUANTIZED, **_with("method", "qat")})
    seed: int = limited(42, limits.SEED)
    threads: int | None = limited(None, *_THREADS)
    device: str = limited("auto", one_of("auto", "cpu", "cuda"))
    memory_gb: float | None = limited(None, limits.MEMORY)
    max_seconds: float | None = limited(None, limits.POSITIVE)
    cache_dir: str | None = None
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    # Values of a named sweep that differ by backend; other keys refer to them by interpolation.
    per_backend: dict[str, Any] = field(default_factory=dict)

    @property
    def runs_elsewhere(self) -> bool:
        """Whether a target runs the files."""
        return self.target.command is not None


def find_fields(key: str) -> list[list[Field[Any]]]:
    """Return the paths to a key, each a list of fields with the key's own field last.

    There is one path for each definition of the key, because the options of backends, sources
    and tasks may define it anew. An unknown key has no path.

    >>> [path] = find_fields("calib.percentile")
    >>> [item.name for item in path]
    ['calib', 'percentile']
    """
    reached: list[tuple[Any, list[Field[Any]]]] = [(RunConfig, [])]  # types with the paths to them
    for name in key.split("."):
        deeper = []
        for owner, path in reached:
            item = _find_field(owner, name)
            if item is not None:
                for kind in with_subclasses(_types_of(owner)[name]):
                    deeper.append((kind, [*path, item]))
        reached = deeper

    # Subclasses share an inherited field
    paths = {id(path[-1]): path for _, path in reached}
    return list(paths.values())


def _find_field(owner: Any, name: str) -> Field[Any] | None:
    """Return the field of a dataclass with this name; None for another type or an unknown name."""
    if is_dataclass(owner):
        for item in fields(owner):
            if item.name == name:
                return item
    return None


@cache
def _types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def with_subclasses(kind: Any) -> list[Any]:
    """Return a type, and for a dataclass also its direct and indirect subclasses.

    For `BackendConfig`, the function imports the options of every backend.
    """
    if kind is BackendConfig:
        schemas = [backend.schema for backend in find_backends().values()]
        return [*dict.fromkeys([kind, *schemas])]
    kinds = [kind]
    if isinstance(kind, type) and is_dataclass(kind):
        for direct in kind.__subclasses__():
            kinds += with_subclasses(direct)
    return kinds
