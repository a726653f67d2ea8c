"""The ranges of every setting: errors name the key, what it got and what it takes."""

import math
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass

from resnet8ptq.config.schema import (
    ANALYSES,
    CHANNELS,
    DIRECTIONS,
    DTYPES,
    ENGINES,
    ERRORS,
    FILTERS,
    FLOWS,
    FORMATS,
    METHODS,
    MODES,
    OBJECTIVES,
    ON_BAD,
    RESIZES,
    SPLITS,
    TFLITE_FLOWS,
    AnalysisConfig,
    AnomalyConfig,
    ArraysConfig,
    BackendConfig,
    BinaryConfig,
    CalibConfig,
    CustomConfig,
    DataConfig,
    FolderConfig,
    PreprocessConfig,
    RegressionConfig,
    RunConfig,
    SplitConfig,
    TableConfig,
    TaskConfig,
    TfliteConfig,
    TorchConfig,
)
from resnet8ptq.core.errors import ConfigError

MOST = 2**31 - 1  # of any count
MOST_THREADS = 1024
MOST_BINS = 2**20
MOST_PIXELS = 2**13  # along a side of a picture


def check_keys(node: object, prefix: str = "") -> None:
    """Refuse keys that were forced in by `+key=value`, and text that is not printable."""
    known = [item.name for item in fields(node)]  # type: ignore[arg-type]
    for key, value in vars(node).items():
        if key not in known:
            raise ConfigError(f"{prefix}{key}: no such key; takes {' | '.join(known)}")
        _check_text(f"{prefix}{key}", value)
        if is_dataclass(value):
            check_keys(value, f"{prefix}{key}.")


