"""Data, network and task of a run: read, and checked to fit each other."""

from pathlib import Path
from typing import cast

import onnx

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.schema import RunConfig, TaskConfig
from resnet8ptq.core.errors import ModelError, UnsupportedError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data import registry
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.models import model
from resnet8ptq.models.contract import find_layout
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.selection import Selection, find_float_nodes
from resnet8ptq.tasks import registry as tasks
from resnet8ptq.tasks.contract import Setting, Task


def fit(dataset: Dataset, fp32: Fp32Model) -> Dataset:
    """Return the data set as the network takes it, its axes in order.

    Raises:
        ModelError: the network takes other samples.
        UnsupportedError: it takes a fixed number of samples at once, and more than one.
    """
    contract = fp32.contract
    if contract.batch not in (None, 1):
        raise UnsupportedError(
            f"{fp32.source}: takes {contract.batch} samples at once, and its batch cannot be freed "
            f"({fp32.conversion.why_fixed})"
        )
    return dataset.arranged(find_layout(dataset.test.input_shape, contract), contract.batch)


def load(config: RunConfig, cache_root: Path) -> tuple[Dataset, Fp32Model]:
    """Read data, whose place is settled, and network; return the data as the network takes them.

    Raises:
        PtqError: what is missing or does not fit, in one line.
    """
    data = registry.read(config.data, config.preprocess, cache_root, config.calib.images)
    fp32 = model.load(config.model, data, cache_root)
    return fit(data, fp32), fp32


def settle_task(config: TaskConfig, dataset: Dataset, scored: Split, fp32: Fp32Model) -> Task:
    """Return what scores the network on `scored`, samples of the data set as it takes them.

    Raises:
        ConfigError: the samples lack what the task needs.
        ModelError: the network returns other than what the task scores.
    """
    test = scored is dataset.test
    setting = Setting(
        dataset.name if test else f"the training samples of {dataset.name}",
        scored.labels,
        dataset.class_names,
        dataset.named,
        scored.input_shape,
        {output.name: output.shape for output in fp32.contract.outputs},
        fp32.final,
        dataset.class_ids,
    )
    try:
        return tasks.make(config, setting)
    except ModelError as error:
        raise ModelError(f"{fp32.source}: {error}") from None


def fit_settings(config: RunConfig, runtime: Runtime, fp32: Fp32Model) -> RunConfig:
    """Return the settings with what depends on the network decided, before anything is learned.

    Raises:
        ConfigError: a node or a layer is named that the network has not.
        UnsupportedError: the framework cannot quantize this network so.
    """
    if config.dtype.name != "fp32":
        find_float_nodes(onnx.load(fp32.onnx_path).graph, Selection.of(config))
    return cast(RunConfig, make_quantizer(config, runtime).fit(fp32))
