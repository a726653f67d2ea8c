"""`+analysis=inspect`: summarizes a network and checks samples and settings, without a run."""

from dataclasses import dataclass

import numpy as np

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ModelError, PtqError, UnsupportedError
from resnet8ptq.core.records import names_of
from resnet8ptq.data.preprocessing import RAW, Preprocessing
from resnet8ptq.data.sources.cifar10 import CLASS_NAMES
from resnet8ptq.experiment.network_and_data import fit_data, fit_settings
from resnet8ptq.experiment.settings import KNOWN_FORM, Settings
from resnet8ptq.exploration import file_inspection
from resnet8ptq.models.contract import IF_PICTURES, Contract, SampleArray, arranged, match_samples
from resnet8ptq.models.model import load_network
from resnet8ptq.models.summary import Summary, print_summary, summarize
from resnet8ptq.tasks.classification import find_class_output
from resnet8ptq.tasks.registry import AUTO
from resnet8ptq.tasks.scoring.outputs import count_scores, describe, is_vector

OF_ONE_OUTPUT = (AUTO, "classification", "top5", "binary")

NO_DATA = (
    "data: not given; data=arrays | folder | table | huggingface | coco with data.root= (coco: "
    "data.images= and data.annotations=) checks whether your samples fit"
)


def inspect(settings: Settings, data_given: bool) -> None:
    """Print the network's summary, its requirements, and whether samples and settings fit.

    With `backend=file`, print the contents of the file instead.

    Args:
        settings: see `settings.resolve_to_inspect`.
        data_given: whether `data` was set; default data are not compared with the network.

    Raises:
        ConfigError, UnsupportedError: with `backend=file`, see `run_inspection`.
        ModelError: see `summarize`.
    """
    config = settings.config
    cache_root = settings.runtime.cache_root
    if not config.backend.quantizes:
        return file_inspection.run_inspection(settings.network.path, cache_root)
    samples = _find_samples(settings)
    sample = None
    if isinstance(samples, _SampleFacts):
        sample = samples.one
    summary = summarize(settings.network.path, cache_root, config=config.model, sample=sample)

    # Compare the samples with the network; if they fit, try the first steps of a run
    reasons: list[str] = []
    if not data_given:
        lines = [NO_DATA]
    elif isinstance(samples, str):
        lines = [samples]
    else:
        lines = _compare(config, summary.contract, samples)
        if samples.stored and "does not fit" not in lines[0]:
            reasons = _find_reasons(settings)
    lines += reasons or _find_limits(config, summary)
    print_summary(summary, lines)


def _find_limits(config: RunConfig, summary: Summary) -> list[str]:
    """Return the reason why the backend cannot run the network; empty if no reason is known."""
    name = config.backend.name
    if name in summary.lacking:
        operators = ", ".join(summary.lacking[name])
        return [f"backend={name}: unsupported: it lacks {operators}; try backend=onnx"]
    if config.backend.descriptor.operators and name not in summary.quantized:
        return [f"backend={name}: unsupported: it takes one input of float32"]
    return []


@dataclass(frozen=True)
class _SampleFacts:
    """The facts of a data set that must fit the network.

    Attributes:
        one: a sample as it is stored, [1, ...]; zeros if only the form is known.
        classes: number of classes; 0 without classes.
        named: see `Dataset`.
        pictures: whether the samples are pictures, which can be resized.
        stored: whether the samples were read; otherwise, only their form is known.
        steps: the preprocessing of the samples.
        single_labels: whether each sample has the label of one class.
    """

    one: SampleArray
    classes: int
    named: bool = True
    pictures: bool = True
    stored: bool = False
    steps: Preprocessing = RAW
    single_labels: bool = False


