"""`+analysis=inspect`: what a network is, and whether the settings fit it; nothing is quantized."""

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache
from resnet8ptq.core.errors import ModelError, PtqError
from resnet8ptq.data import locate as locate_data
from resnet8ptq.data import registry
from resnet8ptq.data.sources.cifar10 import CLASS_NAMES
from resnet8ptq.models.contract import Contract, find_layout
from resnet8ptq.models.inspection import inspect, print_inspection
from resnet8ptq.models.locate import locate
from resnet8ptq.models.model import module_of

_BUILT_IN = ("cifar10", "shapes")  # both are [32, 32, 3], of ten classes


def run_inspection(config: RunConfig) -> None:
    """Print what the network is, what it takes, and what of that the settings lack.

    Raises:
        ModelError: it is missing, no model, unsafe, or nothing to quantize.
    """
    cache_root = cache.folder(config.cache_dir)
    path = locate(config.model, config.data.name)
    samples = _find_samples(config)
    shape = None if isinstance(samples, str) else samples[0]
    found = inspect(path, cache_root, shape, module_of(config.model))
    lines = [samples] if isinstance(samples, str) else _compare(config, found.contract, *samples)
    if config.backend.name not in found.quantized:
        lines.append(f"backend={config.backend.name}: unsupported for this format")
    print_inspection(found, lines)


def _find_samples(config: RunConfig) -> tuple[tuple[int, ...], int | None] | str:
    """Return a sample's shape and the number of classes, if they have names; or what is wrong."""
    if config.data.name in _BUILT_IN and config.data.root is None:
        size = config.preprocess.size or 32
        height, width = size if isinstance(size, list) else (size, size)
        return (height, width, 1 if config.preprocess.channels == "grey" else 3), len(CLASS_NAMES)
    try:
        settled = locate_data.settle(config.data)
        data = registry.read(settled, config.preprocess, cache.folder(config.cache_dir))
    except PtqError as error:
        return f"data={config.data.name}: {error}"
    return data.test.input_shape, len(data.class_names) if data.named else None


def _compare(
    config: RunConfig, contract: Contract, shape: tuple[int, ...], classes: int | None
) -> list[str]:
    data = f"data={config.data.name}"
    try:
        layout = find_layout(shape, contract)
        moved = "" if layout is None else f", their axes in the order {list(layout)}"
        lines = [f"{data}: samples {list(shape)} fit{moved}"]
    except ModelError as error:
        lines = [f"{data}: does not fit: it {error}; {_advise(config, contract)}"]
    [returned, *others] = contract.outputs
    if not others and len(returned.shape) == 1 and classes is not None:
        fits = returned.shape[0] in (None, classes)
        lines.append(
            f"{data}: {classes} classes {'fit' if fits else 'do not fit'}: it returns "
            f"{returned.shape[0]} values"
        )
    lines.append(
        f"preprocess={config.preprocess.name}: is it what the network was trained with? "
        "raw: 0..255 | unit: 0..1 | symmetric: -1..1 | torchvision_imagenet | caffe"
    )
    return lines


def _advise(config: RunConfig, contract: Contract) -> str:
    """Say which setting makes samples fit."""
    own = "data=arrays | folder | table | huggingface with data.root= takes yours"
    if len(contract.inputs) != 1 or len(contract.inputs[0].shape) != 3:
        return own
    sizes = contract.inputs[0].shape
    height, width, channels = (*sizes[1:], sizes[0]) if sizes[0] in (1, 3) else sizes
    sized = f"preprocess.size=[{height},{width}]" if height and width else "preprocess.size="
    grey = " preprocess.channels=grey" if channels == 1 else ""
    return f"{own}; {sized}{grey} makes pictures fit"
