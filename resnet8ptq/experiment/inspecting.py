"""`+analysis=inspect`: what a network is, and whether the settings fit it; nothing is quantized."""

from dataclasses import dataclass

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache
from resnet8ptq.core.errors import ModelError, PtqError
from resnet8ptq.data import registry
from resnet8ptq.data.preprocessing import RAW, Preprocessing
from resnet8ptq.data.sources.cifar10 import CLASS_NAMES
from resnet8ptq.experiment import mlperf_tiny
from resnet8ptq.experiment.settings import check_names, settle
from resnet8ptq.models.contract import IF_PICTURES, Contract, arranged, find_dtype, find_layout
from resnet8ptq.models.inspection import inspect, print_inspection
from resnet8ptq.models.locate import locate
from resnet8ptq.models.model import module_of

NO_DATA = (
    "data: not given; data=arrays | folder | table | huggingface | coco with data.root= (coco: "
    "data.images= and data.annotations=) says whether your samples fit"
)
_BUILT_IN = ("cifar10", "shapes")  # both are [32, 32, 3], of ten classes


def run_inspection(config: RunConfig, data_given: bool) -> None:
    """Print what the network is, what it takes, and what of that the settings lack.

    Args:
        data_given: `data` was set; else its default says nothing of the network.

    Raises:
        ModelError: it is missing, no model, unsafe, or nothing to quantize.
        UnsupportedError: a file of `benchmark` is not at hand.
    """
    check_names(config)
    config = mlperf_tiny.settle(config)
    cache_root = cache.folder(config.cache_dir)
    path = locate(config.model, config.data.name)
    samples = _find_samples(config)
    shape = None if isinstance(samples, str) else samples.shape
    found = inspect(path, cache_root, shape, module_of(config.model))
    if not data_given:
        lines = [NO_DATA]
    elif isinstance(samples, str):
        lines = [samples]
    else:
        lines = _compare(config, found.contract, samples)
    if config.backend.name not in found.quantized:
        lines.append(f"backend={config.backend.name}: unsupported for this format")
    print_inspection(found, lines)


@dataclass(frozen=True)
class _Samples:
    """Their shape, and how many classes they are of; 0 where they have none.

    Attributes:
        named: see `Dataset`.
        pictures: they are some, which can be given another size.
        dtype: as they are stored.
        steps: what is done to them.
    """

    shape: tuple[int, ...]
    classes: int
    named: bool = True
    pictures: bool = True
    dtype: str = "uint8"
    steps: Preprocessing = RAW


def _find_samples(config: RunConfig) -> _Samples | str:
    """Return what the samples are, or what is wrong with them."""
    if config.data.name in _BUILT_IN and config.data.root is None:
        size = config.preprocess.size or 32
        height, width = size if isinstance(size, list) else (size, size)
        channels = 1 if config.preprocess.channels == "grey" else 3
        return _Samples((height, width, channels), len(CLASS_NAMES))
    try:
        settings = settle(config)
        settled, root = settings.config, settings.runtime.cache_root
        data = registry.read(settled.data, settled.preprocess, root)
    except PtqError as error:
        return f"data={config.data.name}: {error}"
    test = data.test
    described = (test.has_pictures, test.images.dtype.name, test.preprocessing)
    return _Samples(test.input_shape, len(data.class_names), data.named, *described)


def _compare(config: RunConfig, contract: Contract, samples: _Samples) -> list[str]:
    data = f"data={config.data.name}"
    try:
        layout = find_layout(samples.shape, contract)
        find_dtype(samples.dtype, samples.steps, contract)
        moved = f" as {list(arranged(samples.shape, layout))}" if layout is not None else ""
        lines = [f"{data}: samples {list(samples.shape)} fit{moved}"]
    except ModelError as error:
        reason, _, advice = str(error).partition(IF_PICTURES)
        advice = f"; {advice} makes pictures fit" if advice and samples.pictures else ""
        lines = [f"{data}: does not fit: it {reason}{advice}"]
    shapes = [tensor.shape for tensor in contract.outputs]
    copies = shapes == [tensor.shape for tensor in contract.inputs]  # for task=anomaly
    if samples.classes and not copies and len(shapes) == 1 and len(shapes[0]) == 1:
        lines.append(f"{data}: {_compare_classes(samples, shapes[0][0])}")
    if contract.inputs[0].is_integer:
        return lines  # which nothing is done to
    lines.append(
        f"preprocess={config.preprocess.name}: is it what the network was trained with? "
        "raw: 0..255 | unit: 0..1 | symmetric: -1..1 | torchvision_imagenet | caffe"
    )
    return lines


def _compare_classes(samples: _Samples, values: int | None) -> str:
    """Say whether a network that returns so many values tells the classes apart."""
    known = samples.classes
    if not samples.named:
        fits = values is None or values >= known
        told = f"labels from 0 to {known - 1}"
    else:
        fits = values in (None, known)
        told = f"{known} classes"
    single = " (task=binary takes one)" if (known, values) == (2, 1) else ""
    returned = "any number of" if values is None else values
    return f"{told} {'fit' if fits else 'do not fit'}: it returns {returned} values{single}"