def _check_text(key: str, value: object) -> None:
    """Text goes into folders' names, logs, tables and pages; a path takes no NUL."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            _require(key, repr(text), text.isprintable(), "printable characters")


def check(config: RunConfig) -> None:
    """Raise `ConfigError` where a value is out of range or does not fit another."""
    _one_of("dtype.name", config.dtype.name, DTYPES)
    _check_data(config.data)
    _check_preprocess(config.preprocess)
    check_task(config.task)
    _check_backend(config.backend)
    _check_calib(config.calib)
    _check_quantization(config)
    _check_method(config)
    if config.evaluate.batch_size is not None:
        _at_least("evaluate.batch_size", config.evaluate.batch_size, 1)
    _one_of("evaluate.split", config.evaluate.split, SPLITS)
    for key in ("batch_size", "threads", "repeats", "batch_repeats"):
        _at_least(f"latency.{key}", getattr(config.latency, key), 1)
    _require("seed", config.seed, 0 <= config.seed < 2**32, "0 <= seed < 2**32")
    for key in ("max_drop", "min_accuracy", "expected_accuracy"):
        if (given := getattr(config.report, key)) is not None:
            _fraction(f"report.{key}", given)
    if config.threads is not None:
        _at_least("threads", config.threads, 1)
        _at_most("threads", config.threads, MOST_THREADS)
    _at_most("latency.threads", config.latency.threads, MOST_THREADS)
    if not config.tracking.experiment_name.strip():
        raise ConfigError("tracking.experiment_name: got '', takes a name")
    _check_analysis(config, config.analysis)
    check_objectives(config.objectives or [])
    _check_timed(config)


def _check_backend(backend: BackendConfig) -> None:
    if isinstance(backend, TorchConfig):
        _one_of("backend.flow", backend.flow, FLOWS)
        _one_of("backend.engine", backend.engine, ENGINES)
    elif isinstance(backend, TfliteConfig):
        _one_of("backend.flow", backend.flow, TFLITE_FLOWS)
    elif backend.name == "torch":
        raise ConfigError("backend.name: got 'torch' by itself; takes backend=torch")


def _check_data(data: DataConfig) -> None:
    _one_of("data.on_missing", data.on_missing, ("shapes", "error"))
    if not isinstance(data, SplitConfig):
        return
    _require("data.split_seed", data.split_seed, 0 <= data.split_seed < 2**32, "0 <= seed < 2**32")
    fraction = data.test_fraction
    _require("data.test_fraction", fraction, 0 < fraction < 1, "a fraction, 0 < f < 1")
    if isinstance(data, ArraysConfig | FolderConfig):
        names = data.classes
        named = names is None or len(set(names)) == len(names) >= 2
        _require("data.classes", names, named, "null or two or more different names")
    if isinstance(data, FolderConfig | TableConfig):
        _one_of("data.on_bad", data.on_bad, ON_BAD)
    if isinstance(data, TableConfig):
        _check_columns(data)
    if isinstance(data, ArraysConfig):
        _require("data.offset", data.offset, math.isfinite(data.offset), "a finite number")
        scale = data.scale
        _require("data.scale", scale, scale != 0 and math.isfinite(scale), "a number, not 0")


def _check_columns(data: TableConfig) -> None:
    inputs, shape = data.inputs, data.shape
    listed = inputs if isinstance(inputs, list) else [inputs]
    named = len(listed) > 0 and all(isinstance(name, str) for name in listed)
    _require("data.inputs", inputs, inputs is None or named, "null, a column or a list of columns")
    sized = shape is None or (len(shape) > 0 and all(0 < size <= MOST for size in shape))
    _require("data.shape", shape, sized, "null or sizes of at least 1")


def _check_preprocess(preprocess: PreprocessConfig) -> None:
    size = preprocess.size
    sides = size if isinstance(size, list) else [size, size]
    sized = len(sides) == 2 and all(type(n) is int and 0 < n <= MOST_PIXELS for n in sides)
    takes = f"null, a number of pixels up to {MOST_PIXELS}, or [height, width]"
    _require("preprocess.size", size, size is None or sized, takes)
    _one_of("preprocess.resize", preprocess.resize, RESIZES)
    _one_of("preprocess.filter", preprocess.filter, FILTERS)
    _one_of("preprocess.channels", preprocess.channels, CHANNELS)
    fraction, pad, scale = preprocess.crop_fraction, preprocess.pad, preprocess.scale
    _require("preprocess.crop_fraction", fraction, 0 < fraction <= 1, "a fraction, 0 < f <= 1")
    _require("preprocess.pad", pad, 0 <= pad <= 255, "a pixel, 0 to 255")
    _require("preprocess.scale", scale, scale != 0 and math.isfinite(scale), "a number, not 0")
    numbers = {"preprocess.mean": preprocess.mean, "preprocess.std": preprocess.std}
    for key, values in numbers.items():
        ok = len(values) > 0 and all(map(math.isfinite, values))
        _require(key, values, ok, "one number, or one for each channel")
    positive = all(value > 0 for value in preprocess.std)
    _require("preprocess.std", preprocess.std, positive, "numbers > 0")


def check_task(task: TaskConfig) -> None:
    """Raise `ConfigError` where an option of a task is out of range."""
    if isinstance(task, BinaryConfig):
        _fraction("task.threshold", task.threshold)
    if isinstance(task, AnomalyConfig):
        got = task.max_fpr
        _require("task.max_fpr", got, 0 < got <= 1, "a false positive rate, 0 < f <= 1")
    if isinstance(task, RegressionConfig):
        _one_of("task.primary", task.primary, ERRORS)
    if isinstance(task, CustomConfig):
        _one_of("task.direction", task.direction, DIRECTIONS)
    if isinstance(task, RegressionConfig | CustomConfig):
        _at_least("task.resamples", task.resamples, 100)


def _check_calib(calib: CalibConfig) -> None:
    if calib.samples_per_class is not None:
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
    _at_most("calib.num_bins", calib.num_bins, MOST_BINS)
    constant = calib.averaging_constant
    _require("calib.averaging_constant", constant, 0 < constant <= 1, "0 < constant <= 1")


def _check_quantization(config: RunConfig) -> None:
    _one_of("method", config.method, METHODS)
    if config.format is not None:
        _one_of("format", config.format, FORMATS)
    for key in ("op_types", "nodes_to_quantize"):
        names = getattr(config, key)
        _require(key, names, names is None or len(names) > 0, "null or a list of names")
    excluded = config.nodes_to_exclude
    named = isinstance(excluded, list) and all(isinstance(name, str) for name in excluded)
    _require(
        "nodes_to_exclude", repr(excluded), named or excluded == "auto", "a list of names | auto"
    )
    _fraction("max_drop", config.max_drop)
    _at_least("held_out_images", config.held_out_images, 1)
    _at_least("corrections.adaround_iterations", config.corrections.adaround_iterations, 1)
    _at_least("qat.epochs", config.qat.epochs, 1)
    _at_least("qat.batch_size", config.qat.batch_size, 1)
    for key in ("learning_rate", "temperature"):
        value = getattr(config.qat, key)
        _require(f"qat.{key}", value, 0 < value < math.inf, "a number > 0")


def _check_analysis(config: RunConfig, analysis: AnalysisConfig) -> None:
    if analysis.name is None:
        if analysis != AnalysisConfig():
            raise ConfigError(
                "analysis: its keys have no effect without +analysis=sensitivity | inspect"
            )
        return
    _one_of("analysis.name", analysis.name, ANALYSES)
    _one_of("analysis.mode", analysis.mode, MODES)
    if analysis.name == "inspect":
        return
    with_it = f"with analysis={analysis.name}"
    dtypes = " | ".join(name for name in DTYPES if name != "fp32")
    _require("dtype.name", "'fp32'", config.dtype.name != "fp32", f"{dtypes} {with_it}")
    chosen, excluded = config.nodes_to_quantize, config.nodes_to_exclude
    _require("nodes_to_quantize", chosen, chosen is None, f"null {with_it}")
    _require("nodes_to_exclude", excluded, not excluded, f"[] {with_it}")


def check_objectives(objectives: Sequence[str]) -> None:
    """Raise `ConfigError` for a name that no metric has, or that comes twice."""
    for name in objectives:
        if name not in OBJECTIVES:
            raise ConfigError(f"objectives: got {name!r}, takes {' | '.join(OBJECTIVES)}")
    if len(set(objectives)) < len(objectives):
        raise ConfigError(f"objectives: got {' '.join(objectives)}, takes each once")


def _check_timed(config: RunConfig) -> None:
    names = config.objectives or []
    timed = [name for name in names if name.startswith(("latency", "speedup"))]
    if timed and not config.latency.enabled:
        raise ConfigError(f"latency.enabled: got false, takes true with objectives={timed[0]}")


def _require(key: str, got: object, ok: bool, takes: str) -> None:
    if not ok:
        raise ConfigError(f"{key}: got {got}, takes {takes}")


def _one_of(key: str, got: str, choices: Collection[str]) -> None:
    _require(key, repr(got), got in choices, " | ".join(choices))


def _at_least(key: str, got: int, least: int) -> None:
    _require(key, got, got >= least, f"an integer >= {least}")
    _at_most(key, got, MOST)


def _at_most(key: str, got: int, most: int) -> None:
    _require(key, got, got <= most, f"an integer <= {most}")


def _check_method(config: RunConfig) -> None:
    """Refuse what would undo the method's work, or be undone by it."""
    if config.calib.table is not None and config.method != "static":
        raise ConfigError(f"calib.table: has no effect with method={config.method}")
    if config.method == "qat" and config.corrections.equalization:
        raise ConfigError("corrections.equalization: changes ranges that method=qat has learned")


def _fraction(key: str, got: float) -> None:
    _require(key, got, 0 <= got <= 1, "a fraction, 0 to 1")