def _find_samples(settings: Settings) -> _SampleFacts | str:
    """Return the facts of the samples, or the reason why they cannot be read."""
    # Some data sets have a known form, so nothing need be read
    config = settings.config
    if config.data.name in KNOWN_FORM and config.data.root is None:
        size = config.preprocess.size or 32
        sizes = size if isinstance(size, list) else [size, size]
        channels = 1 if config.preprocess.channels == "grey" else 3
        sample = np.zeros((1, *sizes, channels), np.uint8)
        return _SampleFacts(sample, len(CLASS_NAMES), single_labels=True)

    # Others are read
    if settings.no_data:
        return f"data={config.data.name}: {settings.no_data}"
    try:
        data = settings.data
    except PtqError as error:
        return f"data={config.data.name}: {error}"

    # Take the facts from the test samples
    test = data.test
    labels = test.labels
    return _SampleFacts(
        one=test.stored[:1],
        classes=len(data.class_names),
        named=data.named,
        pictures=test.has_pictures,
        stored=True,
        steps=test.preprocessing,
        single_labels=labels is not None and labels.dtype.kind in "iu" and labels.ndim == 1,
    )


def _find_reasons(settings: Settings) -> list[str]:
    """Return the reason why the first steps of a run fail; empty if they succeed."""
    data = settings.data
    torch = settings.quantizer.runs_torch
    try:
        fp32 = load_network(settings.config.model, data, settings.runtime.cache_root, torch=torch)
        fit_data(data, fp32)
        fit_settings(settings, fp32)
    except UnsupportedError as error:
        return [f"a run is unsupported: {error}"]
    except PtqError as error:
        return [f"a run fails: {error}"]
    return []


def _compare(config: RunConfig, contract: Contract, samples: _SampleFacts) -> list[str]:
    """Return lines on whether samples, classes and preprocessing fit the network."""
    data = f"data={config.data.name}"
    try:
        matched = match_samples(samples.one, samples.steps, contract)
        shape = samples.one.shape[1:]
        form = ", ".join(names_of(samples.one.dtype)) or list(shape)
        line = f"{data}: samples {form} fit"
        if matched.layout:
            line += f" as {list(arranged(shape, matched.layout))}"
    except ModelError as error:
        reason, _, advice = str(error).partition(IF_PICTURES)
        line = f"{data}: does not fit: {reason}"
        if advice and samples.pictures:
            line += f"; {advice} makes pictures fit"
    lines = [line]

    # Compare the number of classes with the output that scores them
    kept = config.model.outputs or [tensor.name for tensor in contract.outputs]
    outputs = {}
    for tensor in contract.outputs:
        if tensor.name in kept:
            outputs[tensor.name] = tensor.shape
    shapes = list(outputs.values())
    # The network of task=anomaly copies its inputs
    copies = shapes == [tensor.shape for tensor in contract.inputs]
    if samples.classes and not copies and len(shapes) == 1 and is_vector(shapes[0]):
        values = count_scores(shapes[0])
        lines.append(f"{data}: {_compare_classes(samples, values, config.task.name)}")
    elif samples.single_labels and len(shapes) > 1 and config.task.name in OF_ONE_OUTPUT:
        name = find_class_output(outputs, samples.classes) or "NAME"
        lines.append(
            f"{data}: labels from 0 to {samples.classes - 1} do not fit: it returns "
            f"{describe(outputs)}; model.outputs=[{name}] keeps one, task=deviation compares all"
        )

    # Only the user knows the preprocessing of the training; integers have none, and values that
    # are no pictures usually have none
    if all(tensor.is_integer for tensor in contract.inputs):
        return lines
    has_pictures = any(len(tensor.shape) == 3 for tensor in contract.inputs)
    if config.preprocess.name == "raw" and not has_pictures:
        return lines
    lines.append(
        f"preprocess={config.preprocess.name}: is it what the network was trained with? "
        "raw: 0..255 | unit: 0..1 | symmetric: -1..1 | torchvision_imagenet | caffe"
    )
    return lines


def _compare_classes(samples: _SampleFacts, values: int | None, task: str = AUTO) -> str:
    """Return a text that compares the number of output values with the number of classes."""
    classes = samples.classes
    if (classes, values) == (2, 1) and task in (AUTO, "binary"):
        return "two classes fit task=binary: it returns one value"
    if not samples.named:
        fits = values is None or values >= classes
        labels = f"labels from 0 to {classes - 1}"
    else:
        fits = values in (None, classes)
        labels = f"{classes} classes"
    fit = "fit" if fits else "do not fit"
    returned = "any number of" if values is None else values
    return f"{labels} {fit}: it returns {returned} values"
